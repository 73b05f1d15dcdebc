"""Several conversations in one body, and what the engine would be asked."""

from __future__ import annotations

import pytest

from inference.services import Shown
from tests.unit.scripts import Script, ids, says

CHAT, BATCH = "/v1/chat/completions", "/v1/chat/completions/batch"
RENDER_CHAT, RENDER_TEXT = "/v1/chat/completions/render", "/v1/completions/render"
HELLO, BYE = [{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Goodbye now"}]
ASK = {"model": "demo", "messages": [HELLO, BYE], "temperature": 0}
LONG = [{"role": "user", "content": "word " * 5000}]
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_every_conversation_gets_a_choice(start):
    serving = await start(shown=Shown(cached_tokens=True))
    serving.worker.scripts += [says("Rome.", cached_tokens=16), says("The capital of Spain")]
    answer = (await serving.post(BATCH, {**ASK, "request_id": "mine", "logprobs": True})).json()
    alone = []
    for messages, text in ((HELLO, "Rome."), (BYE, "The capital of Spain")):
        serving.worker.scripts.append(says(text))
        alone.append((await serving.post(CHAT, {**ASK, "messages": messages, "logprobs": True})).json())
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-mine", "chat.completion", "demo")
    assert answer["choices"] == [{**one["choices"][0], "index": i} for i, one in enumerate(alone)]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Rome.", "The capital of Spain"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert (answer["prompt_token_ids"], answer["prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize(("change", "param"), [
    ({"stream": True}, "stream"), ({"tools": [TOOL]}, "tools"), ({"use_beam_search": True}, "use_beam_search"),
    ({"n": 2}, "n"), ({"messages": []}, "messages"), ({"messages": None}, "messages"),
    ({"messages": HELLO}, "messages[0]"), ({"messages": [HELLO, []]}, "messages[1]"),
    ({"messages": [HELLO, [{"role": 1}]]}, "messages[1][0].role"), ({"messages": [HELLO, LONG]}, "messages[1]"),
    ({"messages": [HELLO] * 65}, "messages"), ({"tools": []}, "tools"), ({"temperature": 3}, "temperature"),
])  # fmt: skip
async def test_batches_that_are_refused(serving, change, param):
    answer = await serving.post(BATCH, {**ASK, **change})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert not serving.worker.submits


@pytest.mark.parametrize("change", [{"stream": False}, {"n": 1}, {"messages": [HELLO] * 64}])
async def test_batches_at_the_bounds(serving, change):
    body = {**ASK, **change}
    answer = await serving.post(BATCH, body)
    assert (answer.status, len(answer.json()["choices"])) == (200, len(body["messages"]))


async def test_a_failure_of_one_conversation_is_the_batchs(serving):
    serving.worker.scripts += [says("Rome."), Script(tokens=ids("The capital"), fail_after=1)]
    assert (await serving.post(BATCH, ASK)).status == 500


async def test_a_rendered_chat_is_what_the_engine_gets(serving):
    body = {"model": "demo", "messages": HELLO, "temperature": 0.5, "top_k": 3, "stop": "x", "seed": 7, "n": 2,
            "cache_salt": "s", "max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    shown = (await serving.post(RENDER_CHAT, body)).json()
    assert not serving.worker.submits
    await serving.post(CHAT, {**body, "stream": False, "stream_options": None})
    submit = serving.worker.submits[0]
    assert shown["token_ids"] == list(submit.prompt_token_ids)
    params = shown["sampling_params"]
    given = ("temperature", "top_k", "max_tokens", "seed", "n", "stop")
    assert [params[name] for name in given] == [0.5, 3, 9, 7, 2, ["x"]]
    assert (params["temperature"], params["max_tokens"]) == (submit.params.temperature, submit.params.max_tokens)
    assert shown["request_id"].startswith("chatcmpl-")
    assert [shown[name] for name in ("model", "stream", "cache_salt", "priority")] == ["demo", True, "s", 0]
    assert shown["stream_options"]["include_usage"] is True
    assert (shown["features"], shown["kv_transfer_params"]) == (None, None)


async def test_rendered_prompts(serving):
    shown = (await serving.post(RENDER_TEXT, {"model": "demo", "prompt": ["The capital", "of"]})).json()
    assert [one["token_ids"][-len(part) :] for one, part in zip(shown, (ids(" capital"), ids("of")), strict=True)] == [
        ids(" capital"), ids("of")]  # fmt: skip
    assert all(one["request_id"].startswith("cmpl-") and one["sampling_params"]["max_tokens"] == 16 for one in shown)
    assert shown[0]["request_id"] != shown[1]["request_id"]
    assert (await serving.post(RENDER_TEXT, {"model": "demo", "prompt": [5, 6]})).json()[0]["token_ids"] == [5, 6]


@pytest.mark.parametrize(("path", "body", "status", "param"), [
    (RENDER_CHAT, {"messages": HELLO, "use_beam_search": True}, 400, "use_beam_search"),
    (RENDER_TEXT, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
    (RENDER_CHAT, {"messages": HELLO, "model": "none"}, 404, "model"),
    (RENDER_TEXT, {"prompt": ""}, 400, "prompt"), (RENDER_TEXT, {"prompt": [5000]}, 400, "prompt"),
    (RENDER_CHAT, {"messages": LONG}, 400, "messages"),
])  # fmt: skip
async def test_what_cannot_be_rendered(serving, path, body, status, param):
    answer = await serving.post(path, body)
    assert (answer.status, answer.json()["error"]["param"]) == (status, param)
