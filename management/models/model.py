"""Models, model versions and adapters."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/\-]{0,127}\Z"
valid_name = RegexValidator(
    NAME_PATTERN, "A name has 1 to 128 letters, digits, '.', '_', '-' or '/', and begins with a letter or digit."
)


class Model(models.Model):
    """A named model. Its versions hold the sources."""

    class Kind(models.TextChoices):
        LLM = "llm", "Language model"
        EMBEDDING = "embedding", "Embedding model"

    name = models.CharField(max_length=128, unique=True, validators=[valid_name])
    kind = models.CharField(max_length=16, choices=Kind, default=Kind.LLM)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ModelVersion(models.Model):
    """A source of a model's weights: a directory or a hub id. One version of each model is the default."""

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    source = models.CharField(max_length=512, help_text="A directory on the worker's host, or a hub id.")
    is_default = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["model", "-number"]
        constraints = [
            models.UniqueConstraint(fields=["model", "number"], name="one_row_per_model_version"),
            models.UniqueConstraint(
                fields=["model"], condition=models.Q(is_default=True), name="one_default_version_per_model"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model.name}:{self.number}"


class Adapter(models.Model):
    """A LoRA adapter of one model. Its versions hold the content; one of them is current."""

    name = models.CharField(max_length=128, validators=[valid_name])
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="adapters")
    preload = models.BooleanField(default=False, help_text="Load the adapter before the first request.")
    pinned = models.BooleanField(
        default=False, help_text="Load the adapter before the first request and never evict it from its slot."
    )
    workers = models.PositiveIntegerField(
        default=0,
        help_text="Workers of a deployment that load it before the first request; 0 is all. Others load it when they need it.",
    )
    options = models.JSONField(
        default=dict, blank=True, editable=False, help_text="What an API's client gave besides, to be returned to it."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["model", "name"],
                name="one_adapter_per_name_and_model",
                violation_error_message="An adapter with this name exists.",
            )
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def current(self) -> AdapterVersion:
        """The version that is served. Raises AdapterVersion.DoesNotExist for an adapter that was removed after it was read."""
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
