"""Which of several workers a request goes to: the least busy, the one that has its beginning, its session's."""

from __future__ import annotations

import pytest

from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually

PATH = "/v1/completions"
ASK = {"model": "demo", "prompt": "The capital", "temperature": 0}
STREAM = {**ASK, "stream": True}
SPAIN = says(" of Spain")


async def hold(serving, body, streams, path=PATH, **headers):
    """So many equal requests that stay; returns how many each worker has."""
    gate = Gate()
    for worker in serving.workers:
        worker.default = Script(tokens=ids("a b"), gate_after=1, gate=gate)
    for _ in range(streams):
        serving.begin(path, body, **headers)
    await eventually(lambda: sum(len(w.submits) for w in serving.workers) == streams)
    return [len(w.submits) for w in serving.workers]


LONG = "The capital of Spain is Madrid. " * 20


@pytest.mark.parametrize("body", [STREAM, {**STREAM, "prompt": LONG}, {**STREAM, "prompt": LONG, "user": "ann"}])
async def test_a_burst_is_spread_evenly(start, body):
    serving = await start(3)
    counts = await hold(serving, body, 24)
    assert all(7 <= count <= 9 for count in counts), counts


async def test_a_prompt_goes_where_its_beginning_is_cached(start):
    serving = await start(3)
    for number, worker in enumerate(serving.workers):
        serving.workers[(number + 1) % 3].default = worker.default = SPAIN
    first = {**ASK, "prompt": LONG}
    assert (await serving.post(PATH, first)).status == 200
    home = next(w for w in serving.workers if w.submits)
    for number in range(4):
        await serving.post(PATH, {**ASK, "prompt": f"{number} is another question" * 30})
        await serving.post(PATH, {**first, "prompt": f"{LONG} And of Italy? {number}"})
    assert (
        sum(LONG[:40] in serving.router.targets[0].tokenizer.fast.decode(s.prompt_token_ids) for s in home.submits) == 5
    )


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"user": "ann"}, {}),
        ({"prompt_cache_key": "ann", "user": "bob"}, {}),
        ({"user": "bob"}, {"x_session_id": "ann"}),
    ],
)
async def test_a_session_prefers_one_worker(start, fields, headers):
    serving = await start(3)
    chosen = set()
    for name in ({"user": "ann"}, {}), (fields, headers):
        for _ in range(3):
            await serving.post(PATH, {**ASK, **name[0]}, **name[1])
            chosen.add(tuple(bool(w.submits) for w in serving.workers))
    assert len(chosen) == 1
