"""What the front door measured: sums per second and gauges of every web process, merged into windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec


class LoadSlice(msgspec.Struct, frozen=True):
    """The sums of one second of one web process for one deployment.

    `at` is the second's end in monotonic seconds. `arrivals` were let in, `rejected` were refused for lack of capacity; no
    request is in both. `first_tokens` counts requests by the time of their first token, streamed or not, and `ttft_total_s`
    adds up their times since arrival, queueing included. A request that timed out before its first token counts with its
    age. Other failed requests do not count. The front door leaves out the first token of a request whose wait overlapped a
    time with no ready worker: a cold start is no sign of load. `completions` and `e2e_total_s` count completed requests, not
    those that the client cancelled. Health checks, metrics and administration are no requests.
    """

    at: float
    arrivals: int = 0
    rejected: int = 0
    first_tokens: int = 0
    ttft_total_s: float = 0.0
    completions: int = 0
    e2e_total_s: float = 0.0


class LoadGauges(msgspec.Struct, frozen=True):
    """What one web process sees now. Every report replaces the one before, so a wrong count cannot stay.

    A request is in one count: `held` while no worker is ready, `waiting` while it is queued for one, `running` once a worker
    computes for it. `waiting_ages_s` has the ages of all requests without a first token, queued or not, again without those
    that waited for a first worker; `running_ages_s` those of all unfinished requests that are not held. `last_activity_at`
    is the time of the last arrival or completion, None if there was none.
    """

    running: int = 0
    waiting: int = 0
    held: int = 0
    waiting_ages_s: tuple[float, ...] = ()
    running_ages_s: tuple[float, ...] = ()
    last_activity_at: float | None = None


class _Process:
    """The reports of one web process."""

    def __init__(self) -> None:
        self.slices: deque[LoadSlice] = deque()
        self.newest_slice_at = float("-inf")
        self.gauges: LoadGauges | None = None
        self.reported_at = float("-inf")


class History:
    """The reports of all web processes on one deployment.

    All times are monotonic seconds of the process that owns the history; it translates what other hosts report.
    `retention_s` is the largest window (`ScalingConfig.history_s`); older slices are forgotten. A process whose reports end
    makes the load unknown until it signs off: call `sign_off` too when it is known to be dead.
    """

    def __init__(self, retention_s: float) -> None:
        self.retention_s = retention_s
        self._processes: dict[str, _Process] = {}
        self._last_activity_at: float | None = None

    def report(self, process: str, at: float, slices: tuple[LoadSlice, ...], gauges: LoadGauges) -> None:
        """Take in a report made at `at`. A slice that was reported before is ignored; so are gauges older than known ones."""
        source = self._processes.setdefault(process, _Process())
        for piece in slices:
            if piece.at > source.newest_slice_at:
                source.slices.append(piece)
                source.newest_slice_at = piece.at
        if at >= source.reported_at:
            source.gauges, source.reported_at = gauges, at
            self._note_activity(gauges.last_activity_at)
        self._forget(at - self.retention_s)

    def sign_off(self, process: str) -> None:
        """The process has ended: it has no requests any more. What it measured stays in the windows."""
        if source := self._processes.get(process):
            source.gauges = None

    def is_unknown(self, now: float, stale_s: float) -> bool:
        """Whether a process that should report has not for `stale_s`, or none reports. Unknown is not zero."""
        ages = self.report_ages_s(now)
        return not ages or max(ages.values()) > stale_s

    def report_ages_s(self, now: float) -> dict[str, float]:
        """The age of the last report of each process that has not signed off."""
        return {name: now - source.reported_at for name, source in self._processes.items() if source.gauges is not None}

    def valid(self, now: float, stale_s: float) -> Iterator[LoadGauges]:
        """The gauges that are not stale."""
        for source in self._processes.values():
            if source.gauges is not None and now - source.reported_at <= stale_s:
                yield source.gauges

    def within(self, now: float, window_s: float) -> Iterator[LoadSlice]:
        """The slices of (now - window_s, now], newest first within a process."""
        for source in self._processes.values():
            for piece in reversed(source.slices):
                if piece.at <= now - window_s:
                    break
                if piece.at <= now:
                    yield piece

    @property
    def last_activity_at(self) -> float | None:
        """The last arrival or completion that any process has reported."""
        return self._last_activity_at

    def last_served_at(self, now: float) -> float:
        """The last second in which a request got a first token or was completed; -inf if none is remembered."""
        last = float("-inf")
        for source in self._processes.values():
            served = (p.at for p in reversed(source.slices) if p.at <= now and (p.first_tokens or p.completions))
            last = max(last, next(served, last))
        return last

    def _note_activity(self, at: float | None) -> None:
        if at is not None and (self._last_activity_at is None or at > self._last_activity_at):
            self._last_activity_at = at

    def _forget(self, before: float) -> None:
        for name, source in list(self._processes.items()):
            while source.slices and source.slices[0].at <= before:
                source.slices.popleft()
            if not source.slices and source.gauges is None:
                del self._processes[name]
