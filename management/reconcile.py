"""The reconciler: brings the running workers into line with the desired state, and records the observed state.

One pass: (1) observe every worker, (2) ask each deployment's scaling rules, if they are due, and carry out their actions,
(3) replace workers of another version or with other options one after another, each new one first, (4) record each deployment's observed
state, (5) publish the snapshot. A pass needs no database: `management.ledger` holds the desired state as last read, and
writes the observed state when it can.

A model that cannot be served, or whose process crashes before it is ready, fails its deployment at once, with the reason.
A worker that crashes later is restarted after growing pauses; too many crashes in a row fail the deployment. Starting the
deployment again resets the count. A launch that fails (no memory, no processes) is not the model's fault: it is retried
for as long as the deployment should run.

Of several reconcilers only the leader acts (`management.leadership`). One that takes over adopts the workers that it
finds; one that has lost the lease leaves them alone.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import structlog
from django.utils import timezone

from management.autoscale.decision import Abort, Drain, Kill, Prepare, Promote, Start
from management.ledger import Ledger, Observed
from management.models import Deployment, Worker
from management.placement import Placement
from management.places import least_price, left_of
from management.scaling import (
    SILENT_DECISIONS,
    LoadHistory,
    Scaler,
    capacity_for,
    facts,
    has_failed,
    last_served_at,
    observed_state,
)
from management.services.snapshots import Registries, build_snapshot
from management.watched import LEAVING_S, Crashes, Watched, hang_reason, is_replacing, replacements_of, serving_of

if TYPE_CHECKING:
    from management.autoscale.decision import Outcome
    from management.launchers.base import Launcher
    from management.load import LoadSource
    from management.snapshot import Snapshot, SnapshotHolder
    from management.watched import Key

logger = structlog.get_logger(__name__)

INTERVAL_S = 0.25
AWAKE_S = 1.0
"""The most seconds that one pass counts as silence: beyond that this process, or its machine, was suspended."""
FORGOTTEN_DRAIN_S = 60.0
"""The drain limit of workers whose deployment has no row any more."""


@dataclass(slots=True)
class Reconciler:
    """The reconciliation loop and its state between passes."""

    launcher: Launcher
    holder: SnapshotHolder
    cache_dir: str
    load: LoadSource | None = None
    """None: no web process reports; the load stays unknown and only people's words and limits act."""
    lease_s: float = 0.0
    """The lease of launched workers; 0: they end with this process."""
    log_format: Literal["console", "json"] = "console"
    """How launched workers write their log."""
    ledger: Ledger = field(default_factory=Ledger)
    watched: dict[Key, Watched] = field(default_factory=dict)
    """By (deployment id, index, epoch), in launch order."""
    scalers: dict[int, Scaler] = field(default_factory=dict)
    """By deployment id."""
    _loads: LoadHistory = field(default_factory=LoadHistory)
    _crashes: dict[int, Crashes] = field(default_factory=lambda: defaultdict(Crashes))
    _last_pass: float = field(default_factory=time.monotonic)
    _led: int = 0
    """The epoch in which this process adopted the workers."""

    @property
    def placement(self) -> Placement:
        """How workers are launched and adopted."""
        return Placement(self.launcher, self.ledger, self.cache_dir, self.lease_s, self.log_format)

    def reconcile_once(self) -> None:
        """Read the registries, run one pass, write the observed state. Raises `django.db.Error`."""
        self.ledger.read()
        self.step()
        self.ledger.write()

    def step(self) -> None:
        """Run one pass, as described at the top of this file."""
        now = time.monotonic()
        awake_s, self._last_pass = min(now - self._last_pass, AWAKE_S), now
        if not self._may_act():
            return
        for key in list(self.watched):
            self._observe(key, awake_s)
        registries = self.ledger.registries
        if registries is None:
            return
        self._take_loads(registries)
        for deployment in registries.deployments:
            try:
                self._converge(deployment, registries)
            except Exception:  # one deployment must not keep the others from being served
                logger.exception("deployment not reconciled", deployment=deployment.name)
        known = {deployment.pk for deployment in registries.deployments}
        for watched in list(self.watched.values()):
            if watched.worker.deployment_id not in known and watched.draining_since is None:
                self._drain(watched)
        for pk in set(self.scalers) - known:
            del self.scalers[pk]
        self.holder.refresh(self.snapshot)

    def snapshot(self) -> Snapshot:
        """A snapshot of the registries as last read and of the workers that are ready now."""
        ready = [watched.worker for watched in list(self.watched.values()) if watched.ready and not watched.spare]
        return build_snapshot(self.ledger.registries or Registries(), ready, lambda row: self.observed(row).reached)

    def refresh(self) -> None:
        """Read the registries and publish a snapshot. Thread-safe; raises `django.db.Error`."""
        self.ledger.read()
        self.holder.refresh(self.snapshot)

    def observed(self, row: Deployment) -> Observed:
        """A deployment's observed state, which may be newer than its row. Thread-safe."""
        seen = self.ledger.observed.get(row.pk)
        return seen or Observed.of(row)

    def failure(self) -> tuple[str, str] | None:
        """Name and reason of a deployment that should run and has failed, or None."""
        for row in self.ledger.registries.deployments if self.ledger.registries else ():
            seen = self.observed(row)
            if row.replicas and seen.reached[:2] == (row.generation, str(Deployment.State.FAILED)):
                return row.name, seen.reason
        return None

    def run(self, stop: threading.Event) -> None:
        """Run passes until `stop` is set. A second thread reads and writes the database, so that no pass waits for it."""
        follower = threading.Thread(
            target=self.ledger.follow, args=(stop, lambda: self.holder.refresh(self.snapshot)), name="ledger"
        )
        follower.start()
        pause = INTERVAL_S
        while not stop.wait(pause):
            try:
                self.step()
                pause = INTERVAL_S
            except Exception:  # the loop must survive any error of one pass
                pause = min(pause * 2, 5.0)
                logger.exception("reconcile pass failed")
        follower.join()

    def _may_act(self) -> bool:
        """Whether this process leads; adopts the workers when it begins to, and lets go of them when another process leads.

        While the database is away it launches and ends nothing, because another process might lead, but it renews the leases of
        the workers that it has. If there is a later leader, they do not heed it: its epoch is over.
        """
        leadership = self.ledger.leadership
        if leadership is None:
            return not self.ledger.displaced
        epoch, leads = leadership.epoch, leadership.leads
        if not epoch:
            if self.watched:
                logger.warning("another reconciler leads", workers=len(self.watched))
            self._let_go()
            return False
        found = self.ledger.found
        if leads and self._led != epoch and self.ledger.registries and found and found.epoch == epoch:
            self._let_go()
            self._led = epoch
            logger.info("this reconciler leads", epoch=epoch)
            for watched in self.placement.adopt(found.workers):
                self.watched[watched.key] = watched
        for watched in self.watched.values():
            watched.handle.renew(self._led)
        return leads and self._led == epoch

    def _let_go(self) -> None:
        """Leave the workers to another leader, or to their leases."""
        for watched in self.watched.values():
            watched.handle.release()
        self.watched.clear()
        self.scalers.clear()
        self._led = 0

    def _take_loads(self, registries: Registries) -> None:
        now = time.monotonic()
        for deployment in registries.deployments:
            if deployment.pk not in self.scalers:
                self.scalers[deployment.pk] = Scaler.of(deployment, now)
        if self.load is not None:
            by_id = {row.public_id: self.scalers[row.pk] for row in registries.deployments}
            self._loads.take(self.load.reports(), by_id)

    def _observe(self, key: Key, awake_s: float) -> None:
        """Read a worker's reports and exit code. `awake_s`: seconds since the last call, suspended time excluded."""
        watched = self.watched[key]
        worker, handle = watched.worker, watched.handle
        code = handle.exit_code()  # before the reports, so that the last ones are not missed
        reports = handle.statuses()
        watched.listen(reports, awake_s)
        for status in reports:
            watched.heed(status)
            if status.labels:
                self.placement.note_price(watched, status.labels)
        if code is not None:
            self._ended(watched, code)
        elif watched.draining_since is not None:
            row = self._row(worker.deployment_id)
            watched.limit_drain(FORGOTTEN_DRAIN_S if row is None else float(row.drain_timeout_s))
        elif watched.leaves_at is not None and time.monotonic() > watched.leaves_at - LEAVING_S:
            self._drain(watched)
        elif worker.state == Worker.State.READY and (hang := hang_reason(watched.silent_s, reports)):
            watched.reason = hang
            logger.error("worker hung, killing it", worker=worker.worker_id, reason=hang)
            handle.kill()

    def _ended(self, watched: Watched, code: int) -> None:
        worker = watched.worker
        intended = watched.draining_since is not None
        reason = watched.reason or (f"killed by signal {-code}" if code < 0 else f"exit status {code}")
        state = Worker.State.EXITED if intended or code == 0 else Worker.State.FAILED
        watched.write(state=state, reason=reason, ended_at=timezone.now())
        watched.handle.release()
        del self.watched[watched.key]
        if intended:
            return
        logger.error("worker ended", worker=worker.worker_id, code=code, reason=reason)
        crashes = self._crashes[worker.deployment_id]
        crashes.note(watched, code, reason, last_served_at(self.scalers.get(worker.deployment_id)))
        if crashes.failed is not None:
            logger.error("deployment failed", deployment=worker.deployment.name, reason=crashes.failed)

    def _converge(self, deployment: Deployment, registries: Registries) -> None:
        crashes = self._crashes[deployment.pk]
        if crashes.generation != deployment.generation:
            self._crashes[deployment.pk] = crashes = Crashes(deployment.generation)
        mine = self._of(deployment)
        scaler = self.scalers[deployment.pk]
        scaler.account(mine, time.monotonic())
        if crashes.failed is not None or (has_failed(deployment) and scaler.outcome is None):
            self._give_up(deployment, scaler, crashes)
            return
        self._retire_outdated(deployment, mine)
        hidden = replacements_of(deployment, mine, scaler.memory.target)
        self._end_late(deployment, hidden, mine, crashes)
        ready, now = sum(w.ready and w.draining_since is None for w in mine), time.monotonic()
        if scaler.due(deployment, sum(w.draining_since is None for w in mine), ready, now) or crashes.of_ready:
            crashed, crashes.of_ready = tuple(crashes.of_ready), []
            outcome = scaler.tick(
                deployment,
                [w for w in mine if w not in hidden],
                self._loads.running,
                crashed,
                capacity_for(deployment, registries, self._workers(), self.launcher.starts_here),
                self._unit_price(deployment),
            )
            self._carry_out(deployment, outcome, mine, crashes)
            self._audit(deployment, outcome)
        self._replace_outdated(deployment, self._of(deployment), crashes)
        self._note_state(deployment, self._of(deployment), scaler, crashes)

    def _carry_out(self, deployment: Deployment, outcome: Outcome, mine: list[Watched], crashes: Crashes) -> None:
        by_name = {watched.name: watched for watched in mine}
        for action in outcome.actions:
            match action:
                case Start(count):
                    for _ in range(count):
                        if self._launch(deployment, crashes) is None:
                            break
                case Prepare():
                    spare = self._launch(deployment, crashes)
                    if spare is not None:
                        spare.write(spare=True)
                case Promote(key) if key in by_name:
                    by_name[key].write(spare=False)
                case Drain(key) if key in by_name and by_name[key].draining_since is None:
                    self._drain(by_name[key])
                case Abort(key) | Kill(key) if key in by_name:
                    self._end(by_name[key], deployment.force)

    def _retire_outdated(self, deployment: Deployment, mine: list[Watched]) -> None:
        """Drain a worker of another version or with other options whose successor is ready, before the scaling rules see
        both: to them, one has taken the other's place.
        """
        scaler = self.scalers[deployment.pk]
        serving, outdated = serving_of(deployment, mine)
        if not scaler.memory.target:
            return
        for watched in [w for w in outdated if w.loading]:  # it would serve nobody
            self._drain(watched)
        ready = sorted((w for w in outdated if not w.loading), key=lambda w: not w.spare)
        if ready and not is_replacing(deployment, serving) and len(serving) > scaler.memory.target:
            self._drain(ready[0])
            scaler.note_replaced(ready[0].name)

    def _replace_outdated(self, deployment: Deployment, mine: list[Watched], crashes: Crashes) -> None:
        """Launch the successor of a worker of another version or with other options, one at a time."""
        serving, outdated = serving_of(deployment, mine)
        target = self.scalers[deployment.pk].memory.target
        if outdated and len(serving) <= target and not is_replacing(deployment, serving):
            self._launch(deployment, crashes)

    def _end_late(self, deployment: Deployment, hidden: list[Watched], mine: list[Watched], crashes: Crashes) -> None:
        """End replacements that take too long, as the scaling rules end other starts. What serves goes on."""
        if crashes.late and not serving_of(deployment, mine)[1]:
            crashes.late = ""
        for watched in hidden:
            if watched.draining_since is None and time.monotonic() - watched.since > deployment.start_timeout_s:
                crashes.late = f"a replacement was not ready within {deployment.start_timeout_s:g} s"
                crashes.pause()
                logger.error("replacement not ready in time", worker=watched.worker.worker_id)
                self._end(watched, force=True)

    def _launch(self, deployment: Deployment, crashes: Crashes) -> Watched | None:
        """Launch one worker; None if that has to wait, or failed."""
        if time.monotonic() < crashes.next_launch or crashes.failed is not None:
            return None
        taken = {w.worker.index for w in self._of(deployment) if w.draining_since is None}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        price, wanted = self._unit_price(deployment), sum(scaler.memory.target for scaler in self.scalers.values())
        staying = [
            w for w in self.watched.values() if w.draining_since is None and w.worker.deployment_id != deployment.pk
        ]
        mine = [w for w in self._of(deployment) if w.draining_since is None and w.is_current(deployment)]
        expected = max(wanted, len(staying) + len(mine) + 1)
        watched = self.placement.launch(deployment, index, crashes, price, expected, left_of(deployment, mine))
        if watched is not None:
            self.watched[watched.key] = watched
        return watched

    def _drain(self, watched: Watched) -> None:
        watched.draining_since = time.monotonic()
        watched.handle.drain()
        watched.write(state=Worker.State.DRAINING)

    def _end(self, watched: Watched, force: bool) -> None:
        """End a worker whose requests are not waited for any longer."""
        if watched.draining_since is None:
            self._drain(watched)
        if force:
            watched.handle.kill()
        elif not watched.handed_over:
            watched.handed_over = True
            watched.handle.hand_over()

    def _audit(self, deployment: Deployment, outcome: Outcome) -> None:
        """Note the decisions that acted or were kept from acting."""
        for decision in outcome.decisions:
            if decision.rule in SILENT_DECISIONS or not (decision.actions or decision.blocked):
                continue
            logger.info("scaling decision", deployment=deployment.name, **facts(decision))
            self.ledger.note_decision(deployment.name, facts(decision))

    def _give_up(self, deployment: Deployment, scaler: Scaler, crashes: Crashes) -> None:
        """Launch nothing more. What serves, perhaps an older version, goes on until a person acts."""
        staying = [w for w in self._of(deployment) if w.draining_since is None]
        stays = not deployment.deleted and not deployment.stopped
        serving = [w for w in staying if w.ready and not w.spare and stays]
        for watched in staying:
            if watched not in serving:
                self._drain(watched)
        state = Deployment.State.ACTIVE if serving else Deployment.State.FAILED
        if deployment.deleted:
            state = Deployment.State.DELETING if self._of(deployment) else Deployment.State.DELETED
        self._note(deployment, scaler, str(state), crashes.failed or deployment.reason, len(serving), "")

    def _note_state(self, deployment: Deployment, mine: list[Watched], scaler: Scaler, crashes: Crashes) -> None:
        if scaler.outcome is not None:
            self._note(deployment, scaler, *observed_state(scaler.outcome, mine, crashes))

    def _note(self, deployment: Deployment, scaler: Scaler, state: str, reason: str, target: int, blocked: str) -> None:
        self.ledger.observed[deployment.pk] = Observed(
            deployment.generation, state, reason, target, blocked, scaler.price_per_hour, scaler.cost
        )

    def _of(self, deployment: Deployment) -> list[Watched]:
        return [w for w in self.watched.values() if w.worker.deployment_id == deployment.pk]

    def _row(self, pk: int) -> Deployment | None:
        rows = self.ledger.registries.deployments if self.ledger.registries else ()
        return next((row for row in rows if row.pk == pk), None)

    def _unit_price(self, deployment: Deployment) -> float | None:
        """USD per hour of the next worker; None if the price table does not say."""
        return least_price(deployment, self.ledger.registries.prices if self.ledger.registries else ())

    def _workers(self) -> list[Worker]:
        return [watched.worker for watched in self.watched.values()]
