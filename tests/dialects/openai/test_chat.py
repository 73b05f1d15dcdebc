"""POST /v1/chat/completions: first it works, then each refusal."""

from __future__ import annotations

from functools import partial

import pytest

from tests.live import events

PATH = "/v1/chat/completions"
engine = partial(pytest.param, marks=pytest.mark.live)
"""A case that the engine refuses, whose compiler reads the grammar."""
ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@pytest.mark.live
def test_it_works(server):
    answer = server.post(PATH, ASK)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert body["choices"][0]["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] > 5  # the end token counts


@pytest.mark.live
def test_stream_equals_whole(server):
    stream = server.post(PATH, {**ASK, "stream": True, "stream_options": {"include_usage": True}})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = events(stream)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
    assert text == server.post(PATH, ASK).json()["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 5
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.live
def test_usage_on_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(server.post(PATH, {**ASK, "stream": True, "stream_options": options}))
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1]]
    assert counts[0] == 0
    assert counts == sorted(set(counts))  # a chunk may hold several tokens when the server lags behind the engine
    assert counts[-1] == chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.live
def test_several_sequences(server):
    body = {**ASK, "temperature": 1.5, "n": 3, "seed": 42, "max_tokens": 20}
    choices = server.post(PATH, body).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert choices == server.post(PATH, body).json()["choices"]
    streamed = ["", "", ""]
    for chunk in events(server.post(PATH, {**body, "stream": True}))[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == [c["message"]["content"] for c in choices]


@pytest.mark.live
def test_logprobs(server):
    body = server.post(PATH, {**ASK, "logprobs": True, "top_logprobs": 3}).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"] == "The"


@pytest.mark.live
def test_continue_final_message(server):
    messages = [*ASK["messages"], {"role": "assistant", "content": "The capital of"}]
    body = {"messages": messages, "temperature": 0, "continue_final_message": True, "add_generation_prompt": False}
    text = " France is Paris."
    assert server.post(PATH, body).json()["choices"][0]["message"]["content"] == text
    echoed = server.post(PATH, {**body, "echo": True}).json()
    assert echoed["choices"][0]["message"]["content"] == "The capital of" + text


@pytest.mark.live
def test_text_parts_and_nulls(server):
    parts = [{"role": "user", "name": None, "tool_calls": None, "content": [{"type": "text", "text": "Hello"}]}]
    body = {"messages": parts, "temperature": 0, "tools": None, "tool_choice": None, "n": None, "logit_bias": None,
            "stop": None, "seed": None, "metadata": {"a": "b"}, "unknown": 1, "model": "tgi"}  # fmt: skip
    assert server.post(PATH, body).json()["choices"][0]["message"]["content"] == "Hello! How can I help you today?"


@pytest.mark.live
def test_stop_strings(server):
    for stream in (False, True):
        for include in (False, True):
            body = {**ASK, "stop": ["is Par"], "include_stop_str_in_output": include, "stream": stream}
            answer = server.post(PATH, body)
            choices = [c["choices"][0] for c in events(answer)[:-1]] if stream else answer.json()["choices"]
            text = "".join(c["delta"]["content"] if stream else c["message"]["content"] for c in choices)
            assert text == "The capital of France " + ("is Par" if include else "")
            assert choices[-1]["finish_reason"] == "stop"
            assert choices[-1]["stop_reason"] == "is Par"


def test_tools_go_to_the_template_when_they_must_not_be_called(server):
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    longer = server.post(PATH, {**ASK, "tools": [tool], "tool_choice": "none"}).json()["usage"]["prompt_tokens"]
    assert longer > server.post(PATH, ASK).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": None}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": 2.1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_p": 1.1}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"min_p": 1.5}, 400, "min_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 100000}, 400, "n"),
        ({"n": 2}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"max_completion_tokens": -1}, 400, "max_completion_tokens"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"frequency_penalty": -2.5}, 400, "frequency_penalty"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"seed": 1 << 63}, 400, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, 400, "logit_bias"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"tools": []}, 400, "tools"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "auto"}, 400, "tool_choice"),
        ({"response_format": {"type": "structural_tag"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"guided_json": []}, 400, "guided_json"),
        engine({"guided_regex": "["}, 400, "guided_regex"),
        ({"guided_choice": []}, 400, "guided_choice"),
        engine({"guided_grammar": "start: nothing"}, 400, "guided_grammar"),
        ({"guided_regex": "a" * 70000}, 400, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, 400, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, 400, "structured_outputs"),
        engine({"structured_outputs": {"json": {"type": "nonsense"}}}, 400, "structured_outputs"),
        ({"chat_template": "{{ x }}"}, 400, "chat_template"),
        ({"modalities": ["audio"]}, 400, "modalities"),
        ({"add_generation_prompt": True, "continue_final_message": True}, 400, "add_generation_prompt"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"model": "nobody"}, 404, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(server, change, status, named, stream):
    answer = server.post(PATH, {**ASK, "stream": stream, **change})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == named
    assert error["code"] == status
    if named:
        assert named.split(".")[-1] in error["message"] or named == "model"


def test_stream_options_need_a_stream(server):
    answer = server.post(PATH, {**ASK, "stream_options": {"include_usage": True}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


def test_context_overflow_says_so(server):
    answer = server.post(PATH, {"messages": [{"role": "user", "content": "word " * 5000}]})
    assert answer.status_code == 400
    assert "maximum context length is 2048 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_malformed_bodies(server, body):
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "Bad Request"


def test_what_the_client_accepts_makes_no_difference(server):
    for headers in ({}, {"accept": "text/plain"}):
        assert server.post(PATH, ASK, headers=headers).status_code == 200


def test_wrong_method_and_unknown_path(server):
    answer = server.get(PATH)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert server.get("/v1/nothing").json()["error"]["code"] == 404
