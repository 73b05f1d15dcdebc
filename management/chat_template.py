"""Checks chat templates that clients write: their syntax here, and one rendering in the process that renders them for
requests too, which the kernel ends when it takes too long or too much memory.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import jinja2
import jinja2.ext
import msgspec
import structlog
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

logger = structlog.get_logger(__name__)

ROOT = Path(__file__).resolve().parents[1]
"""Where `python -m inference` finds the package."""
RENDERER = (sys.executable, "-m", "inference.chat.template_process")
"""Its frames, both ways: a little-endian unsigned 32-bit length and msgpack."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
"""Variables of the process: no secrets."""
TRIAL = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "What is the capital of Spain?"},
    ],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}
TRIAL_S = 30.0
"""The process ends itself long before."""
ENDED = (-signal.SIGPROF, -signal.SIGKILL)
"""Exit statuses of a process that the kernel ended for its CPU time or its memory."""
TOO_MUCH = "it takes too long or too much memory"

_environment = ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])


def problem(template: str) -> str:
    """Why a chat template cannot be used; "" if nothing speaks against it. One that refuses the conversation of the
    trial is accepted: it may take others. It starts a process, so no transaction may wait for it.
    """
    wrong = syntax_error(template)
    if wrong or not template:
        return wrong
    try:
        return _trial(template)
    except (OSError, NotTried) as error:  # not by the template's fault: requests will show
        logger.warning("chat template not tried", reason=str(error))
        return ""


class NotTried(Exception):
    """The process that renders did not run; the message says why."""


@lru_cache(maxsize=16)
def _trial(template: str) -> str:
    """TOO_MUCH if a rendering exceeds the limits of the process, else "". Raises OSError or NotTried."""
    given = b"".join(struct.pack("<I", len(body)) + body for body in map(msgspec.msgpack.encode, (template, TRIAL)))
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        done = subprocess.run(
            RENDERER, input=given, capture_output=True, timeout=TRIAL_S, env=environment, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return TOO_MUCH
    if done.stdout:
        return ""
    if done.returncode in ENDED or b"MemoryError" in done.stderr:
        return TOO_MUCH
    raise NotTried(f"exit status {done.returncode}: {done.stderr[-200:].decode('utf-8', 'replace')}")


def syntax_error(template: str) -> str:
    """What is wrong with a Jinja template; "" if nothing is.

    It is only parsed: compiling would evaluate constant expressions, such as a text padded to a gigabyte.
    """
    try:
        tree = _environment.parse(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "is nested too deeply"
    for node in tree.find_all((nodes.Filter, nodes.Test)):
        known = _environment.filters if isinstance(node, nodes.Filter) else _environment.tests
        if node.name not in known:
            return f"line {node.lineno}: there is no {type(node).__name__.lower()} {node.name!r}"
    return ""
