"""Takes Locust through the stages of a plan: users of one stage leave before those of the next one come."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
import msgspec
import psutil
from locust import LoadTestShape

from loadtests.current import CURRENT, STAGE_MESSAGE, Order
from loadtests.figures import stage_figures
from loadtests.residue import Observation, kill_worker, observe, workers
from loadtests.samples import Window
from loadtests.settings import API_KEY, MODEL

if TYPE_CHECKING:
    from locust import User

    from loadtests.plan import Plan, Stage
    from loadtests.settings import Addresses, LocalServer

ROOT = Path(__file__).resolve().parent.parent
SLEEP_TIMEOUT_S = 120.0
KILLING_SHARE = 0.4
"""Workers are killed in this first part of a stage, so that memory is judged in a second half without new processes."""
logger = logging.getLogger(__name__)


class StagedShape(LoadTestShape):
    """Asked by Locust's master once a second. `windows` and `observations` are what has taken place so far."""

    abstract = True
    plan: Plan
    addresses: Addresses
    user_classes: dict[str, type[User]]
    local: LocalServer | None = None

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.observations: list[Observation] = []
        self._left = list(self.plan.stages)
        self._stage: Stage | None = None
        self._watcher: Any = None
        self._leaving = 1.0
        """The rate at which users leave: all at once, each after its answer."""

    def tick(self) -> tuple[int, float] | tuple[int, float, list[type[User]]] | None:
        """The users that there should be now; None at the end."""
        if self._stage is not None and self._is_over(self._stage):
            self._end()
        if self._stage is None:
            assert self.runner is not None
            if self.runner.user_count:
                return 0, self._leaving
            if not self._left:
                return None
            self._begin(self._left.pop(0))
        stage = self._stage
        assert stage is not None
        return stage.users, float(max(1, stage.users)), [self.user_classes[name] for name in stage.classes]

    def close(self) -> None:
        """End the stage that is under way, when somebody stops the run."""
        if self._stage is not None:
            self._end()

    def _is_over(self, stage: Stage) -> bool:
        window = self.windows[-1]
        if time.time() - window.begin_s >= stage.seconds:
            return True
        answered = sum(sample.at_s >= window.begin_s for sample in CURRENT.collection.samples)
        return stage.once and answered >= stage.users

    def _begin(self, stage: Stage) -> None:
        if stage.asleep and self.local is not None:
            put_to_sleep(self.local)
        rate = 0.0
        if stage.times:
            rate = stage.times * self._answers_per_s(stage.times_of) / stage.users
            if rate <= 0:
                raise RuntimeError(f"stage {stage.name}: nothing was answered in {stage.times_of}")
        order = Order(stage, self.addresses, rate)
        logger.info("Stage %s: %d users, %.1f arrivals/s", stage.name, stage.users, rate * stage.users)
        assert self.runner is not None
        CURRENT.begin(order)
        self.runner.send_message(STAGE_MESSAGE, msgspec.to_builtins(order))
        self._stage, self._leaving = stage, float(max(1, stage.users))
        now = time.time()
        self.windows.append(Window(stage.name, now, now, stage.users))
        if self.local is not None and (stage.watched or stage.kill_every_s):
            self._watcher = gevent.spawn(self._watch, stage, self.local)

    def _end(self) -> None:
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher = None
        self.windows[-1].end_s = time.time()
        self._stage = None

    def _answers_per_s(self, name: str) -> float:
        window = next(window for window in self.windows if window.stage == name)
        samples = sorted(CURRENT.collection.samples, key=lambda sample: sample.at_s)
        return stage_figures(samples, window).answers_per_s

    def _watch(self, stage: Stage, local: LocalServer) -> None:
        begin = last = time.time()
        while True:
            try:
                self.observations.append(observe(local.pid, self.addresses.front, API_KEY))
                now = time.time()
                killing = stage.kill_every_s and now - begin < KILLING_SHARE * stage.seconds
                if killing and now - last >= stage.kill_every_s and kill_worker(local.pid):
                    logger.info("killed a worker")
                    last = now
            except psutil.NoSuchProcess:
                logger.error("the server has ended")
                return
            gevent.sleep(1)


def put_to_sleep(local: LocalServer) -> None:
    """Let the model's deployment have no workers until a request comes; returns when the last one has ended."""
    environment = {**os.environ, "DRAGOMAN_DATA_DIR": local.data_dir}
    for words in (["change", MODEL, "--min-workers", "0", "--scale-to-zero"], ["scale", MODEL, "zero"]):
        command = [sys.executable, "-W", "ignore", "manage.py", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    deadline = time.monotonic() + SLEEP_TIMEOUT_S
    while workers(local.pid):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the deployment has workers {SLEEP_TIMEOUT_S:g} s after it was put to sleep")
        gevent.sleep(0.2)
