"""What was used, by day: bounded sums, no requests."""

from __future__ import annotations

from django.db import models


class UsageDay(models.Model):
    """The sums of one day of UTC, API key, deployment, adapter and end user."""

    day = models.DateField()
    key = models.CharField(max_length=64, help_text="The key's prefix; empty: requests without a key.")
    deployment = models.CharField(max_length=64, help_text="Its public id.")
    adapter = models.CharField(max_length=255, help_text="Empty: the base model.")
    end_user = models.CharField(max_length=64, help_text="As the client named it; empty: nobody, or long ago.")
    requests = models.PositiveBigIntegerField()
    failed = models.PositiveBigIntegerField(help_text="Requests that ended with an error.")
    prompt_tokens = models.PositiveBigIntegerField()
    cached_tokens = models.PositiveBigIntegerField(help_text="Prompt tokens that the prefix cache had.")
    output_tokens = models.PositiveBigIntegerField()
    last_at = models.DateTimeField(help_text="The end of the last request.")

    class Meta:
        verbose_name = "usage"
        verbose_name_plural = "usage"
        ordering = ["-day", "key", "deployment", "adapter", "end_user"]
        constraints = [
            models.UniqueConstraint(
                fields=["day", "key", "deployment", "adapter", "end_user"], name="one_row_of_usage_a_day"
            )
        ]
        indexes = [
            models.Index(fields=["key", "day"], name="usage_by_key"),
            models.Index(fields=["deployment", "day"], name="usage_by_deployment"),
        ]

    def __str__(self) -> str:
        return f"{self.day} {self.key or 'no key'} {self.deployment}"
