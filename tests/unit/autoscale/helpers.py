"""Short ways to say what the rules see."""

from __future__ import annotations

from management.autoscale.config import ScalingConfig
from management.autoscale.decision import Action, Outcome, Rule
from management.autoscale.memory import Memory
from management.autoscale.observation import Observation, WorkerState, WorkerView
from management.autoscale.policy import tick
from management.autoscale.signals import History, LoadGauges
from tests.unit.autoscale.simulation import Simulation

STARTING, READY, DRAINING, SPARE = WorkerState


def worker(key: str, state: WorkerState = READY, since: float = 0.0, **fields: object) -> WorkerView:
    return WorkerView(key, state, since, **fields)  # type: ignore[arg-type]


def known(at: float, gauges: LoadGauges | None = None) -> History:
    """A history of one web process that has just reported."""
    history = History(10_000)
    history.report("web", at, (), gauges or LoadGauges())
    return history


def see(
    config: ScalingConfig,
    now: float,
    *workers: WorkerView,
    memory: Memory | None = None,
    history: History | None = None,
    **fields: object,
) -> Outcome:
    """One tick over these workers."""
    observation = Observation(now=now, workers=workers, **fields)  # type: ignore[arg-type]
    return tick(memory or Memory(), config, observation, history or known(now))


def rules(outcome: Outcome) -> list[Rule]:
    return [decision.rule for decision in outcome.decisions]


def acted(simulation: Simulation, *unimportant: Rule) -> list[tuple[float, Rule]]:
    """When which rule acted."""
    ignored = (Rule.DRAINED, *unimportant)
    return [(decision.at, decision.rule) for decision in simulation.decisions if decision.rule not in ignored]


def actions_of(simulation: Simulation, rule: Rule) -> list[Action]:
    return [action for decision in simulation.decisions if decision.rule is rule for action in decision.actions]
