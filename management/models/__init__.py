"""The registries. `management.services` writes desired state, `management.ledger` observed state."""

from management.models.access import ApiKey, AuditEvent
from management.models.deployment import Deployment, Worker
from management.models.model import Adapter, Model, ModelVersion

__all__ = ["Adapter", "ApiKey", "AuditEvent", "Deployment", "Model", "ModelVersion", "Worker"]
