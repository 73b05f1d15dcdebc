"""What an engine is to the server that serves it: requests in, outputs out, one step at a time. It imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.failures import Failure, FinishReason
from engine.messages import AdapterCommand, Embed, ModelInfo, RequestOutput, Stats, StepHistograms, Submit

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure

MAX_FAILED_STEPS = 2
"""So many failed steps in a row mean that the engine itself is broken."""

ClientOutputs = dict[int, list[RequestOutput]]


class EngineBroken(Exception):
    """Steps keep failing; the worker should exit and be restarted."""


def refused(message: Submit | Embed, failure: Failure) -> RequestOutput:
    """The only output of a request that is not taken."""
    return RequestOutput(message.request_id, finish_reason=FinishReason.ERROR, error=failure)


class Engine(Protocol):
    """One model and its requests. Not thread-safe: one loop owns it."""

    info: ModelInfo
    stats: Stats
    histograms: StepHistograms
    failed_steps: int
    """In a row."""

    @property
    def blocked(self) -> bool:
        """Whether the last step could do nothing, because all requests wait for something else than their turn."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def submit(self, client: int, message: Submit | Embed) -> RequestOutput | None:
        """Queue a request of a client; the output that ends it when it cannot be served."""
        ...

    def command(self, message: AdapterCommand) -> AdapterFailure | None:
        """Carry out a command about an adapter, a load as far as its begin; why not, when that cannot be."""
        ...

    def loading(self, digest: str) -> bool:
        """Whether an adapter is being read."""
        ...

    def load_failure(self, digest: str) -> AdapterFailure | None:
        """Why an adapter that was read cannot be served."""
        ...

    def abort(self, client: int, request_ids: list[int]) -> None:
        """Mark requests for removal at the next step; unknown ids are ignored."""
        ...

    def abort_client(self, client: int) -> None:
        """Mark everything that a vanished client asked for."""
        ...

    def step(self) -> ClientOutputs:
        """One iteration. A step that fails ends its requests and is counted in `failed_steps`."""
        ...

    def refresh_stats(self) -> Stats:
        """The gauges as of now, and the counters."""
        ...

    def check_integrity(self) -> None:
        """Called when idle; raises EngineBroken where something is left of requests that ended."""
        ...

    def close(self) -> None:
        """End what was started beside the loop."""
        ...
