"""Models and their versions."""

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
