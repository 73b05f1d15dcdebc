"""What a tick decides: actions for the caller, and the facts of every decision for an audit event."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from management.autoscale.memory import Limit, Memory
from management.autoscale.metric import Measure


class DeploymentState(StrEnum):
    """A deployment's state, as the rules see it."""

    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    INACTIVE = "INACTIVE"
    FAILED = "FAILED"
    DELETING = "DELETING"
    DELETED = "DELETED"


class Rule(StrEnum):
    """The rule that decided. REPEATED asks again for what an earlier decision has not achieved yet."""

    DRAINED = "drained"
    DRAIN_TIMEOUT = "drain_timeout"
    START_TIMEOUT = "start_timeout"
    CRASH = "crash"
    DELETE = "delete"
    STOP = "stop"
    MANUAL = "manual"
    WAKE = "wake"
    ZERO = "zero"
    BELOW_FLOOR = "below_floor"
    ABOVE_CAP = "above_cap"
    UP = "up"
    DOWN = "down"
    SPARE = "spare"
    REPEATED = "repeated"


class Start(msgspec.Struct, frozen=True, tag=True):
    """Launch `count` workers."""

    count: int


class Promote(msgspec.Struct, frozen=True, tag=True):
    """Make the spare a worker."""

    key: str


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Launch a spare."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Give the worker no new request."""

    key: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End the worker's requests with an error that clients can retry, then stop it."""

    key: str


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Stop the worker; it has no request."""

    key: str


Action = Start | Promote | Prepare | Drain | Abort | Kill


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision with what it saw: the metric (None where the rule needs none), thresholds and counts at that moment.

    `live` workers start or are ready; `cap` is the most that may live, `target` how many the decision wants. `blocked` is the
    limit that kept an action from being larger.
    """

    rule: Rule
    at: float
    ready: int
    live: int
    cap: int
    target: int
    upper: float
    lower: float
    measure: Measure | None = None
    actions: tuple[Action, ...] = ()
    blocked: Limit | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tick. `scale_blocked` is the limit that keeps the deployment from the workers that it needs."""

    memory: Memory
    state: DeploymentState
    decisions: tuple[Decision, ...]
    scale_blocked: Limit | None

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions, in order."""
        return tuple(action for decision in self.decisions for action in decision.actions)
