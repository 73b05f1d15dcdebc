"""What the services and planes of this dialect share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.dialects.torchserve.metrics import TorchServeMetrics
from management.snapshot import Availability

if TYPE_CHECKING:
    from inference.dialects.torchserve.key_file import KeyFile
    from inference.dialects.torchserve.settings import TorchServeSettings
    from inference.http.auth import Authenticator
    from inference.services import Services


@dataclass(frozen=True, slots=True)
class State:
    """The running dialect. `keys` is None unless TorchServe's keys are asked for."""

    settings: TorchServeSettings
    services: Services
    authenticator: Authenticator
    keys: KeyFile | None = None
    metrics: TorchServeMetrics = field(default_factory=TorchServeMetrics)

    @property
    def healthy(self) -> bool:
        """False while the server drains, and if the default version of a model has failed."""
        if self.services.admission.draining:
            return False
        entries = self.services.holder.current.deployments
        return not any(e.is_default_version and e.availability is Availability.FAILED for e in entries)

    @property
    def health(self) -> dict[str, str]:
        """The answer to a ping."""
        return {"status": "Healthy" if self.healthy else "Unhealthy"}
