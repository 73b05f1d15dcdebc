"""What of an embedding request reaches the worker, and what of its answer is counted, over OpenAI's and TGI's routes."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.unit.scripts import EMBEDDING, ids

PATH = "/v1/embeddings"
TEXT = "The capital of Spain is Madrid."
LONG = " word" * 20_000


@pytest.fixture
async def embedder(start):
    return await start(info=EMBEDDING)


async def test_tokens_of_all_inputs_are_counted(embedder):
    with capture_logs() as lines:
        answer = await embedder.post(PATH, {"model": "demo", "input": [TEXT, "Hello"]})
    tokens = len(ids(TEXT)) + len(ids("Hello"))
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (tokens, tokens)
    assert [row["index"] for row in answer.json()["data"]] == [0, 1]
    assert embedder.worker.embeds[0].inputs == [ids(TEXT), ids("Hello")]
    assert [line for line in lines if line.get("prompt_tokens") == tokens]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", [TEXT, LONG], ids=["short", "long"])
async def test_a_truncated_text_is_the_asked_end_of_it(embedder, text, side):
    body = {"model": "demo", "input": text, "truncate_prompt_tokens": 5, "truncation_side": side}
    answer = await embedder.post(PATH, body)
    assert answer.status == 200, answer.text
    known = ids(text[:2000] if side == "right" else text[-2000:])
    (sent,) = embedder.worker.embeds[0].inputs
    assert sent == (known[:5] if side == "right" else known[-5:])


async def test_ids_are_truncated_too_and_an_end_token_stays_the_last(embedder):
    for given, sent in (([5, 6, 7, 8, 9], [5, 6, 7]), ([5, 6, 7, 8, 2], [5, 6, 2])):
        body = {"model": "demo", "input": given, "truncate_prompt_tokens": 3, "truncation_side": "right"}
        assert (await embedder.post(PATH, body)).status == 200
        assert embedder.worker.embeds[-1].inputs == [sent]
    body = {"model": "demo", "input": [5, 6, 2], "truncate_prompt_tokens": 1, "truncation_side": "right"}
    assert (await embedder.post(PATH, body)).status == 200
    assert embedder.worker.embeds[-1].inputs == [[5]]


@pytest.mark.parametrize(("given", "part"), [
    (LONG, "input[0] has at least"), ([TEXT, LONG], "input[1] has at least"), ([[]], "no entry may be empty"),
    ([[5, 99999]], "out of vocabulary"),
])  # fmt: skip
async def test_a_refused_input_is_named(embedder, given, part):
    answer = await embedder.post(PATH, {"model": "demo", "input": given})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "input"), error
    assert part in error["message"]
    assert not embedder.worker.embeds


async def test_the_engine_is_told_the_time_that_is_left(embedder):
    assert (await embedder.post("/v1/embeddings", {"model": "demo", "input": "a"})).status == 200
    (asked,) = embedder.worker.embeds
    assert 500 < asked.timeout_s <= 600
