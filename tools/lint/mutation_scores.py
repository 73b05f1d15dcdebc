"""Prints the mutation score of each package from mutmut's results, and the changes that no test noticed.

    python -m tools.lint.mutation_scores [--survivors]

A change that makes a test hang was noticed. Changes of `strict=True` alone are left out: it guards against what does
not happen.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter, defaultdict

MUTMUT = (sys.executable, "-m", "mutmut")
KILLED, SURVIVED = ("killed", "timeout"), ("survived", "no tests")
GUARD = re.compile(r",? *strict=\w+|, *(?=\))")


def results() -> dict[str, str]:
    """What became of each mutant that was tried."""
    told = subprocess.run([*MUTMUT, "results", "--all", "true"], capture_output=True, text=True, check=True).stdout
    rows = (line.strip().rpartition(": ") for line in told.splitlines() if "__mutmut_" in line)
    return {name: status for name, _, status in rows if status in KILLED + SURVIVED}


def change(name: str) -> list[str]:
    """The lines that a mutant takes away and adds."""
    told = subprocess.run([*MUTMUT, "show", name], capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if re.match(r"[-+] ", line)]


def is_guard(lines: list[str]) -> bool:
    """Whether the mutant changes nothing but `strict`."""
    return len({GUARD.sub("", line[1:]) for line in lines}) == 1


def package(name: str) -> str:
    """The mutant's folder; the file where it lies in a folder's first level."""
    parts = name.split(".x")[0].split(".")
    return ".".join(parts if len(parts) < 3 else parts[:-1])


def main() -> None:
    """A row for each package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survivors", action="store_true", help="show each change that no test noticed")
    options = parser.parse_args()
    killed: Counter[str] = Counter()
    survivors: dict[str, list[list[str]]] = defaultdict(list)
    for name, status in results().items():
        lines = change(name)
        if is_guard(lines):
            continue
        if status in KILLED:
            killed[package(name)] += 1
        else:
            survivors[package(name)].append([name, *lines])
    print("| package | mutants | noticed | score |\n| --- | --- | --- | --- |")
    for each in sorted({*killed, *survivors}):
        total = killed[each] + len(survivors[each])
        print(f"| {each} | {total} | {killed[each]} | {killed[each] / total:.0%} |")
    for lines in (lines for each in sorted(survivors) for lines in survivors[each] if options.survivors):
        print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
