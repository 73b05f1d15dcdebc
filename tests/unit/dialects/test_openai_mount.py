"""OpenAI's routes below /openai, where clients of KServe look for them."""

from __future__ import annotations

import pytest

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/chat/completions", "/v1/chat/completions/"])
async def test_the_same_answer(serving, path):
    answer = await serving.post(path, CHAT)
    assert answer.status == 200
    assert answer.json()["object"] == "chat.completion"


async def test_every_route_below_v1(serving):
    assert (await serving.get("/openai/v1/models")).json() == (await serving.get("/v1/models")).json()
    assert (await serving.get("/openai/v1/models/demo")).json()["id"] == "demo"


@pytest.mark.parametrize(("path", "status"), [
    ("/v1/models/", 200), ("/openai/v1/models/", 200), ("/v1/models/demo/", 200), ("/v1/models//", 404),
    ("/v1/completions" + "/" * 5000, 404), ("/" * 5000, 404),
])  # fmt: skip
async def test_one_slash_more_is_taken_and_no_more(serving, path, status):
    assert (await serving.get(path)).status == status


async def test_a_slash_behind_a_path_of_several_dialects(serving):
    """TGI takes none; its clients do not send one."""
    answer = await serving.post("/tokenize/", {"model": "demo", "prompt": "a"})
    assert (answer.status, answer.json()["count"]) == (200, 1)


async def test_a_route_that_is_not_served_is_named(serving):
    answer = await serving.post("/v1/audio/speech", {"model": "demo"})
    error = answer.json()["error"]
    assert (answer.status, error["message"]) == (404, "Not Found: this server does not serve POST /v1/audio/speech")


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/openai/v1/chat/completions", 405), ("GET", "/openai/v1/nothing", 404), ("POST", "/openai/generate", 404),
    ("GET", "/openai/health", 404), ("GET", "/openaiv1/models", 404), ("GET", "/openai/openai/v1/models", 404),
])  # fmt: skip
async def test_nothing_else(serving, method, path, status):
    answer = await serving.begin(path, method=method).end()
    assert answer.status == status
    if "/openai/v1" in path and path.count("openai") == 1:
        assert answer.json()["error"]["code"] == status


async def test_keys_are_asked_for_below_it_too(start):
    serving = await start(api_key_required=True)
    assert (await serving.post("/openai/v1/chat/completions", CHAT)).status == 401
