"""Who may call, and what was done."""

from __future__ import annotations

from typing import Any

from django.db import models
from rest_framework_api_key.models import AbstractAPIKey

SCOPES = ("infer", "metrics", "manage")


def default_scopes() -> list[str]:
    """What a new key may do."""
    return ["infer"]


class ApiKey(AbstractAPIKey):
    """A key for the planes: only its hash is stored, and it is shown once."""

    scopes = models.JSONField(default=default_scopes, help_text=f"Some of {', '.join(SCOPES)}.")

    class Meta(AbstractAPIKey.Meta):
        verbose_name = "API key"
        verbose_name_plural = "API keys"


class AuditEvent(models.Model):
    """One thing that somebody did to a registry. Rows are added and never changed."""

    at = models.DateTimeField(auto_now_add=True)
    actor = models.CharField(max_length=150)
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=200)
    details = models.JSONField(default=dict)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.target}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Add only."""
        if self.pk is not None:
            raise TypeError("audit events are never changed")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        """Never."""
        raise TypeError("audit events are never deleted")
