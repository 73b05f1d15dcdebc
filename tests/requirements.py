"""Programs that some tests need and a machine may lack. A test that needs one is skipped by name; in CI it fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def postgresql() -> Path | None:
    """The folder of PostgreSQL's server programs, which Debian keeps off the path."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders and (folders[-1] / "initdb").exists() else None


NEEDED: dict[str, tuple[Callable[[], object], str]] = {
    "PostgreSQL": (postgresql, "apt-get install postgresql"),
    "Redis": (lambda: shutil.which("redis-server"), "apt-get install redis-server"),
    "Chromium": (lambda: shutil.which("chromium"), "apt-get install chromium"),
    "ChromeDriver": (lambda: shutil.which("chromedriver"), "apt-get install chromium-driver"),
    "a C compiler": (lambda: shutil.which("cc"), "apt-get install gcc"),
}
"""Each with how it is found and how it is installed on Debian. `.ci/run` installs them all."""


def missing() -> list[str]:
    """A line for each program that this machine lacks."""
    return [f"{name} is not installed: {how}" for name, (find, how) in NEEDED.items() if not find()]


def need(name: str) -> None:
    """Skip the test where a program of `NEEDED` is not installed; in CI (`CI=true`) fail it."""
    find, how = NEEDED[name]
    if find():
        return
    told = f"{name} is not installed: {how}"
    if os.environ.get("CI") == "true":
        pytest.fail(told, pytrace=False)
    pytest.skip(told)
