"""What can be served: models with their versions, and adapters of them."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/\-]{0,127}$"
valid_name = RegexValidator(
    NAME_PATTERN, "A name has 1 to 128 letters, digits, '.', '_', '-' or '/', and begins with a letter or digit."
)


class Model(models.Model):
    """A registry entry; what exactly it stands for is its versions' business."""

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
    """One source of a model's weights: a directory or a hub id. One version of each model is the default."""

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
    """A LoRA of one model. `digest` identifies its content; the same name with other content is another version."""

    name = models.CharField(max_length=128, unique=True, validators=[valid_name])
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="adapters")
    source = models.CharField(max_length=512, help_text="A directory with adapter_config.json and safetensors.")
    digest = models.CharField(max_length=64, editable=False)
    rank = models.PositiveIntegerField(editable=False)
    preload = models.BooleanField(default=False, help_text="Workers read it before anyone asks for it.")
    pinned = models.BooleanField(
        default=False, help_text="Workers read it before anyone asks for it, and never take its slot away."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
