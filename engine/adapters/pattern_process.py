"""The process that matches patterns for `engine.adapters.patterns`; the kernel ends it when it exceeds its CPU time.

stdin: a JSON object with `patterns`, `names`, and whether they are to match `whole`. stdout: a line with the number of
each pattern before it is tried, then a line with a JSON list: for each name, the number of the first pattern that
matches it, or null. Exit status 2: the pattern whose number is on the last line is not a regular expression.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys

CPU_S = 2
MEMORY_BYTES = 1 << 29


def main() -> int:
    """Set resource limits and a low priority, then match."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asked = json.load(sys.stdin)
    names: list[str] = asked["names"]
    found: list[int | None] = [None] * len(names)
    for number, pattern in enumerate(asked["patterns"]):
        os.write(1, b"%d\n" % number)
        try:
            # As peft matches them (peft.tuners.tuners_utils.check_target_module_exists and peft.utils.other.get_pattern_key).
            fits = re.compile(pattern).fullmatch if asked["whole"] else re.compile(rf"(.*\.)?({pattern})$").match
        except (re.error, RecursionError, OverflowError):
            return 2
        for i, name in enumerate(names):
            if found[i] is None and fits(name):
                found[i] = number
    os.write(1, json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
