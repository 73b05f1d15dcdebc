"""Secrets of deployments, encrypted at rest."""

from __future__ import annotations

from django.db import models

from management.models.deployment import Deployment


class Secret(models.Model):
    """A secret of a deployment. `management.services.secrets` encrypts and decrypts it; no page and no API lists it."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="secrets")
    name = models.CharField(max_length=128)
    ciphertext = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["deployment", "name"], name="one_secret_per_name")]

    def __str__(self) -> str:
        return f"{self.deployment}: {self.name}"
