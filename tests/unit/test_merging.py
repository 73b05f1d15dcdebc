"""Several sources as one: what a reader does not take is not made."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from inference.generation.merging import merge

SOURCES = 8


def test_sources_wait_for_the_reader():
    made = [0] * SOURCES

    async def source(number):
        for item in range(1000):
            made[number] += 1
            yield item

    async def read():
        async with aclosing(merge([source(number) for number in range(SOURCES)])) as merged:
            await anext(merged)
            for _ in range(100):  # as long as anything can go on, it does
                await asyncio.sleep(0)
            most = sum(made)
            rest = [item async for item in merged]
        return most, rest

    most, rest = asyncio.run(read())
    assert most <= 2 * SOURCES + 1  # one read, one for each in the queue, one for each that waits
    assert len(rest) == SOURCES * 1000 - 1
    for number in range(SOURCES):
        items = [item for n, item in rest if n == number]
        assert items == sorted(items)


def test_leaving_early_ends_sources_that_wait():
    closed = []

    async def source(number):
        try:
            for item in range(1000):
                yield item
        finally:
            closed.append(number)

    async def read():
        async with aclosing(merge([source(number) for number in range(SOURCES)])) as merged:
            await anext(merged)

    asyncio.run(read())
    assert sorted(closed) == list(range(SOURCES))
