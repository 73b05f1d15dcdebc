"""A worker process: `python -m engine`. A launcher starts it and is connected to it by three pipes.

stdin: one line, the EngineConfig as JSON. EOF means that the launcher has ended; the worker then exits. A worker with a
lease (`lease_s`) reads no further: a launcher holds it by its control socket (`engine.process.control`), on which the lines
of stdout are sent.
stdout: a JSON line for each change of state: {"state": "loading" | "ready" | "failed" | "exited", "reason"?, "model"?},
where "model" is the ModelInfo of a ready worker, and a
progress report every second: {"state": "loading" | "alive", "doing", "quiet_s", "patience_s"}
(`engine.process.progress`), by which a launcher distinguishes a hung worker from a busy one.
stderr: the log, as text or as JSON lines. Exit status: `engine.failures.ExitStatus`.

Signals: SIGUSR2 writes the flight recorder's file (`engine.process.flight`). The first SIGTERM drains: the worker refuses new
requests, finishes all others and exits with STOPPED. A second SIGTERM hands over: each unfinished request ends with the finish
reason MOVED, so that its client can continue it at another worker, and the worker exits with STOPPED as soon as its clients
have read that.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine import address, faults
from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.config import EngineConfig
from engine.engine import EngineBroken
from engine.failures import ExitStatus
from engine.process import log_writer
from engine.process.control import Control
from engine.process.flight import Cause, block_signal, recorder
from engine.process.precautions import go_first, write_no_core
from engine.process.progress import Pulse, Reporter, Reports, progress

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.server import EngineServer

logger = logging.getLogger("engine")

SPIN_COUNT = "10000"
"""Iterations that torch's OpenMP threads spin before they sleep, about 100 microseconds. OpenMP reads it when it is
loaded.
"""


def main() -> ExitStatus:
    """Read the config, load the model, serve."""
    block_signal()
    write_no_core()
    go_first()
    # Only status lines go to the status pipe; what libraries print to stdout goes to the log.
    status = os.dup(1)
    os.dup2(2, 1)
    os.set_blocking(status, False)

    def report(state: str, **details: object) -> None:
        """Write one status line; a pipe writes it atomically. Lines are dropped if the launcher does not read or has
        ended.
        """
        line = json.dumps({"state": state, **details}).encode() + b"\n"
        if control is not None:
            control.report(line, changes_state=state != "alive")
            return
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(status, line)

    reports = Reports(report)
    server: EngineServer | None = None
    control: Control | None = None

    def beat(pulse: Pulse) -> None:
        recorder.watch(pulse.quiet_s > pulse.patience_s)  # first: a launcher that reads the report kills this process
        reports.beat(pulse)
        if server is not None:
            server.beat()

    # Ctrl-C in a terminal reaches the whole process group, but only the launcher decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    log_writer.configure(config.log_format, config.worker_id)
    if config.log_format == "json":
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they are no JSON
    recorder.open(config.flight_dir, config.worker_id, config.epoch)
    recorder.answer_signals()
    try:
        endpoint = address.parse(config.address).endpoint(config.tls)
    except (OSError, ValueError) as error:  # a port that is taken, or certificates that cannot be used
        logger.error("cannot listen at %s: %s", config.address, error)
        report("failed", reason=f"cannot listen at {config.address}: {error}")
        return ExitStatus.FAULT
    if config.lease_s:
        control = Control(endpoint, config.lease_s, _end_of_lease)
        control.start()
    report("loading", doing=progress.doing)
    reporter = Reporter(beat)
    reporter.start()
    faults.arm(os.environ)
    if faults.armed:
        logger.warning("fault points are armed: %s", ", ".join(faults.armed))
        faults.hit("start")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from engine.core import EngineCore  # torch is imported only now, after "loading" was reported
    from engine.embedding.core import EmbeddingCore
    from engine.models.files import ModelError, locate, makes_embeddings
    from engine.server import EngineServer

    try:
        embeds = config.task == "embed" or (config.task == "auto" and makes_embeddings(locate(config.model)))
        core: Engine = EmbeddingCore(config) if embeds else EngineCore(config)
        for name, directory in config.required_adapters.items():
            failure: AdapterFailure | None = AdapterFailure(AdapterCode.NO_ADAPTERS)
            if isinstance(core, EngineCore):
                failure = core.adapters.check(Path(directory))
            if failure is not None:
                raise ModelError(f"its adapter {name} cannot be served: {failure.words}")
    except ModelError as error:
        report("failed", reason=str(error))
        return ExitStatus.MODEL_REFUSED
    except Exception as error:  # an outer boundary: a model's files may be wrong in unforeseen ways
        logger.exception("loading failed")
        report("failed", reason=f"{type(error).__name__}: {error}")
        return ExitStatus.MODEL_REFUSED
    server = EngineServer(core, config, endpoint)
    if control is None:
        server.watch(sys.stdin.buffer)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    reports.ready(msgspec.to_builtins(core.info))
    try:
        server.run()
    except EngineBroken as error:
        recorder.write(Cause.CRASH, error)
        report("exited", reason=str(error))
        return ExitStatus.BROKEN
    except Exception as error:  # an outer boundary: the loop ended by a mistake of ours
        recorder.write(Cause.CRASH, error)
        raise
    finally:
        reporter.stop()
        if control is not None:
            control.close()
    report("exited", reason="stopped")
    return ExitStatus.STOPPED


def _end_of_lease() -> None:
    """Exit without waiting for a step or a client."""
    logging.shutdown()  # writes the last lines
    os._exit(ExitStatus.LEASE_EXPIRED)


if __name__ == "__main__":
    exit_status = main()
    logging.shutdown()
    # Skip the interpreter's shutdown, in which a device's library may wait for processes that have ended.
    os._exit(exit_status)
