"""A worker process: `python -m engine`, started by a launcher and talking to it over three pipes.

stdin: one line, the EngineConfig as JSON; its EOF means that the launcher is gone, and the worker exits.
stdout: a JSON line for each change of state: {"state": "loading" | "ready" | "failed" | "exited", "reason"?}, and once a
second one that says what the worker is doing and whether it moves on: {"state": "loading" | "alive", "doing", "quiet_s",
"patience_s"} (`engine.process.progress`), so that a launcher tells a worker that hangs from one that has much to do.
stderr: the log. Exit status: `engine.failures.ExitStatus`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.engine import EngineBroken
from engine.failures import ExitStatus
from engine.process import log_writer
from engine.process.progress import Pulse, Reporter, progress

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.server import EngineServer

logger = logging.getLogger("engine")

SPIN_COUNT = "10000"
"""About 100 microseconds, for which torch's OpenMP threads look for work before they sleep; it reads this when it is loaded."""


def main() -> ExitStatus:
    """Read the config, load the model, serve."""
    # The status pipe is for status alone; whatever a library prints goes to the log.
    status = os.dup(1)
    os.dup2(2, 1)
    os.set_blocking(status, False)

    def report(state: str, **details: object) -> None:
        """A line, which a pipe takes whole. Nobody waits for a launcher that has not read for minutes, or is gone."""
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(status, json.dumps({"state": state, **details}).encode() + b"\n")

    server: EngineServer | None = None

    def beat(pulse: Pulse) -> None:
        report("loading" if server is None else "alive", **msgspec.structs.asdict(pulse))
        if server is not None:
            server.beat()

    log_writer.configure()
    # The launcher decides when to stop: Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    report("loading", doing=progress.doing)
    reporter = Reporter(beat)
    reporter.start()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from engine.core import EngineCore  # torch is imported only now, after "loading" is known
    from engine.embedding.core import EmbeddingCore
    from engine.models.files import ModelError, locate, makes_embeddings
    from engine.server import EngineServer

    try:
        embeds = config.task == "embed" or (config.task == "auto" and makes_embeddings(locate(config.model)))
        core: Engine = EmbeddingCore(config) if embeds else EngineCore(config)
    except ModelError as error:
        report("failed", reason=str(error))
        return ExitStatus.MODEL_REFUSED
    except Exception as error:  # one of the edges: a model's files may be wrong in ways that nobody foresaw
        logger.exception("loading failed")
        report("failed", reason=f"{type(error).__name__}: {error}")
        return ExitStatus.MODEL_REFUSED
    server = EngineServer(core, config)
    server.watch(sys.stdin.buffer)
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "draining", True))
    report("ready")
    try:
        server.run()
    except EngineBroken as error:
        report("exited", reason=str(error))
        return ExitStatus.BROKEN
    finally:
        reporter.stop()
    report("exited", reason="stopped")
    return ExitStatus.STOPPED


if __name__ == "__main__":
    exit_status = main()
    logging.shutdown()
    # Not through the interpreter's end, where a device's library may wait for processes that are gone.
    os._exit(exit_status)
