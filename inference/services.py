"""The dependencies of request handlers, created once at startup."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.admission.idempotency import IdempotencyStore
from inference.admission.rates import RateMeter
from inference.admission.standing import Standings
from inference.planes.delegation import Delegation
from inference.telemetry.base import Telemetry
from inference.workers.lasting import LastingTasks

if TYPE_CHECKING:
    from inference.admission.permits import Admission
    from inference.admission.standing import Standing
    from inference.generation.embeddings import Embedder
    from inference.generation.prepare import Generator
    from inference.http.auth import Authenticator
    from inference.http.sites import Sites
    from inference.metrics.requests import Metrics
    from inference.workers.adapters import AdapterControl
    from inference.workers.registry import Registry
    from inference.workers.router import EngineRouter
    from management.snapshot import SnapshotHolder


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a single request, checked by the dialect with the field's name."""

    max_sequences: int = 128
    max_prompts: int = 64
    max_stop_strings: int = 16
    max_stop_characters: int = 256
    max_logprobs: int = 20
    max_prompt_entries: int = 2_000_000
    """Log-probabilities of prompt tokens and their alternatives in one response, each counted as often as it is in there."""
    max_best_of: int = 8
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_embedding_inputs: int = 2048
    max_body_bytes: int = 2_000_000
    """Also applies after decompression."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What the operator lets answers tell clients."""

    cached_tokens: bool = False
    """How much of a prompt came from the prefix cache, in OpenAI's `usage`."""
    adapter_paths: bool = False
    """The directory of an adapter, in its model card."""


@dataclass(frozen=True, slots=True)
class Services:
    """The running server's parts."""

    holder: SnapshotHolder
    router: EngineRouter
    generator: Generator
    embedder: Embedder
    adapters: AdapterControl
    registry: Registry
    admission: Admission
    authenticator: Authenticator
    metrics: Metrics
    limits: Limits
    sites: Sites
    version: str
    shown: Shown = field(default_factory=Shown)
    telemetry: Telemetry = field(default_factory=Telemetry)
    rates: RateMeter = field(default_factory=RateMeter)
    standings: Standings = field(default_factory=Standings)
    idempotency: IdempotencyStore = field(default_factory=IdempotencyStore)
    lasting: LastingTasks = field(default_factory=LastingTasks)
    delegation: Delegation = field(default_factory=Delegation)
    """Lets a dialect's own plane serve the front plane's routes; opened with the front plane."""

    def time_left_s(self, standing: Standing) -> float:
        """The seconds from now in which a request that has just arrived must begin."""
        return standing.within(self.generator.request_timeout_s)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`; some clients require a string."""
        return f"dragoman-{self.version}"
