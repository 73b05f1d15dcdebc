"""Merges several asynchronous iterators into one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

T = TypeVar("T")


async def merge(sources: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Merge iterators into (source index, item) pairs, in order of arrival.

    The first error ends the merge; closing it closes every source. Bounded: one queued item per source, and one that
    each source waits to queue.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(len(sources))
    end = object()

    async def forward(number: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((number, item, None))
        except Exception as error:  # raised in the consumer, as an error of its own source would be
            await queue.put((number, end, error))
        else:
            await queue.put((number, end, None))

    tasks = [asyncio.create_task(forward(number, source)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is end:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
