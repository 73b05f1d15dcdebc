"""Checks chat templates that clients write: their syntax here, and one rendering in the process that renders them for requests
too, which the kernel ends when it takes too long or too much memory.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import jinja2
import jinja2.ext
import msgspec
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = Path(__file__).resolve().parents[1]
"""Where `python -m inference` finds the package."""
RENDERER = (sys.executable, "-m", "inference.chat.template_process")
"""Its frames, both ways: a little-endian unsigned 32-bit length and msgpack."""
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

_environment = ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])


def problem(template: str) -> str:
    """Why a chat template cannot be used; "" if nothing speaks against it. One that refuses this conversation may take others."""
    return syntax_error(template) or ("" if _ends(template) else "it takes too long or too much memory")


def _ends(template: str) -> bool:
    """Whether it renders a short conversation, or refuses it, within the limits of the process."""
    if not template:
        return True
    given = b"".join(struct.pack("<I", len(body)) + body for body in map(msgspec.msgpack.encode, (template, TRIAL)))
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
    try:
        done = subprocess.run(
            RENDERER, input=given, capture_output=True, timeout=TRIAL_S, env=environment, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return bool(done.stdout)


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
