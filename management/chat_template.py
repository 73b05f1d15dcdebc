"""Checks the syntax of chat templates, without running or compiling them."""

from __future__ import annotations

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_environment = ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])


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
