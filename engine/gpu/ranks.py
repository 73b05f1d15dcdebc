"""Tensor parallelism: the processes of one worker, a device each, over weights that are split by transformers' own plan.

Rank 0 is the worker itself: it schedules, and chooses the tokens. The others (`engine.gpu.rank_process`) are sent each
step through a pipe and compute their share of it. All of them load, probe and capture alike, so that their
collectives meet. When one ends, all do: threads watch the pipe's end and the other processes, because a main thread may
be in a collective that nobody joins any more. For the same reason nobody leaves the group in good order: captured graphs
hold its collectives, and waiting for those to end is how such programs hang.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.failures import ExitStatus
from engine.messages import frame

if TYPE_CHECKING:
    pass


logger = logging.getLogger("engine")

GRACE_S = 5.0
"""How long rank 0 may go on after another one has ended, to say what it knows."""
REFUSED_GRACE_S = 120.0
"""The same where the other one refused the model, which rank 0 is about to do too, with a reason."""
LOADING = timedelta(hours=1)
"""The longest that one rank waits for another, whose disk may be slower."""


class Membership(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    rendezvous: str
    """A file that does not exist yet; whoever can open its folder can join."""
    device_type: str


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `ForwardBatch` without whom its rows belong to; `chosen` is the number of tokens that follow on the device."""

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    sequences: list[tuple[int, int, int, list[int]]]
    logits_rows: list[int]
    chosen: int


class Ranks:
    """A process among those of its worker."""

    def __init__(self, membership: Membership) -> None:
        """Join; waits for the others."""
        self.rank, self.count = membership.rank, membership.config.tensor_parallel_size
        self.device = torch.device(membership.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.rank)
            torch.cuda.set_device(self.device)
        os.environ["LOCAL_RANK"] = str(self.rank)  # where transformers looks for its device
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"file://{membership.rendezvous}",
            rank=self.rank,
            world_size=self.count,
            timeout=LOADING,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self.serving = False
        """Whether rank 0 sends the steps; until then every rank does the same of its own accord."""

    def pretrained_options(self) -> dict[str, Any]:
        """How `from_pretrained` splits the weights."""
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.count, tp_plan="auto")}

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def share(self, chosen: torch.Tensor | None) -> None:
        """Rank 0's tokens for all, on the device."""
        if chosen is not None:
            dist.broadcast(chosen, src=0)


class Leader(Ranks):
    """Rank 0, which starts the others and sends them the steps."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        rendezvous = os.path.join(self._folder.name, "store")
        self._closing = False
        self._others: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.tensor_parallel_size):
            other = subprocess.Popen([sys.executable, "-m", "engine.gpu.rank_process"], stdin=subprocess.PIPE, stdout=2)
            self._others.append(other)
            self._write(other, frame(Membership(config, rank, rendezvous, device.type)))
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()
        super().__init__(Membership(config, 0, rendezvous, device.type))

    def send(self, batch: ForwardBatch) -> None:
        """The others compute this step too; raises OSError when one is gone."""
        message = StepMessage(
            batch.input_ids[0].tolist(),
            batch.positions[0].tolist(),
            batch.slot_mapping.tolist(),
            [(s.row, s.count, s.length, s.blocks) for s in batch.sequences],
            batch.logits_rows.tolist(),
            0 if batch.chosen is None else len(batch.chosen),
        )
        body = frame(message)
        for other in self._others:
            self._write(other, body)

    def close(self) -> None:
        """End the others. This process is to end soon, by `os._exit`."""
        self._closing = True
        for other in self._others:
            with suppress(OSError):  # what could not be written when it was gone already
                other.stdin.close()  # type: ignore[union-attr]
        for other in self._others:
            try:
                other.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                other.kill()
        self._folder.cleanup()

    def give_up(self) -> None:
        """A step failed here that the others may be in: they are out of step with this rank, and the worker must end."""
        for other in self._others:
            other.kill()

    def _watch(self, other: subprocess.Popen[bytes]) -> None:
        status = other.wait()
        if self._closing:
            return
        logger.error("a process of this worker ended with status %d; so does the worker", status)
        time.sleep(REFUSED_GRACE_S if status == ExitStatus.MODEL_REFUSED else GRACE_S)
        self._folder.cleanup()
        os._exit(ExitStatus.BROKEN)  # the main thread may wait for the one that is gone, where nothing interrupts it

    @staticmethod
    def _write(other: subprocess.Popen[bytes], body: bytes) -> None:
        assert other.stdin is not None
        other.stdin.write(body)
        other.stdin.flush()
