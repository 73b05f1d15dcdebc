"""Delegation: a dialect's own plane serves a request as a route of the front plane, without knowing whose route that is.

The plane has admitted the request already (Host, Origin, API key) for inference, so only the front's inference routes are
there. The front's handler takes its own permit, unless the request holds one, and renders its own responses and streams. An
error before the first byte is raised to the delegating route, which renders it as its dialect does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import RouteNotFound
from inference.workers.scope import within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.http.exchange import Exchange, Send

    Handle = Callable[[Exchange, bool], Awaitable[None]]


class Delegation:
    """The way to the front plane's routes; `open` is called once, when they exist."""

    def __init__(self) -> None:
        self._handle: Handle | None = None

    def open(self, handle: Handle) -> None:
        """`handle` runs the handler of the front plane's route that fits an exchange's method, path and body; its second
        argument says whether the request holds a permit.
        """
        self._handle = handle

    async def run(
        self,
        exchange: Exchange,
        path: str,
        body: dict[str, Any],
        public_id: str = "",
        through: Callable[[Send], Send] | None = None,
        permitted: bool = False,
    ) -> None:
        """Answer `exchange` as the front plane's `path` does, with this JSON body instead of the client's own.

        `public_id` limits the request to one deployment; "" leaves it as limited as it is. `through` wraps what sends the
        response; `permitted`: the caller holds a permit. Raises the ServingError of a refused request, and RouteNotFound
        without such a route.
        """
        if self._handle is None:
            raise RouteNotFound("Not Found")
        inner = exchange.inner(path, body, through)
        try:
            with within(public_id):
                await self._handle(inner, permitted)
        finally:
            exchange.status, exchange.failed = inner.status, inner.failed
