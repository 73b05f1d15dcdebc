"""A chat template that a client of the control plane wrote. It is compiled and rendered in a process of its own with limits of time
and memory, so that one which never ends, or grows, costs the requests that use it and nobody else anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from inference.chat.template_process import read_frame, write_frame

ROOT = Path(__file__).resolve().parents[2]
"""Where `python -m inference` finds the package: in a source tree and in a wheel."""
COMMAND = (sys.executable, "-m", "inference.chat.template_process")
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
"""Variables of the process: no secrets."""
TOO_MUCH = "it takes too long or too much memory"


class GuardedTemplate:
    """Renders as `jinja2.Template` does, for one caller at a time. The process starts with the first rendering, and again after one
    that ended it.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        """Where a rendering is waited for: those of one template keep no other's waiting."""

    def render(self, values: dict[str, Any]) -> str:
        """The text of the template with these values by their names; raises jinja2.TemplateError."""
        with self._turn:
            try:
                process = self._process or self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                write_frame(process.stdin, values)
                text, error = msgspec.msgpack.decode(read_frame(process.stdout), type=tuple[str, str])
            except (OSError, EOFError) as problem:
                self._drop()
                raise jinja2.TemplateError(TOO_MUCH) from problem
        if error:
            raise jinja2.TemplateError(error)
        return text

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        process = subprocess.Popen(
            COMMAND,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        write_frame(process.stdin, self._source)
        return process

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and reap it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not flushed is lost with the process
                pipe.close()
