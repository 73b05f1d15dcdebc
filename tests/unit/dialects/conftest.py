"""Instances of MindIE with roles, for the tests of dialects."""

from __future__ import annotations

import pytest_asyncio

from tests.unit.mindie_instances import Member, Pair


@pytest_asyncio.fixture
async def members(sockets):
    """Makes instances; each has its own worker."""
    made = []

    async def make(**settings) -> Member:
        made.append(await Member(sockets / str(len(made)), **settings).start())
        return made[-1]

    yield make
    for member in made:
        await member.stop()


@pytest_asyncio.fixture
async def pair(members):
    pair = Pair(await members(), await members())
    await pair.link()
    return pair
