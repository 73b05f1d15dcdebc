"""Workers as the reconciler observes them."""

from __future__ import annotations

from django.db import models

from management.models.deployment import Deployment
from management.models.model import ModelVersion


class Worker(models.Model):
    """An engine process. The epoch tells it from earlier workers of the same index."""

    class State(models.TextChoices):
        STARTING = "starting", "Starting"
        LOADING = "loading", "Loading"
        READY = "ready", "Ready"
        DRAINING = "draining", "Draining"
        EXITED = "exited", "Exited"
        FAILED = "failed", "Failed"

    LIVE = (State.STARTING, State.LOADING, State.READY, State.DRAINING)

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="workers")
    version = models.ForeignKey(
        ModelVersion,
        on_delete=models.CASCADE,
        related_name="+",
        help_text="The version that the worker was launched with.",
    )
    engine_options = models.JSONField(default=dict)
    index = models.PositiveIntegerField()
    epoch = models.PositiveIntegerField()
    state = models.CharField(max_length=16, choices=State, default=State.STARTING)
    spare = models.BooleanField(default=False, help_text="Waits until another worker is wanted, and takes no requests.")
    reason = models.TextField(blank=True)
    address = models.CharField(max_length=256, help_text="The address that the worker listens on.")
    process_id = models.PositiveIntegerField(null=True)
    node = models.CharField(max_length=128, blank=True, help_text="The machine that it runs on.")
    price_per_hour = models.FloatField(default=0.0, help_text="USD per hour.")
    started_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-started_at"]
        constraints = [models.UniqueConstraint(fields=["deployment", "index", "epoch"], name="one_worker_per_epoch")]

    def __str__(self) -> str:
        return self.worker_id

    @property
    def worker_id(self) -> str:
        """The worker's name in messages and logs: `deployment/index`."""
        return f"{self.deployment.name}/{self.index}"

    @property
    def incarnation(self) -> str:
        """The worker's name with its epoch, which no other worker ever has: `deployment/index/epoch`."""
        return f"{self.worker_id}/{self.epoch}"
