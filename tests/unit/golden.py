"""Whole answers, byte for byte and chunk for chunk, kept as text files beside the tests.

A file holds the status, the headers and the body; where a stream was cut into chunks, each begins behind a line `-- chunk`.
Only what differs from run to run (ids, times, and lengths, which are checked
against the body) stands as a mark. `UPDATE_GOLDENS=1 pytest tests/unit` writes them anew.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.unit.scripts import Script
from tests.unit.serving import Answer, Serving

FOLDER = Path(__file__).parent / "goldens"
MARKS = tuple(
    (re.compile(expression), mark)
    for expression, mark in (
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
        (r"[0-9a-f]{32}", "<id>"),
        (r"[0-9a-f]{24}", "<id>"),
        (r"\b(call_)[0-9A-Za-z]{8}\b", r"\1<id>"),
        (r'("seed":) ?\d{6,}', r"\1<seed>"),
        (r'("(?:created|created_at|completed_at)":) ?\d+(?:\.\d+)?', r"\1<time>"),
        (r"(?m)^(content-length): \d+$", r"\1: <length>"),
        (r'("decode_time_arr":) ?\[[\d,]*\]', r"\1<times>"),
        (r'("(?:prefill_time|decode_time)":) ?\d+(?:\.\d+)?', r"\1<time>"),
        (r"(?m)^(x-[a-z-]*-time[a-z-]*|x-time-per-token): \d+(?:\.\d+)?$", r"\1: <time>"),
    )
)


def told(answer: Answer) -> str:
    """An answer as its file has it."""
    length = answer.header("content-length")
    assert length is None or int(length) == len(answer.body)
    lines = [str(answer.status), *(f"{k.decode().lower()}: {v.decode('latin-1')}" for k, v in answer.headers)]
    body = "\n".join(f"-- chunk\n{chunk.decode()}" for chunk in answer.chunks)
    text = "\n".join(lines) + "\n\n" + (answer.text if len(answer.chunks) == 1 else body) + "\n"
    for pattern, mark in MARKS:
        text = pattern.sub(mark, text)
    return text


@dataclass(frozen=True)
class Case:
    """A call, what the worker says, and under which name its answer is kept."""

    name: str
    path: str
    body: object
    scripts: tuple[Script, ...] = ()

    def __str__(self) -> str:
        return self.name


async def check_case(serving: Serving, case: Case, folder: str, plane: str = "front") -> None:
    """The case's answer is the one that is kept."""
    serving.worker.scripts.extend(case.scripts)
    check(await serving.post(case.path, case.body, plane=plane), f"{folder}/{case.name}")


def check(answer: Answer, name: str) -> None:
    """The answer is the one in `goldens/<name>.txt`."""
    path, actual = FOLDER / f"{name}.txt", told(answer)
    if os.environ.get("UPDATE_GOLDENS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(actual)
    expected = path.read_text()
    difference = "\n".join(difflib.unified_diff(expected.splitlines(), actual.splitlines(), str(path), "now"))
    assert actual == expected, difference
