"""Running requests by client-supplied id, so that a client can stop its own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inference.generation.generation import Generation


class RunningRequests:
    """Ids are looked up only within a tenant."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[Generation]] = {}

    def knows(self, tenant: str, name: str) -> bool:
        """Whether a request of this id runs; False once its last token is on its way to the client."""
        return bool(self._under(tenant, name))

    @contextmanager
    def entry(self, tenant: str, names: set[str], generation: Generation) -> Iterator[None]:
        """Register the generation under each of these ids until the end of the block."""
        for name in names:
            self._running.setdefault((tenant, name), []).append(generation)
        try:
            yield
        finally:
            for name in names:
                self._running[(tenant, name)].remove(generation)
                if not self._running[(tenant, name)]:
                    del self._running[(tenant, name)]

    def stop(self, tenant: str, name: str) -> bool:
        """Stop the request of this id; False if there is none."""
        generations = self._under(tenant, name)
        for generation in generations:
            generation.cancel()
        return bool(generations)

    def _under(self, tenant: str, name: str) -> list[Generation]:
        return [g for g in self._running.get((tenant, name), []) if not g.ended]
