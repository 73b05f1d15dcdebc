"""API keys and audit events."""

from __future__ import annotations

from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from rest_framework_api_key.models import AbstractAPIKey, BaseAPIKeyManager

SCOPES = ("infer", "metrics", "manage")


LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000.0
MOST_PER_MINUTE, MOST_PER_DAY = (1 << 31) - 1, (1 << 63) - 1
"""What the columns hold."""


def default_scopes() -> list[str]:
    """The scopes of a new key."""
    return ["infer"]


class ApiKeys(BaseAPIKeyManager):
    """The library's manager, whose keys get their ids from the database."""

    def assign_key(self, obj: Any) -> str:
        """Give the row a new key's prefix and hash; returns the key. The library would put both into the row's id."""
        key: str
        key, obj.prefix, obj.hashed_key = self.key_generator.generate()
        return key


class ApiKey(AbstractAPIKey):
    """An API key of the planes. Only its hash is stored, in no id and no address; the key is shown once."""

    objects = ApiKeys()

    id = models.BigAutoField(primary_key=True)
    scopes = models.JSONField(default=default_scopes, help_text=f"What the key allows: any of {', '.join(SCOPES)}.")
    deployment = models.ForeignKey(
        "management.Deployment",
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="keys",
        help_text="The only deployment that the key opens; empty: all.",
    )

    weight = models.FloatField(
        default=1.0,
        blank=True,
        validators=[MinValueValidator(LEAST_WEIGHT), MaxValueValidator(MOST_WEIGHT)],
        help_text="Its share of a busy server among other keys: one of weight 2 is served twice as many tokens as one of 1.",
    )
    requests_per_minute = models.PositiveIntegerField(
        default=0,
        blank=True,
        validators=[MaxValueValidator(MOST_PER_MINUTE)],
        help_text="Requests a minute, counted by each web process; 0: any number.",
    )
    tokens_per_minute = models.PositiveIntegerField(
        default=0,
        blank=True,
        validators=[MaxValueValidator(MOST_PER_MINUTE)],
        help_text="Prompt and output tokens a minute, counted by each web process; 0: any number.",
    )
    tokens_per_day = models.PositiveBigIntegerField(
        default=0,
        blank=True,
        validators=[MaxValueValidator(MOST_PER_DAY)],
        help_text="The same for a day of UTC, counted by all web processes together within 20 s. 0: any number.",
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
