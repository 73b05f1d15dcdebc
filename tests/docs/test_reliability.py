"""The page of faults and attacks names tests that exist, and explains every fault point."""

from __future__ import annotations

import ast
import re

from engine.faults import POINTS, Mode
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def functions(path: str) -> set[str]:
    """The names of a file's tests."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_")}


def test_every_named_test_exists():
    assert len(NAMED) > 100
    for path, name in NAMED:
        assert (ROOT / path).is_file(), path
        assert name in functions(path), f"{path}::{name}"


def test_every_row_names_a_test():
    for section in ("## Faults", "## Attacks"):
        table = PAGE.split(section, 1)[1].split("\n## ", 1)[0]
        rows = [
            line
            for line in table.splitlines()
            if line.startswith("| ") and not line.startswith(("| ---", "| fault", "| attack"))
        ]
        assert len(rows) > 30, section
        for row in rows:
            assert "::test_" in row, row


def test_every_test_of_faults_and_attacks_is_on_the_page():
    named = {path for path, _ in NAMED}
    for folder in ("faults", "security"):
        for path in (ROOT / "tests" / folder).glob("test_*.py"):
            assert path.relative_to(ROOT).as_posix() in named, path


def test_every_fault_point_and_mode_is_explained():
    for name in (*POINTS, *Mode):
        assert f"| `{name}` |" in PAGE, name
