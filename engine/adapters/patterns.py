"""Matches the regular expressions of `rank_pattern` and `alpha_pattern` against module names.

The expressions come from the adapter's author and can take exponential time, so a separate process matches them, with
limits on its time and memory. It uses the same library as peft (`re`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import CONFIG
from engine.adapters.pattern_process import CPU_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

PROGRAM = Path(__file__).with_name("pattern_process.py")
PATIENCE_S = 120
"""Wall-clock limit in seconds, for machines that are too busy to give the process its CPU_S."""
NO_PATTERN = 2


def match(field: str, patterns: dict[str, Any], names: Collection[str], *, whole: bool = False) -> dict[str, Any]:
    """The value of the first pattern that matches each name, or its end after a dot unless `whole`, for the names that one matches.
    Raises AdapterError, which names the `field`.
    """
    if not patterns:
        return {}
    keys = list(patterns)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(PROGRAM)],
            input=json.dumps({"patterns": keys, "names": list(names), "whole": whole}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = type(error).__name__
        raise AdapterError(AdapterCode.PATTERN_NOT_NOW, file=CONFIG, field=field, reason=reason) from error
    *tried, last = done.stdout.split(b"\n")
    if done.returncode == 0:
        found = json.loads(last)
        return {name: patterns[keys[i]] for name, i in zip(names, found, strict=True) if i is not None}
    pattern = _named(keys, tried)
    if done.returncode == NO_PATTERN:
        raise AdapterError(AdapterCode.PATTERN_INVALID, file=CONFIG, field=field, pattern=pattern)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise AdapterError(AdapterCode.PATTERN_SLOW, file=CONFIG, field=field, pattern=pattern, limit_s=CPU_S)
    raise AdapterError(AdapterCode.PATTERN_FAILED, file=CONFIG, field=field, pattern=pattern)


def _named(keys: list[str], tried: Iterable[bytes]) -> str:
    numbers = [int(number) for number in tried]
    return repr(keys[numbers[-1]][:200]) if numbers else "a pattern"
