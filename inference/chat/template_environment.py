"""The Jinja environment of chat templates: sandboxed, with what transformers gives to templates and nothing else."""

from __future__ import annotations

import datetime
import json
from functools import lru_cache

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


@lru_cache
def environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers uses for chat templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
