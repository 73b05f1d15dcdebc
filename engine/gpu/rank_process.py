"""The process of a rank other than 0: `python -m engine.gpu.rank_process`. It loads the model as rank 0 does, then
computes its share of each step that rank 0 sends to its standard input. It ends when that closes.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec
import torch

from engine.batch import ForwardBatch, SequenceSlice
from engine.failures import ExitStatus
from engine.gpu.ranks import Membership, Ranks, StepMessage
from engine.messages import frame_length
from engine.process import log_writer

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("engine")


def received(pipe: BinaryIO) -> Iterator[bytes]:
    """Message bodies until the pipe closes."""
    while len(head := pipe.read(4)) == 4:
        yield pipe.read(frame_length(head))


def to_batch(message: StepMessage, device: torch.device) -> ForwardBatch:
    """The batch of a step message; its `chosen` tokens are received separately."""
    return ForwardBatch(
        input_ids=torch.tensor([message.input_ids]),
        positions=torch.tensor([message.positions]),
        slot_mapping=torch.tensor(message.slot_mapping),
        sequences=[SequenceSlice(*sequence) for sequence in message.sequences],
        logits_rows=torch.tensor(message.logits_rows, dtype=torch.int64),
        sampled=[],
        drafts={},
        prompt_rows=[],
        chosen=torch.empty(message.chosen, dtype=torch.int64, device=device) if message.chosen else None,
    )


def read_steps(pipe: BinaryIO, steps: queue.SimpleQueue[bytes]) -> NoReturn:
    """Forward messages to the main thread; exit the process when the pipe closes, even if the main
    thread is blocked.
    """
    for body in received(pipe):
        steps.put(body)
    os._exit(ExitStatus.STOPPED)


def main() -> NoReturn:
    """Join the process group, load the model, and run the steps of rank 0 until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 decides when to stop, and may have requests to finish
    membership = msgspec.msgpack.decode(next(received(sys.stdin.buffer)), type=Membership)
    log_writer.configure(membership.config.log_format, membership.config.worker_id)
    steps: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_steps, args=(sys.stdin.buffer, steps), daemon=True).start()
    from engine.models.files import ModelError

    try:
        compute(membership, steps)
    except ModelError as error:
        logger.error("rank %d: %s", membership.rank, error)
        os._exit(ExitStatus.MODEL_REFUSED)
    except BaseException:  # an outer boundary; the interpreter's own shutdown could wait for collectives
        logger.exception("rank %d failed", membership.rank)
        os._exit(ExitStatus.FAULT)


def compute(membership: Membership, steps: queue.SimpleQueue[bytes]) -> NoReturn:
    """Load the model as rank 0 does, then run the steps that rank 0 sends."""
    from engine.gpu.backend import DeviceBackend
    from engine.models.prepared import prepare

    ranks, config = Ranks(membership), membership.config
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = DeviceBackend(config, ranks.device, ranks=ranks)
    prepared = prepare(config, backend)
    decoder = msgspec.msgpack.Decoder(StepMessage)
    with torch.inference_mode():
        while True:
            message = decoder.decode(steps.get())
            backend.run(prepared.loaded.forward, prepared.cache, to_batch(message, ranks.device))


if __name__ == "__main__":
    main()
