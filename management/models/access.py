"""API keys and audit events."""

from __future__ import annotations

from typing import Any

from django.db import models
from rest_framework_api_key.models import AbstractAPIKey

SCOPES = ("infer", "metrics", "manage")


def default_scopes() -> list[str]:
    """The scopes of a new key."""
    return ["infer"]


class ApiKey(AbstractAPIKey):
    """An API key of the planes. Only its hash is stored; the key is shown once."""

    scopes = models.JSONField(default=default_scopes, help_text=f"What the key allows: any of {', '.join(SCOPES)}.")
    deployment = models.ForeignKey(
        "management.Deployment",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="keys",
        help_text="The only deployment that the key opens; empty: all.",
    )

    class Meta(AbstractAPIKey.Meta):
        verbose_name = "API key"
        verbose_name_plural = "API keys"


class AuditEvent(models.Model):
    """A change to a registry. Rows are append-only."""

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
        """Insert; raises TypeError for an existing row."""
        if self.pk is not None:
            raise TypeError("audit events are never changed")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        """Raise TypeError: events are kept."""
        raise TypeError("audit events are never deleted")
