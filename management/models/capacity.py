"""Machines and prices."""

from __future__ import annotations

from django.core.validators import MinValueValidator
from django.db import models

DEFAULT_CAPACITY = 16
"""Workers of a machine without a limit. Memory ends most machines sooner; the operator knows their models."""


class Node(models.Model):
    """A machine that runs workers, with its capacity. The reconciler writes what it observes."""

    name = models.CharField(max_length=128, unique=True)
    address = models.CharField(max_length=64, blank=True)
    provider = models.CharField(max_length=32, default="ONPREM")
    region = models.CharField(max_length=64, blank=True)
    cpus = models.PositiveIntegerField(default=0)
    memory_bytes = models.PositiveBigIntegerField(default=0)
    gpu_type = models.CharField(max_length=64, blank=True)
    gpus = models.PositiveIntegerField(default=0)
    max_workers = models.PositiveIntegerField(
        null=True, blank=True, help_text="Most workers on this machine; empty is 16, or one per CPU if it has more."
    )
    seen_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def capacity(self) -> int:
        """The most workers that the machine holds."""
        return max(DEFAULT_CAPACITY, self.cpus) if self.max_workers is None else self.max_workers


class Price(models.Model):
    """What one accelerator, or a worker without one, costs per hour."""

    gpu_type = models.CharField(max_length=64, blank=True, help_text="Empty: a worker without an accelerator.")
    provider = models.CharField(max_length=32, blank=True, help_text="Empty: any provider.")
    region = models.CharField(max_length=64, blank=True, help_text="Empty: any region.")
    spot = models.BooleanField(default=False)
    price_per_hour = models.FloatField(validators=[MinValueValidator(0.0)], help_text="USD per hour.")

    class Meta:
        ordering = ["gpu_type", "provider", "region", "spot"]
        constraints = [
            models.UniqueConstraint(fields=["gpu_type", "provider", "region", "spot"], name="one_price_per_choice")
        ]

    def __str__(self) -> str:
        return f"{self.gpu_type or 'CPU'} {self.price_per_hour:g} USD/h"
