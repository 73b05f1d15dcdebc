"""Requests that a MindIE instance gives back, and that are sent again."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.mindie_answers import joined
from tests.unit.dialects.test_mindie_disaggregation import BODIES, CHAT, whole
from tests.unit.scripts import Script, ids, says


@pytest.mark.parametrize("where", ["there", "here"])
@pytest.mark.parametrize("name", [name for name in BODIES if not name.startswith("completions")])
async def test_a_lost_worker_gives_the_request_back(pair, start, name, where):
    """The body that the coordinator sends again leads to the same answer, also at an instance that is its own target."""
    path, body = BODIES[name]
    script = says(" Madrid is far away")
    alone = await start()
    pair.prefill.serving.worker.default = alone.worker.default = script
    expected = await alone.post(path, body, plane="mindie", req_id="1")
    pair.decode.serving.worker.default = Script(tokens=script.tokens, die_after=3)
    results_id = "t" if name in ("triton", "triton-stream", "triton-details") else "1"
    reader = pair.read()
    got = (await pair.ask(path, body)).json().get("output", "").encode()
    results = await reader.until_last(results_id)
    assert [keyword for keyword, _ in results][-1] == "retry"
    got += b"".join(payload for keyword, payload in results if keyword == "data")
    again = json.loads(results[-1][1])
    await pair.decode.serving.worker.start()
    await pair.decode.serving.connected(1)
    pair.decode.serving.worker.default = script
    reader.found.clear()
    if where == "here":
        own = await pair.ask(path, again, is_recompute="true", d_target=f"127.0.0.1;{pair.prefill.port}")
        got, member = got + own.body, pair.prefill
    else:
        told = (await pair.ask(path, again, is_recompute="true")).json()
        got += told.get("output", "").encode()
        got += b"".join(payload for _, payload in await reader.until_last(results_id))
        member = pair.decode
    assert joined(got) == joined(expected.body)
    generated = member.serving.worker.submits[-1].generated
    assert generated == script.tokens[: len(generated)]
    assert len(generated) == (4 if where == "there" else 3)


async def test_a_request_comes_again_before_its_blocks_are_released(pair, monkeypatch):
    """An instance that does not answer keeps nobody from sending the request again."""
    asked, go = asyncio.Event(), asyncio.Event()

    async def release(*_):
        asked.set()
        await go.wait()

    monkeypatch.setattr(pair.decode.instance.peers, "release", release)
    assert await whole(pair, *BODIES["native"])
    await asked.wait()
    assert pair.decode.serving.services.admission.in_flight == 0
    assert await whole(pair, *BODIES["native"])
    go.set()


async def test_tokens_that_the_model_does_not_have(pair):
    """As stop tokens they never come; as the beginning of an answer they are refused."""
    body = {**CHAT, "stop_token_ids": [-1, 5, 1 << 40, 1 << 70], "max_tokens": 4}
    assert await whole(pair, "/v1/chat/completions", body)
    for token in ("-7", str(1 << 40)):
        answer = await pair.ask("/infer", {"inputs": f"1,5,{token}"}, "2", is_recompute="true")
        assert (answer.status, answer.json()["error"]) == (424, "Failed to enqueue inferRequest. Invalid Input Ids")


async def test_completions_are_not_given_back(pair):
    pair.prefill.serving.worker.default = says(" Madrid is far")
    pair.decode.serving.worker.default = Script(tokens=ids(" Madrid is far"), die_after=2)
    reader = pair.read()
    await pair.ask(*BODIES["completions"])
    assert (await reader.until_last("1"))[-1] == ("error", b"Try to do recompute but it is not supported.")
