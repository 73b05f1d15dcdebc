"""The registries. `management.services` writes desired state, `management.ledger` observed state."""

from management.models.access import ApiKey, AuditEvent
from management.models.adapter import Adapter, AdapterVersion
from management.models.capacity import Node, Price
from management.models.deployment import Deployment
from management.models.model import Model, ModelVersion
from management.models.processes import LeaderLease, WebProcess
from management.models.secret import Secret
from management.models.usage import UsageDay
from management.models.worker import Worker

__all__ = [
    "Adapter",
    "AdapterVersion",
    "ApiKey",
    "AuditEvent",
    "Deployment",
    "LeaderLease",
    "Model",
    "ModelVersion",
    "Node",
    "Price",
    "Secret",
    "UsageDay",
    "WebProcess",
    "Worker",
]
