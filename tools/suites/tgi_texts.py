"""A plugin of pytest: an assertion about a vendor's text that fails is noted, and the test goes on.

`tools.suites.tgi` loads it. A vendor's tests name the texts of the vendor's weights, and would else stop at the first of
them. Only `assert A == B` with prose in one side's literal goes on: a text with a space or a line break, also in a list.
Names, numbers, roles and reasons are compared as ever. The report of each case has the property `texts`, how many differed.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest
from _pytest.assertion import rewrite

REWRITE = rewrite.rewrite_asserts
differing: list[str] = []
"""The lines of the running case whose texts differed."""


class Softener(ast.NodeTransformer):
    """Puts every assertion about prose into a `try`."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = node.test
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
            return node
        if not any(prose(side) for side in (test.left, *test.comparators)):
            return node
        note = ast.parse(f"__import__({__name__!r}, fromlist=['note']).note({ast.unparse(test)!r})").body
        handler = ast.ExceptHandler(type=ast.Name("AssertionError", ast.Load()), name=None, body=note)
        return ast.fix_missing_locations(ast.copy_location(ast.Try([node], [handler], [], []), node))


def prose(side: ast.expr) -> bool:
    """Whether an expression is or contains a literal text of several words."""
    if isinstance(side, (ast.Subscript, ast.Call, ast.Attribute)):
        return False
    return any(
        isinstance(part, ast.Constant) and isinstance(part.value, str) and bool(set(part.value) & {" ", "\n"})
        for part in ast.walk(side)
    )


def note(line: str) -> None:
    """Remember an assertion that failed."""
    differing.append(line)


def rewrite_softly(module: ast.Module, source: bytes, *rest: Any) -> None:
    """What pytest does to the assertions of a test's file, after this plugin."""
    REWRITE(Softener().visit(module), source, *rest)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Report how many texts differed; pytest writes the properties after the teardown."""
    if call.when == "call":
        item.user_properties.append(("texts", len(differing)))
        differing.clear()
    yield


rewrite.rewrite_asserts = rewrite_softly
