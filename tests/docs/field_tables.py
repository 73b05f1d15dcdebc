"""Reads the tables of fields in the documentation, and makes values on both sides of what they say."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

LINK = re.compile(r"\]\(#([\w-]+)\)")
LITERAL = re.compile(r"(?:model, )?`?(null|true|false|-?\d+(?:\.\d+)?|\".*\"|\[.*\]|\{\})`?$")
INTERVAL = re.compile(r"([\[(])(-?[\d.e]+), (-?[\d.e]+)([\])])$")
ENTRIES = re.compile(r"(?:(\d+) to|up to) (\d+)( entries)?(?: of (\d+) to (\d+) characters)?$")
STEP = 1e-3
NOBODY = "no such value"
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "integer": [1],
    "number": [1, 0.5],
    "text": ["x"],
    "object": [{}],
    "list of texts": [["x"]],
    "list of integers": [[5]],
    "list of objects": [[{}]],
    "list of lists of integers": [[[5]]],
}
WRONG: dict[str, Any] = {"text": 5, "object": 5}
"""A value of a wrong type for each type; "no such value" for the others."""


@dataclass(frozen=True)
class Row:
    """A line of a table, as it is written."""

    field: str
    taken: str
    default: str
    range: str
    differs: str

    @property
    def types(self) -> list[str]:
        return re.split(r", | or ", self.taken)

    @property
    def refused(self) -> bool:
        return self.taken == "refused"

    @property
    def ignored(self) -> bool:
        return self.taken == "ignored"

    def default_values(self) -> list[Any]:
        """The default as JSON, if it is a value; null, as the absent value, beside it."""
        found = LITERAL.match(self.default)
        return [json.loads(found[1])] if found else []

    def accepted(self) -> list[Any]:
        """Values within the range, its ends among them, one of each type at least."""
        if self.range.startswith("`"):
            return re.findall(r"`([^`]*)`", self.range)
        if interval := INTERVAL.match(self.range):
            low, high = (self._number(interval[i]) for i in (2, 3))
            ends = [low] if interval[1] == "[" else []
            ends += [high] if interval[4] == "]" and high < 1e30 else []
            return ends or [(low + high) / 2]
        if self.range.startswith(("≥ ", "> ")):
            low = self._number(self.range.split()[1])
            return [low] if self.range[0] == "≥" else [low + STEP]
        if found := ENTRIES.match(self.range):
            return [self._sized(int(found[2]), found)]
        if "characters" in self.range:
            low, high = map(int, re.findall(r"\d+", self.range)[:2])
            return ["x" * low, "x" * high]
        return list(itertools.chain.from_iterable(VALUES[kind] for kind in self.types))

    def wrong(self) -> list[Any]:
        """Values just outside the range, and one of a type that is not taken."""
        found = ENTRIES.match(self.range)
        values: list[Any] = []
        if self.range.startswith("`"):
            values = [NOBODY]
        elif interval := INTERVAL.match(self.range):
            low, high = (self._number(interval[i]) for i in (2, 3))
            step = 1 if "integer" in self.types else STEP
            values = [low - step if interval[1] == "[" else low]
            values += [high + step if interval[4] == "]" else high] if high < 1e30 else []
        elif self.range.startswith(("≥ ", "> ")):
            low = self._number(self.range.split()[1])
            values = [low - 1] if self.range[0] == "≥" else [low]
        elif found:
            values = [self._sized(int(found[2]) + 1, found)] + ([self._sized(0, found)] if found[1] else [])
            if found[5]:
                values += ["x" * (int(found[5]) + 1), ["x" * (int(found[5]) + 1)]]
        elif "characters" in self.range:
            low, high = map(int, re.findall(r"\d+", self.range)[:2])
            values = ["", "x" * (high + 1)] if low else ["x" * (high + 1)]
        if self.taken != "any":
            values.append(WRONG.get(self.types[0], NOBODY) if "text" not in self.types else 5)
        return values

    def _sized(self, size: int, found: re.Match[str]) -> Any:
        """A list of so many entries, of a type that the row takes; ids are different ones."""
        if self.taken == "object":
            return {str(i): 0 for i in range(size)}
        kind = next(kind for kind in self.types if kind.startswith("list of "))
        one = VALUES[kind][0][0]
        if kind == "list of texts" and found[5]:
            one = "x" * int(found[5])
        return [f"{one}{i}"[-256:] if kind == "list of texts" else one for i in range(size)]

    def _number(self, text: str) -> float:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


@dataclass(frozen=True)
class Page:
    """The tables of a page, by the anchors of their headings, and the tables that describe each route."""

    tables: dict[str, list[Row]]
    routes: dict[str, list[str]]


def read(text: str) -> Page:
    """The tables of a page of the documentation."""
    tables: dict[str, list[Row]] = {}
    cells: dict[str, str] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = anchor(line.lstrip("# "))
        elif line.startswith("| `") and line.count("|") == 6:
            columns = [cell.strip() for cell in line.strip("|").split("|")]
            tables.setdefault(heading, []).append(Row(columns[0].strip("`"), *columns[1:]))
        elif line.startswith("| `") and heading.startswith("bodies"):
            route, fields = (cell.strip() for cell in line.strip("|").split("|"))
            cells[route] = fields
    return Page(tables, {route: _linked(route, cells) for route in cells})


def _linked(route: str, cells: dict[str, str]) -> list[str]:
    """The anchors of a route's tables, with those of the route that it is like."""
    fields = cells[route]
    anchors = LINK.findall(fields)
    if like := re.match(r"as (`[^`]+`(?: with `\w+`)?)", fields):
        anchors = [*_linked(like[1], cells), *anchors]
    return anchors


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
