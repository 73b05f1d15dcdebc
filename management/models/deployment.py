"""Deployments and workers. People and APIs write the desired state, the reconciler the observed state."""

from __future__ import annotations

from django.db import models

from management.models.model import ModelVersion, valid_name


class Deployment(models.Model):
    """A model version with engine options and a desired number of workers."""

    class State(models.TextChoices):
        STOPPED = "stopped", "Stopped"
        STARTING = "starting", "Starting"
        READY = "ready", "Ready"
        STOPPING = "stopping", "Stopping"
        FAILED = "failed", "Failed"

    name = models.CharField(max_length=128, unique=True, validators=[valid_name])
    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="deployments")
    is_default = models.BooleanField(default=False, help_text="Serves requests that name no model.")
    engine_options = models.JSONField(
        default=dict, blank=True, help_text="Engine options as a JSON object; an absent option has its default."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    replicas = models.PositiveIntegerField(default=0, help_text="Desired number of workers; 0 stops the deployment.")
    generation = models.PositiveIntegerField(
        default=1, editable=False, help_text="Counts the starts of the deployment."
    )

    state = models.CharField(max_length=16, choices=State, default=State.STOPPED, editable=False)
    reason = models.TextField(blank=True, editable=False, help_text="Why the deployment failed or is not ready.")
    observed_generation = models.PositiveIntegerField(default=0, editable=False)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["is_default"], condition=models.Q(is_default=True), name="one_default_deployment"
            )
        ]
        permissions = [("operate_deployment", "Can start and stop deployments")]

    def __str__(self) -> str:
        return self.name


class Worker(models.Model):
    """An engine process as the reconciler observes it. The epoch tells it from earlier workers of the same index."""

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
    reason = models.TextField(blank=True)
    address = models.CharField(max_length=256, help_text="The address that the worker listens on.")
    process_id = models.PositiveIntegerField(null=True)
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
