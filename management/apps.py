"""The Django app of the control plane."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models import IntegerField

from management.lookups import IntegerIn


class ManagementConfig(AppConfig):
    """The registries and their admin."""

    name = "management"
    verbose_name = "Serving"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the lookups."""
        IntegerField.register_lookup(IntegerIn)
