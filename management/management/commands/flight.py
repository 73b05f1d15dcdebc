"""Ask running workers for their flight recordings: the last steps and where each thread is, without prompts or tokens."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from engine.process.flight import SIGNAL, Cause, stem
from management.database_errors import with_advice
from management.models import Worker

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 10.0
POLL_S = 0.05


class Command(BaseCommand):
    """`manage.py flight [WORKER ...]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the workers."""
        parser.add_argument("workers", nargs="*", metavar="WORKER", help="Such as demo/0; without any: all workers.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the path of each recording; raises CommandError."""
        try:
            running = running_here()
        except Error as error:
            raise CommandError(f"the registry cannot be read: {with_advice(error)}") from error
        wanted = set(options["workers"]) or {worker.worker_id for worker in running}
        if missing := sorted(wanted - {worker.worker_id for worker in running}):
            raise CommandError(f"no such worker runs on this machine: {', '.join(missing)}")
        if not wanted:
            raise CommandError("no worker runs on this machine")
        for worker in running:
            if worker.worker_id in wanted:
                self.stdout.write(str(ask(worker)))


def running_here() -> list[Worker]:
    """The workers whose processes run on this machine."""
    rows = Worker.objects.filter(state__in=Worker.LIVE, node=os.uname().nodename, process_id__isnull=False)
    return [worker for worker in rows.select_related("deployment").order_by("pk") if _is_worker(worker.process_id)]


def ask(worker: Worker) -> Path:
    """The path of a new recording of this worker; raises CommandError."""
    earlier = set(_recordings(worker))
    try:
        os.kill(worker.process_id or 0, SIGNAL)
    except OSError as error:
        raise CommandError(f"{worker.worker_id} cannot be asked: {error.strerror}") from error
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if new := set(_recordings(worker)) - earlier:
            return max(new)
        time.sleep(POLL_S)
    raise CommandError(f"{worker.worker_id} wrote no recording within {PATIENCE_S:g} s; its log may say why")


def _recordings(worker: Worker) -> list[Path]:
    return list(settings.FLIGHT_RECORDINGS.glob(f"{stem(worker.worker_id, worker.epoch)}-*-{Cause.ASKED}.jsonl"))


def _is_worker(process_id: int | None) -> bool:
    """Whether a worker has this id, and waits for the signal: another process might be ended by it."""
    with suppress(psutil.Error):
        process = psutil.Process(process_id)
        return process.cmdline()[-2:] == ["-m", "engine"] and process.uids().real == os.getuid() and _blocks(process)
    return False


def _blocks(process: psutil.Process) -> bool:
    with suppress(OSError), open(f"/proc/{process.pid}/status") as status:
        masks = [line.split()[1] for line in status if line.startswith("SigBlk:")]
        return any(int(mask, 16) >> (SIGNAL - 1) & 1 for mask in masks)
    return False
