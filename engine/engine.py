"""The interface of an engine core to the worker's server: takes requests and returns outputs, one step at a time.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.failures import Failure, FinishReason
from engine.messages import AdapterCommand, Embed, ModelInfo, RequestOutput, Stats, StepHistograms, Submit

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure
    from engine.kv_transfer.transfers import Transfers

MAX_FAILED_STEPS = 2
"""Consecutive failed steps after which the worker exits."""

ClientOutputs = dict[int, list[RequestOutput]]


class EngineBroken(Exception):
    """Steps keep failing; the worker should exit and be restarted."""


def refused(message: Submit | Embed, failure: Failure) -> RequestOutput:
    """The only output of a refused request."""
    return RequestOutput(message.request_id, finish_reason=FinishReason.ERROR, error=failure)


class Engine(Protocol):
    """One model and its requests. Not thread-safe: one loop owns it."""

    info: ModelInfo
    stats: Stats
    histograms: StepHistograms
    failed_steps: int
    """Consecutive failed steps."""

    @property
    def transfers(self) -> Transfers | None:
        """The blocks that go to and come from other workers; None if it has none that are of use to others."""
        ...

    @property
    def blocked(self) -> bool:
        """Whether the last step could do nothing because every request waits for something outside the step loop, such
        as an adapter.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Whether there is anything for a step to do."""
        ...

    def submit(self, client: int, message: Submit | Embed) -> RequestOutput | None:
        """Queue a client's request. Returns its only output if it is refused, else None."""
        ...

    def command(self, message: AdapterCommand) -> AdapterFailure | None:
        """Execute an adapter command; a load is only started. Returns the reason if it fails, else None."""
        ...

    def loading(self, digest: str) -> bool:
        """Whether an adapter is being read."""
        ...

    def load_failure(self, digest: str) -> AdapterFailure | None:
        """Why an adapter could not be loaded; None if it was."""
        ...

    def abort(self, client: int, request_ids: list[int]) -> None:
        """Mark requests for removal at the next step; unknown ids are ignored."""
        ...

    def abort_client(self, client: int) -> None:
        """Mark all requests of a disconnected client for removal at the next step."""
        ...

    def hand_over(self) -> None:
        """Mark all requests to be ended as MOVED at the next step."""
        ...

    def step(self) -> ClientOutputs:
        """One iteration. A step that fails ends its requests and is counted in `failed_steps`."""
        ...

    def refresh_stats(self) -> Stats:
        """The counters, with the gauges updated."""
        ...

    def check_integrity(self) -> None:
        """Called when idle; raises EngineBroken if ended requests left state behind."""
        ...

    def close(self) -> None:
        """Stop the threads and processes that the engine started."""
        ...
