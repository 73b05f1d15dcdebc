"""What PromQL expressions read: their selectors with matchers, and the labels that they aggregate by. Not an evaluation; where a
Prometheus is installed, `test_dashboards.py` asks it as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"""
    r"""|(?P<number>\d+(?:\.\d+)?)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>]))"""
)
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
VARIABLES = {"__rate_interval": "1m", "__range": "5m", "__interval": "15s"}
"""Grafana's own."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric's name with matchers: (label, operator, value)."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether a series with these labels, its name among them, is selected."""
        return labels["__name__"] == self.metric and all(
            _holds(operator, labels.get(label, ""), value) for label, operator, value in self.matchers
        )


@dataclass(frozen=True, slots=True)
class Read:
    """What an expression reads."""

    selectors: tuple[Selector, ...]
    groupings: frozenset[str]


def substituted(expression: str, variables: dict[str, str]) -> str:
    """The expression with Grafana's variables put in."""
    values = VARIABLES | variables
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda found: values[found[1]], expression)


def read(expression: str) -> Read:
    """What the expression reads. Raises ValueError if it is not understood."""
    tokens = _tokens(expression)
    selectors, groupings, at = [], set(), 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind != "name" or text in OPERATORS:
            at += 1
        elif text in GROUPINGS:
            end = tokens.index(("sign", ")"), at)
            groupings |= {word for kind, word in tokens[at + 2 : end] if kind == "name"}
            at = end + 1
        elif following == "(" or following in GROUPINGS:  # a function, or an aggregation
            at += 1
        else:
            matchers: list[tuple[str, str, str]] = []
            at += 1
            if following == "{":
                end = tokens.index(("sign", "}"), at)
                inner = [token for token in tokens[at + 1 : end] if token[1] != ","]
                if len(inner) % 3:
                    raise ValueError(f"{expression}: matchers of {text}")
                parts = [inner[i : i + 3] for i in range(0, len(inner), 3)]
                matchers = [(label, operator, value[1:-1]) for (_, label), (_, operator), (_, value) in parts]
                at = end + 1
            selectors.append(Selector(text, tuple(matchers)))
    if not selectors:
        raise ValueError(f"{expression}: reads nothing")
    return Read(tuple(selectors), frozenset(groupings))


def series(page: str, target: dict[str, str]) -> list[dict[str, str]]:
    """The series of a page of metrics, with the labels of the target that it was scraped from."""
    found = []
    for line in page.splitlines():
        match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+(?: \S+)?", line)
        if match and not line.startswith("#"):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            found.append({"__name__": match[1], **labels, **target})
    return found


def shortcomings(expression: str, found: list[dict[str, str]]) -> list[str]:
    """Selectors without series, and labels to aggregate by that no selected series has."""
    asked = read(expression)
    wrong, selected = [], []
    for selector in asked.selectors:
        matching = [labels for labels in found if selector.matches(labels)]
        selected += matching
        if not matching:
            wrong.append(f"no series for {selector}")
    wrong += [f"no label {name}" for name in asked.groupings if not any(name in labels for labels in selected)]
    return wrong


def _tokens(expression: str) -> list[tuple[str, str]]:
    found, at, text = [], 0, expression.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{expression}: not understood at {text[at : at + 20]!r}")
        found.append((str(match.lastgroup), str(match[str(match.lastgroup)])))
        at = match.end()
    return found


def _holds(operator: str, value: str, wanted: str) -> bool:
    if operator in ("=", "!="):
        return (value == wanted) is (operator == "=")
    if operator in ("=~", "!~"):
        return (re.fullmatch(wanted, value) is not None) is (operator == "=~")
    raise ValueError(f"{operator} matches nothing")
