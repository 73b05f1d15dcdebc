"""Tensor parallelism: one process per device, with weights split by transformers' plan.

Rank 0 is the worker: it schedules and samples. It sends every step to the other ranks (`engine.gpu.rank_process`)
through a pipe, and each rank computes its share. All ranks load, verify and capture in the same order, so that their
collectives match. If one process ends, all end: threads watch the pipe and the other processes, because a main thread
may be blocked in a collective. Processes exit without destroying the process group, since that would wait for captured
collectives.
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
"""Seconds that rank 0 may go on after another rank has ended, to report the reason."""
REFUSED_GRACE_S = 120.0
"""GRACE_S after a rank has refused the model: rank 0 is about to refuse it too, and reports the reason."""
LOADING = timedelta(hours=1)
"""The longest time that a rank waits for another during loading; disks differ in speed."""


class Membership(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    rendezvous: str
    """The path of a file that does not exist yet. A process that can open its folder can join the group."""
    device_type: str


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a `ForwardBatch` without its requests. `chosen`: the number of tokens that follow
    on the device.
    """

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    sequences: list[tuple[int, int, int, list[int]]]
    logits_rows: list[int]
    chosen: int


class Ranks:
    """A process as a member of its worker's process group."""

    def __init__(self, membership: Membership) -> None:
        """Join the process group; waits for the other ranks."""
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
        """Whether rank 0 sends steps. Before that, all ranks run the same code by themselves."""

    def pretrained_options(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` that split the weights."""
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.count, tp_plan="auto")}

    def minimum(self, number: int) -> int:
        """The minimum of `number` over all ranks."""
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def share(self, chosen: torch.Tensor | None) -> None:
        """Broadcast rank 0's tokens to all ranks, on the device."""
        if chosen is not None:
            dist.broadcast(chosen, src=0)


class Leader(Ranks):
    """Rank 0: starts the other ranks and sends them steps."""

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
        """Send the step to the other ranks; raises OSError if one has ended."""
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
        """End the other ranks. This process must exit soon, by `os._exit`."""
        self._closing = True
        for other in self._others:
            with suppress(OSError):  # unsent data for a rank that had already ended
                other.stdin.close()  # type: ignore[union-attr]
        for other in self._others:
            try:
                other.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                other.kill()
        self._folder.cleanup()

    def give_up(self) -> None:
        """End the worker: a step failed on rank 0 while the other ranks may still run it."""
        for other in self._others:
            other.kill()

    def _watch(self, other: subprocess.Popen[bytes]) -> None:
        status = other.wait()
        if self._closing:
            return
        logger.error("a rank process exited with status %d; stopping the worker", status)
        time.sleep(REFUSED_GRACE_S if status == ExitStatus.MODEL_REFUSED else GRACE_S)
        self._folder.cleanup()
        os._exit(ExitStatus.BROKEN)  # the main thread may be blocked in a collective with the ended rank

    @staticmethod
    def _write(other: subprocess.Popen[bytes], body: bytes) -> None:
        assert other.stdin is not None
        other.stdin.write(body)
        other.stdin.flush()
