"""Paths to handlers: exact ones by dictionary, those with parameters by their anchored ends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inference.errors import MethodNotAllowed, RouteNotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.asgi import Exchange, Response
    from inference.errors import ServingError
    from inference.services import Services

    Handler = Callable[[Exchange, Services], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. `{name}` in the path matches any text, slashes included: model names hold them.

    `scope` is what an API key must allow; None opens the route to everybody. `render` turns errors into the dialect's
    own answers. `body` is the schema of the request, for the documentation.
    """

    method: str
    path: str
    handler: Handler
    render: Callable[[ServingError], Response]
    summary: str
    scope: str | None = "infer"
    body: Any = None


class RouteTable:
    """The routes of one plane."""

    def __init__(self, routes: list[Route], fallback: Callable[[str], Callable[[ServingError], Response]]) -> None:
        """`fallback` gives the error renderer for a path that no route has."""
        self.routes, self._fallback = routes, fallback
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        for route in routes:
            if "{" not in route.path:
                self._exact.setdefault(route.path, {})[route.method] = route
                continue
            pattern = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(route.path)))
            known = next((methods for p, methods in self._patterns if p == pattern), None)
            if known is None:
                self._patterns.append((pattern, known := {}))
            known[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route and its path parameters; raises RouteNotFound or MethodNotAllowed. HEAD goes where GET does."""
        methods, parameters = self._exact.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(path)
                if match:
                    methods, parameters = candidates, match.groupdict()
                    break
            else:
                raise RouteNotFound("Not Found")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise MethodNotAllowed(sorted(methods))
        return route, parameters

    def renderer(self, path: str) -> Callable[[ServingError], Response]:
        """How errors on this path are answered, whether or not a route has it."""
        methods = self._exact.get(path)
        return next(iter(methods.values())).render if methods else self._fallback(path)
