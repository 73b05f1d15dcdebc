"""Route table: exact paths by dictionary, paths with parameters by regular expression."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inference.errors import MethodNotAllowed, RouteNotFound
from inference.http.sites import SAFE_METHODS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from inference.errors import ServingError
    from inference.http.exchange import Exchange, Response
    from inference.services import Services

    Handler = Callable[[Exchange, Services], Awaitable[None]]
    Render = Callable[[ServingError], Response]

KINDS = {None: "[^/]+", "path": ".+", "name": r"[\w\-.]+"}
_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")


class Empty:
    """The `answer` of a route whose responses have no body."""


class Never:
    """The `answer` of a route that refuses every request."""


@dataclass(frozen=True, slots=True)
class Described:
    """A route in the documentation, by the vendor's names: the operation's id, and the schemas of a whole response, of the
    content type `kind`, and of a frame of a stream; None: there is no such response.
    """

    operation: str = ""
    answer: Any = None
    frames: Any = None
    kind: str = "application/json"


@dataclass(frozen=True, slots=True)
class Document:
    """A vendor's own OpenAPI document at `path`: that of a route set alone, and of `others`, paths of other sets that the
    vendor has too. `license` and `tags` are OpenAPI's objects.
    """

    path: str
    title: str
    license: dict[str, str]
    tags: tuple[dict[str, str], ...]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    `{name}` in the path matches a segment, `{name:path}` any text including slashes (model names contain them),
    `{name:name}` letters, digits, `_`, `-` and `.`. `scope` is the API key scope that the route needs; None: no key
    is needed. `render` renders errors in the dialect's format. `body` is the schema of the request, for the
    documentation.

    `changes`: a GET with side effects; cross-site requests to it are refused as for POST. `needs_permit`: the route
    is refused without reading the body when no permit is free; `refused` is then called for the dialect's counters.
    `keys`: body keys that select this route among dialects that share the path; a route without keys takes the rest.
    `trailing_slash`: whether the path may end with one more slash. `asks`: whether a request with these headers only asks for
    what was inferred before. `selecting`: headers that choose what answers.
    """

    method: str
    path: str
    handler: Handler
    render: Render
    summary: str
    scope: str | None = "infer"
    body: Any = None
    keys: tuple[str, ...] = ()
    trailing_slash: bool = False
    changes: bool = False
    needs_permit: bool = False
    refused: Callable[[Services], None] | None = None
    asks: Callable[[Mapping[bytes, bytes]], bool] | None = None
    selecting: tuple[str, ...] = ()
    described: Described = Described()

    @property
    def guarded(self) -> bool:
        """Whether cross-site requests are refused."""
        return self.changes or self.method not in SAFE_METHODS

    @property
    def plain_path(self) -> str:
        """The path with plain `{name}` parameters, as in OpenAPI."""
        return _PARAMETER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """The names of the path parameters."""
        return [name for name, _ in _PARAMETER.findall(self.path)]


@dataclass(frozen=True, slots=True)
class RouteSet:
    """The routes of one dialect on one plane. `render` also renders errors for unknown paths that begin with
    `prefixes`. Paths with these prefixes are found below each of `mounts` too.
    """

    routes: tuple[Route, ...]
    render: Render
    statuses: frozenset[int]
    """The statuses of its errors, for the documentation."""
    prefixes: tuple[str, ...] = ()
    tag: str = ""
    """The vendor's tag in the documentation; "": the dialect's name."""
    error: Any = None
    """The schema of its errors, for the documentation."""
    mounts: tuple[str, ...] = ()
    document: Document | None = None

    def mounted(self, path: str) -> str | None:
        """The path of this set that is meant by one below a mount; None if it is below none."""
        found = (path.removeprefix(mount) for mount in self.mounts if path.startswith(mount + "/"))
        return next((own for own in found if own.startswith(self.prefixes)), None)


class RouteTable:
    """The routes of one plane. The first set renders errors for paths that belong to no set."""

    def __init__(self, route_sets: Iterable[RouteSet]) -> None:
        self.route_sets = list(route_sets)
        self.routes = [route for routes in self.route_sets for route in routes.routes]
        self._exact: dict[str, dict[str, list[Route]]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, list[Route]]]] = []
        for route in self.routes:
            self._methods_of(route).setdefault(route.method, []).append(route)

    def find(self, method: str, path: str) -> tuple[list[Route], dict[str, str]]:
        """The routes of the path, and the path parameters; raises RouteNotFound or MethodNotAllowed. HEAD is routed
        as GET.
        """
        asked, path = "GET" if method == "HEAD" else method, self._own(path)
        matched = self._match(path)
        if matched is None:
            if (found := self._with_slash(asked, path)) is not None:
                return found
            raise RouteNotFound(f"Not Found: this server does not serve {method[:20]} {path[:200]}")
        methods, parameters = matched
        routes = methods.get(asked)
        if routes is None:
            raise MethodNotAllowed(sorted(methods))
        return routes, parameters

    def _match(self, path: str) -> tuple[dict[str, list[Route]], dict[str, str]] | None:
        """The routes of just this path by method, and the path parameters."""
        if path in self._exact:
            return self._exact[path], {}
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match:
                return methods, match.groupdict()
        return None

    def _with_slash(self, method: str, path: str) -> tuple[list[Route], dict[str, str]] | None:
        """The routes that take the path with its last slash."""
        matched = self._match(path[:-1]) if path.endswith("/") else None
        if matched is None:
            return None
        routes = [route for route in matched[0].get(method, ()) if route.trailing_slash]
        return (routes, matched[1]) if routes else None

    def rank(self, method: str, path: str) -> int:
        """The length of the longest matching route's literal text, -1 without a match; planes on one port are chosen
        by it.
        """
        method, path = "GET" if method == "HEAD" else method, self._own(path)
        if self._match(path) is None and self._with_slash(method, path) is not None:
            path = path[:-1]
        if path in self._exact:
            return len(path) + 1 if method in self._exact[path] else 0
        fitting = [
            len(pattern.pattern) for pattern, methods in self._patterns if method in methods and pattern.fullmatch(path)
        ]
        return max(fitting, default=-1)

    def renderer(self, path: str) -> Render:
        """The error renderer for this path, also for unknown paths."""
        path = self._own(path)
        methods = self._exact.get(path)
        if methods:
            return next(iter(methods.values()))[0].render
        owner = next((each for each in self.route_sets if path.startswith(each.prefixes)), self.route_sets[0])
        return owner.render

    def _own(self, path: str) -> str:
        """The path without the mount below which it is."""
        found = (routes.mounted(path) for routes in self.route_sets if routes.mounts)
        return next((own for own in found if own is not None), path)

    def _methods_of(self, route: Route) -> dict[str, list[Route]]:
        if "{" not in route.path:
            return self._exact.setdefault(route.path, {})
        parts = _PARAMETER.split(route.path)  # text, name, kind, text, name, kind, ..., text
        expression = re.escape(parts[0])
        for name, kind, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            expression += f"(?P<{name}>{KINDS[kind]}){re.escape(text)}"
        pattern = re.compile(expression)
        known = next((methods for p, methods in self._patterns if p == pattern), None)
        if known is None:
            self._patterns.append((pattern, known := {}))
        return known


def route_for(routes: list[Route], body: dict[str, Any]) -> Route:
    """The route of a shared path for this body; the first one if no key matches."""
    for route in routes:
        if any(body.get(key) is not None for key in route.keys):
            return route
    return next((route for route in routes if not route.keys), routes[0])
