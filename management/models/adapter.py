"""Adapters and their versions. A deployment owns its adapters: no other deployment serves them, and they go with it."""

from __future__ import annotations

from django.db import models

from management.models.deployment import Deployment
from management.models.model import valid_name


class Adapter(models.Model):
    """A LoRA adapter of one deployment. Its versions hold the content; one of them is current."""

    name = models.CharField(max_length=128, validators=[valid_name])
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="adapters")
    preload = models.BooleanField(default=False, help_text="Load the adapter before the first request.")
    pinned = models.BooleanField(
        default=False, help_text="Load the adapter before the first request and never evict it from its slot."
    )
    workers = models.PositiveIntegerField(
        default=0,
        help_text="Workers of the deployment that load it before the first request; 0 is all. "
        "Others load it when they need it.",
    )
    options = models.JSONField(
        default=dict, blank=True, editable=False, help_text="What an API's client gave besides, to be returned to it."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["deployment", "name"],
                name="one_adapter_per_name_and_deployment",
                violation_error_message="An adapter with this name exists.",
            )
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def current(self) -> AdapterVersion:
        """The version that is served. Raises AdapterVersion.DoesNotExist for an adapter that was removed after it was
        read.
        """
        for version in self.versions.all():
            if version.is_current:
                return version
        raise AdapterVersion.DoesNotExist(f"{self.name} is removed")


class AdapterVersion(models.Model):
    """The content of an adapter, in the adapter store. One version of each adapter is current."""

    adapter = models.ForeignKey(Adapter, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    digest = models.CharField(max_length=64)
    rank = models.PositiveIntegerField()
    source = models.CharField(max_length=512, help_text="The directory that the content was copied from.")
    directory = models.CharField(max_length=512, help_text="The directory that workers read.")
    is_current = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["adapter", "-number"]
        constraints = [
            models.UniqueConstraint(fields=["adapter", "number"], name="one_row_per_adapter_version"),
            models.UniqueConstraint(fields=["adapter", "digest"], name="one_version_per_adapter_content"),
            models.UniqueConstraint(
                fields=["adapter"], condition=models.Q(is_current=True), name="one_current_version_per_adapter"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.adapter.name}:{self.number}"
