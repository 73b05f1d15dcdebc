"""Launches workers, and takes over those that an earlier reconciler launched."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog
from django.db import Error, close_old_connections
from django.utils import timezone

from engine.config import EngineConfig
from engine.process.flight import FOLDER
from management.launchers.base import name_of
from management.leadership import LeadershipLost
from management.models import Model, Worker
from management.offload_folders import offload_folder
from management.places import gpus_of, place_of, price_at
from management.services.discovery import FOLDER as BESIDE
from management.services.errors import RegistryError
from management.services.secrets import HUB_TOKEN, decrypt
from management.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from management.launchers.base import Launcher
    from management.ledger import Ledger
    from management.models import Deployment, Price
    from management.watched import Crashes

logger = structlog.get_logger(__name__)

TASKS = {Model.Kind.EMBEDDING: "embed", Model.Kind.LLM: "auto"}
"""The engine's task for each kind of inference."""
ADOPTED_AT_ONCE = 64
MOST_CHECKED = 64
"""Adapters that a deployment's first worker reads before it is ready; others are read when they are needed."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Launches and adopts; the reconciler decides when."""

    launcher: Launcher
    ledger: Ledger
    cache_dir: str
    lease_s: float
    log_format: Literal["console", "json"] = "console"

    def launch(
        self,
        deployment: Deployment,
        index: int,
        crashes: Crashes,
        price_per_hour: float | None,
        workers_on_host: int,
        left: float | None,
    ) -> Watched | None:
        """Launch one worker, one of `workers_on_host` that share the CPUs; None if it failed, which `crashes` then knows.

        `left`: USD per hour that it may cost; None is no limit.
        """
        worker = Worker(
            deployment=deployment,
            version=deployment.version,
            engine_options=deployment.engine_options,
            index=index,
            epoch=self.ledger.next_epoch(deployment.name, index),
            price_per_hour=price_per_hour or 0.0,
            started_at=timezone.now(),
        )
        options, claimed = self._options(worker, workers_on_host), False
        try:
            worker.address = self.launcher.address(f"{deployment.pk}-{index}-{worker.epoch}")
            place = place_of(deployment, self._prices(), left)
            if worker.address:
                worker.node = os.uname().nodename
            else:  # until it has a machine, it counts as the dearest that it may get
                worker.price_per_hour = place.most_per_hour or worker.price_per_hour
            config = msgspec.convert({**options, "address": worker.address}, EngineConfig)
            secrets = self._secrets(deployment)
            self.ledger.claim(worker)
            claimed = worker.pk is not None
            handle = self.launcher.launch(config, secrets, place)
        except msgspec.ValidationError as error:  # options that an earlier release stored
            crashes.failed = f"engine_options: {error}"
            logger.error("deployment failed", deployment=deployment.name, reason=crashes.failed)
            return None
        except LeadershipLost as error:
            logger.warning("worker not launched", worker=worker.worker_id, error=str(error))
            return None
        except (OSError, Error, RegistryError) as error:
            close_old_connections()
            text = getattr(error, "strerror", None) or str(error)
            crashes.note_launch_failure(text)
            if claimed:  # nothing runs that would end the row
                worker.state, worker.reason, worker.ended_at = Worker.State.FAILED, text, timezone.now()
                self.ledger.note(worker, "state", "reason", "ended_at")
            logger.error("worker not launched", worker=worker.worker_id, error=str(error))
            return None
        crashes.failed_launches, crashes.reason = 0, ""
        now = time.monotonic()
        watched = Watched(worker, handle, self.ledger, launched_at=now, since=now)
        logger.info("worker launched", worker=worker.worker_id, epoch=worker.epoch, source=deployment.version.source)
        watched.write(process_id=handle.process_id)
        return watched

    def _options(self, worker: Worker, workers_on_host: int) -> dict[str, object]:
        """The fields of the worker's EngineConfig but its address."""
        deployment = worker.deployment
        options = {
            "task": TASKS[Model.Kind(deployment.inference_kind)],
            **deployment.engine_options,
            "model": deployment.version.source,
            "worker_id": worker.worker_id,
            "epoch": worker.epoch,
            "lease_s": self.lease_s,
            "cache_dir": self.cache_dir,
            "flight_dir": str(Path(self.cache_dir) / FOLDER) if self.cache_dir else "",
            "kv_offload_dir": offload_folder(deployment.pk) if self.cache_dir else "",
            "log_format": self.log_format,
            "required_adapters": self._required_adapters(deployment),
        }
        if not options.get("threads"):
            options["threads"] = self.launcher.threads(workers_on_host)
        return options

    def _required_adapters(self, deployment: Deployment) -> dict[str, str]:
        """The adapters that a deployment which never was ready was given, so that one that its model does not take is
        told at once. Those beside the model's files are no wish of anybody's, and a later one must not stop what runs.
        """
        if deployment.model_info is not None or self.ledger.registries is None:
            return {}
        beside = Path(deployment.version.source) / BESIDE
        owned = (each for each in self.ledger.registries.adapters if each.adapter.deployment_id == deployment.pk)
        given = (each for each in owned if not Path(each.source).is_relative_to(beside))
        return {each.adapter.name: each.directory for each in islice(given, MOST_CHECKED)}

    def note_price(self, watched: Watched, labels: Mapping[str, str]) -> None:
        """Record what a worker costs on the machine that it was given."""
        price = price_at(labels, gpus_of(watched.worker.deployment), self._prices())
        if price is not None:
            watched.write(price_per_hour=price)

    def _prices(self) -> Iterable[Price]:
        return self.ledger.registries.prices if self.ledger.registries else ()

    def _secrets(self, deployment: Deployment) -> dict[str, str]:
        """The variables that only this deployment's workers get. Raises RegistryError."""
        tokens = self.ledger.registries.hub_tokens if self.ledger.registries else {}
        if deployment.pk not in tokens:
            return {}
        return {"HF_TOKEN": decrypt(HUB_TOKEN, tokens[deployment.pk])}

    def adopt(self, rows: Iterable[Worker]) -> list[Watched]:
        """Take over the workers of these rows that still run; the others are recorded as lost.

        A worker that was launched a moment ago and does not listen yet is lost too: nobody renews its lease, and its epoch
        is never used again.
        """
        adopted, workers = [], tuple(rows)
        with ThreadPoolExecutor(ADOPTED_AT_ONCE, "adopt") as pool:  # waits for hosts that are away must not add up
            handles = pool.map(lambda w: self.launcher.adopt(w.address, name_of(w.worker_id, w.epoch)), workers)
        for worker, handle in zip(workers, handles, strict=True):
            if handle is None:
                worker.state, worker.reason = Worker.State.FAILED, "lost while no reconciler watched it"
                worker.ended_at = timezone.now()
                self.ledger.note(worker, "state", "reason", "ended_at")
                logger.warning("worker lost", worker=worker.worker_id, epoch=worker.epoch)
                continue
            now = time.monotonic()
            watched = Watched(worker, handle, self.ledger, launched_at=now, since=now)
            if worker.state == Worker.State.READY:
                watched.ready_since = now
            elif worker.state == Worker.State.DRAINING:
                watched.draining_since = now  # it was told before that was written, and a second time means more
            adopted.append(watched)
            logger.info("worker taken over", worker=worker.worker_id, epoch=worker.epoch, state=worker.state)
        return adopted
