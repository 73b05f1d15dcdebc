"""The server's processes, as they report themselves: web processes with their load, and the leading reconciler."""

from __future__ import annotations

from django.db import models


class WebProcess(models.Model):
    """A web process and its last report of what it serves. The row is removed when the process ends in order."""

    name = models.CharField(max_length=128, unique=True)
    report_number = models.PositiveBigIntegerField(default=0)
    report = models.BinaryField(default=b"", help_text="A LoadReport as msgpack.")
    seen_at = models.DateTimeField(help_text="By the database's clock.")
    usage_number = models.PositiveBigIntegerField(default=0, help_text="Of the last batch of usage that was stored.")

    def __str__(self) -> str:
        return self.name


class LeaderLease(models.Model):
    """Which process leads. `epoch` grows with every change of the leader and fences the writes of earlier ones."""

    name = models.CharField(max_length=32, primary_key=True)
    holder = models.CharField(max_length=128)
    epoch = models.BigIntegerField()
    expires_at = models.FloatField(help_text="Unix seconds by the database's clock.")

    def __str__(self) -> str:
        return f"{self.name}: {self.holder}"
