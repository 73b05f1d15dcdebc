"""Deployments. People and APIs write the desired state, the reconciler the observed state."""

from __future__ import annotations

import secrets
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from management.autoscale.config import ScalingConfig, Strategy
from management.models.model import Model, ModelVersion, valid_name
from management.snapshot import WorkerRole

MAX_WORKERS = 1000
DAY_S = 86_400
LONGEST_S = 365 * DAY_S

ALLOWED_STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "llm": tuple(Strategy),
    # Embeddings have no first token, and their duration depends on the input alone.
    "embedding": (Strategy.RPS,),
}
"""The autoscaling strategies of each kind of inference."""


def new_public_id() -> str:
    """An id that APIs show; it cannot be guessed."""
    return secrets.token_hex(8)


def _seconds(default: int, minimum: int, help_text: str) -> models.PositiveIntegerField:
    return models.PositiveIntegerField(
        default=default, validators=[MinValueValidator(minimum), MaxValueValidator(LONGEST_S)], help_text=help_text
    )


class Deployment(models.Model):
    """A model version with engine options, scaling rules and 0…n workers."""

    class State(models.TextChoices):
        PROVISIONING = "provisioning", "Provisioning"
        ACTIVE = "active", "Active"
        INACTIVE = "inactive", "Inactive"
        FAILED = "failed", "Failed"
        DELETING = "deleting", "Deleting"
        DELETED = "deleted", "Deleted"

    # What it is.
    name = models.CharField(max_length=128, validators=[valid_name], help_text="The name that clients use.")
    public_id = models.CharField(max_length=32, unique=True, default=new_public_id, editable=False)
    title = models.CharField(
        max_length=200, blank=True, editable=False, help_text="The name that an API's client gave; need not be unique."
    )
    owner = models.CharField(max_length=150, blank=True, editable=False, help_text="Who created the deployment.")
    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="deployments")
    inference_kind = models.CharField(
        max_length=16, choices=Model.Kind, default=Model.Kind.LLM, help_text="What its workers use the model for."
    )
    is_default = models.BooleanField(default=False, help_text="Serves requests that name no model.")
    served_name = models.CharField(
        max_length=128,
        blank=True,
        editable=False,
        validators=[valid_name],
        help_text="The name under which clients find it as one of several versions; empty is its own name.",
    )
    label = models.CharField(
        max_length=64,
        blank=True,
        editable=False,
        help_text="Which version of the served name it is; empty is the number of its model's version.",
    )
    is_default_version = models.BooleanField(
        default=True, editable=False, help_text="Serves requests for the served name that give no version."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    # How its workers run.
    engine_options = models.JSONField(
        default=dict, blank=True, help_text="Engine options by name; an absent option has its default."
    )
    chat_template = models.TextField(
        blank=True, max_length=65_536, help_text="A Jinja chat template instead of the model's own."
    )

    # How it scales.
    min_workers = models.PositiveIntegerField(default=1, validators=[MaxValueValidator(MAX_WORKERS)])
    max_workers = models.PositiveIntegerField(
        default=1, validators=[MinValueValidator(1), MaxValueValidator(MAX_WORKERS)]
    )
    prefill_workers = models.PositiveIntegerField(
        default=0,
        validators=[MaxValueValidator(MAX_WORKERS)],
        help_text="Workers that only compute prompts and hand the blocks to the others; 0: each does both.",
    )
    strategy = models.CharField(
        max_length=32,
        choices=[(each.value, each.value) for each in Strategy],
        default=Strategy.TTFT.value,
        help_text="What is measured: the mean time to the first token, requests per second and worker, or the mean "
        "duration of a request.",
    )
    upper_threshold = models.FloatField(
        default=1.0, validators=[MinValueValidator(0.0)], help_text="Above it a worker is added; s or requests/s."
    )
    lower_threshold = models.FloatField(
        default=0.2, validators=[MinValueValidator(0.0)], help_text="Below it a worker is removed; s or requests/s."
    )
    up_window_s = _seconds(300, 1, "Seconds of evidence before a worker is added.")
    down_window_s = _seconds(300, 1, "Seconds of evidence before a worker is removed.")
    start_timeout_s = _seconds(1200, 0, "Seconds in which a worker must be ready.")
    drain_timeout_s = _seconds(1200, 0, "Seconds in which a removed worker may finish its requests.")
    scale_to_zero = models.BooleanField(default=False, help_text="Whether it sleeps without workers while idle.")
    idle_timeout_s = _seconds(1800, 0, "Seconds without requests before it sleeps.")
    fast_autoscaling = models.BooleanField(default=False, help_text="Keep one loaded spare worker if there is room.")
    share_while_starting = models.BooleanField(
        default=False, help_text="While no worker is ready, another deployment of the same model serves the requests."
    )
    immediate_scale_down = models.BooleanField(
        default=False, help_text="Workers above a lowered maximum leave at once, not one per window."
    )
    max_price_per_hour = models.FloatField(
        null=True, blank=True, validators=[MinValueValidator(0.0)], help_text="Most USD per hour for all workers."
    )
    min_throughput_rate = models.FloatField(
        null=True, blank=True, validators=[MinValueValidator(0.0)], help_text="Requests/s that must always be possible."
    )

    # Where its workers should run.
    gpu_type = models.CharField(max_length=64, blank=True, help_text="Accelerator of a worker; empty is any.")
    gpus_per_worker = models.PositiveIntegerField(default=0, validators=[MaxValueValidator(64)])
    use_other_gpus = models.BooleanField(default=False, help_text="Whether another accelerator may be used.")
    expand_gpu_types = models.BooleanField(default=True, help_text="Whether a family's name means all its variants.")
    spot = models.BooleanField(default=False, help_text="Whether workers may run on spot machines.")
    cloud_providers = models.JSONField(default=list, blank=True, help_text="Allowed providers, each with its regions.")
    instance_types = models.JSONField(default=list, blank=True, help_text="Allowed types of machines; none is any.")
    use_on_prem = models.BooleanField(default=False, help_text="Whether workers run on the operator's own machines.")
    on_prem_node_ids = models.JSONField(default=list, blank=True, help_text="The allowed own machines; none is any.")
    use_cloudburst = models.BooleanField(default=False, help_text="Whether full own machines are left for a cloud.")

    vendor_fields = models.JSONField(
        default=dict, blank=True, editable=False, help_text="Fields of an API that it only keeps and returns."
    )

    # What people asked for last.
    replicas = models.PositiveIntegerField(
        default=0, editable=False, help_text="Number of workers that a person asked for last; 0 stopped the deployment."
    )
    generation = models.PositiveIntegerField(
        default=1, editable=False, help_text="Counts starts, stops, scalings and changes."
    )
    asked_generation = models.PositiveIntegerField(
        default=0, editable=False, help_text="The generation in which a person asked for that number."
    )
    deleted = models.BooleanField(default=False, editable=False)
    force = models.BooleanField(default=False, editable=False, help_text="Leaving workers do not finish requests.")

    # What the reconciler observed and decided.
    state = models.CharField(max_length=16, choices=State, default=State.INACTIVE, editable=False)
    reason = models.TextField(blank=True, editable=False, help_text="Why the deployment failed or is not ready.")
    observed_generation = models.PositiveIntegerField(default=0, editable=False)
    target_workers = models.PositiveIntegerField(default=0, editable=False)
    scale_blocked = models.CharField(max_length=32, blank=True, editable=False)
    price_per_hour = models.FloatField(default=0.0, editable=False, help_text="USD per hour of its workers now.")
    cost = models.FloatField(default=0.0, editable=False, help_text="USD so far.")
    cost_updated_at = models.DateTimeField(null=True, editable=False)
    ended_at = models.DateTimeField(null=True, editable=False)
    model_info = models.BinaryField(
        null=True, editable=False, help_text="The ModelInfo of its last ready worker, as msgpack."
    )

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["is_default"], condition=models.Q(is_default=True), name="one_default_deployment"
            ),
            models.UniqueConstraint(
                fields=["name"],
                condition=models.Q(deleted=False),
                name="one_deployment_per_name",
                violation_error_message="A deployment with this name exists.",
            ),
        ]
        permissions = [("operate_deployment", "Can start and stop deployments")]

    def __str__(self) -> str:
        return self.name

    def role_of(self, index: int) -> WorkerRole:
        """The role of the worker of that index. It follows from its place, so that its successor has the same."""
        if not self.prefill_workers:
            return WorkerRole.BOTH
        return WorkerRole.PREFILL if index < self.prefill_workers else WorkerRole.DECODE

    def clean(self) -> None:
        """Refuse fields that contradict each other; raises ValidationError by field."""
        found: dict[str, Any] = {}
        if self.max_workers < self.min_workers:
            found["max_workers"] = f"must be at least min_workers, which is {self.min_workers}, got {self.max_workers}"
        if self.prefill_workers >= self.max_workers:
            found["prefill_workers"] = (
                f"must be below max_workers, which is {self.max_workers}, got {self.prefill_workers}"
            )
        elif self.prefill_workers and self.inference_kind != Model.Kind.LLM:
            found["prefill_workers"] = f"must be 0 for {self.inference_kind}, got {self.prefill_workers}"
        if self.lower_threshold >= self.upper_threshold:
            found["lower_threshold"] = (
                f"must be below upper_threshold, which is {self.upper_threshold:g}, got {self.lower_threshold:g}"
            )
        if self.scale_to_zero and self.min_workers:
            found["scale_to_zero"] = f"conflicts with min_workers {self.min_workers}; to sleep, min_workers must be 0"
        allowed = ALLOWED_STRATEGIES[self.inference_kind]
        if self.strategy not in allowed:
            found["strategy"] = f"must be one of {', '.join(allowed)} for {self.inference_kind}, got {self.strategy}"
        if self.min_throughput_rate and self.min_workers:
            found["min_throughput_rate"] = "conflicts with min_workers"
        if found:
            raise ValidationError(found)

    @property
    def served_as(self) -> str:
        """The name under which clients find it, alone or as one of several versions."""
        return self.served_name or self.name

    @property
    def version_label(self) -> str:
        """Which version of that name it is, such as "1.0"."""
        return self.label or f"{self.version.number}.0"

    @property
    def scaling(self) -> ScalingConfig:
        """The autoscaler's configuration."""
        return ScalingConfig(
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            strategy=Strategy(self.strategy),
            upper=self.upper_threshold,
            lower=self.lower_threshold,
            up_window_s=float(self.up_window_s),
            down_window_s=float(self.down_window_s),
            start_timeout_s=float(self.start_timeout_s),
            drain_timeout_s=float(self.drain_timeout_s),
            scale_to_zero=self.scale_to_zero,
            idle_timeout_s=float(self.idle_timeout_s),
            max_price_per_hour=self.max_price_per_hour or None,
            min_throughput_rate=self.min_throughput_rate or None,
            fast=self.fast_autoscaling,
            immediate_scale_down=self.immediate_scale_down,
        )

    @property
    def current_state(self) -> str:
        """The observed state, or what follows from a person's word that the reconciler has not acted on yet."""
        if self.deleted:
            return str(self.State.DELETED if self.state == self.State.DELETED else self.State.DELETING)
        if self.observed_generation == self.generation:
            return self.state
        if self.stopped:
            return str(self.State.INACTIVE)
        return str(self.State.ACTIVE if self.state == self.State.ACTIVE else self.State.PROVISIONING)

    @property
    def wakeable(self) -> bool:
        """Whether a request may start a worker: it is neither deleted nor stopped for good."""
        return not self.deleted and (self.scale_to_zero or not self.stopped)

    @property
    def wanted_workers(self) -> int:
        """How many workers should run: what a person asked for, until the reconciler has acted on it and goes by the load as well."""
        return self.replicas if self.asked_generation > self.observed_generation else self.target_workers

    @property
    def stopped(self) -> bool:
        """Whether a person stopped it, or never started it, and no request has woken it since."""
        return not self.replicas and not self.wanted_workers
