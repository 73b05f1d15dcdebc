"""POST /v1/completions and GET /v1/models: first they work, then each refusal."""

from __future__ import annotations

import pytest

from tests.live import events

PATH = "/v1/completions"
ASK = {"prompt": "Question: What is the capital of Italy?\nAnswer:", "temperature": 0, "max_tokens": 12}


@pytest.mark.live
def test_it_works(server):
    body = server.post(PATH, ASK).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"].startswith(" The capital of Italy is Rome.")
    assert set(body["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids",
                                       "prompt_logprobs", "prompt_token_ids"}  # fmt: skip


@pytest.mark.live
def test_defaults(server):
    body = server.post(PATH, {"prompt": "Once upon a time", "ignore_eos": True}).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.live
def test_stream_equals_whole(server):
    body = {**ASK, "max_tokens": 30, "ignore_eos": True}
    *chunks, done = events(server.post(PATH, {**body, "stream": True}))
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["text"] for c in chunks) == server.post(PATH, body).json()["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.live
def test_token_prompts_equal_text_prompts(server):
    whole = server.post(PATH, {**ASK, "return_token_ids": True}).json()["choices"][0]
    again = server.post(PATH, {**ASK, "prompt": whole["prompt_token_ids"]}).json()["choices"][0]
    assert again["text"] == whole["text"]
    assert len(whole["token_ids"]) == 12


@pytest.mark.live
def test_many_prompts_and_sequences(server):
    body = {"prompt": ["Hello", "What is 2 + 3?"], "n": 2, "temperature": 0.8, "seed": 1, "max_tokens": 8}
    choices = server.post(PATH, body).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    alone = server.post(PATH, {**body, "prompt": "What is 2 + 3?"}).json()["choices"]
    assert [c["text"] for c in alone] == [c["text"] for c in choices[2:]]
    streamed = dict.fromkeys(range(4), "")
    for chunk in events(server.post(PATH, {**body, "stream": True}))[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [c["text"] for c in choices]


@pytest.mark.live
def test_logprobs_and_echo(server):
    body = server.post(PATH, {**ASK, "logprobs": 2, "echo": True, "max_tokens": 3}).json()
    choice, usage = body["choices"][0], body["usage"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(ASK["prompt"])
    assert {len(v) for v in logprobs.values()} == {usage["prompt_tokens"] + 3}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value is None or top[token] == value
    first, *others = choice["prompt_logprobs"]  # vLLM's answer has them twice
    assert first is None
    assert [next(entry["decoded_token"] for entry in row.values()) for row in others] == logprobs["tokens"][1:-3]


@pytest.mark.live
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_echo_waits_for_the_whole_prompt(server, n):
    body = {
        "prompt": "word " * 300,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 3,
        "n": n,
        "seed": 1,
        "ignore_eos": True,
    }
    whole = server.post(PATH, body).json()
    merged = [{"text": "", "tokens": [], "text_offset": []} for _ in range(n)]
    for chunk in events(server.post(PATH, {**body, "stream": True}))[:-1]:
        (choice,) = chunk["choices"]
        merged[choice["index"]]["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            merged[choice["index"]][name] += choice["logprobs"][name]
    for choice, streamed in zip(whole["choices"], merged, strict=True):
        assert streamed["text"] == choice["text"]
        assert streamed["tokens"] == choice["logprobs"]["tokens"]
        assert streamed["text_offset"] == choice["logprobs"]["text_offset"]


@pytest.mark.live
def test_echo_alone_scores_the_prompt(server):
    body = server.post(PATH, {**ASK, "logprobs": 1, "echo": True, "max_tokens": 0}).json()
    assert body["choices"][0]["text"] == ASK["prompt"]
    assert body["usage"]["completion_tokens"] == 0
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]


@pytest.mark.live
def test_prompt_logprobs_are_the_same_chunked_and_cached(server):
    prompt = "word " * 700
    rows = [server.post(PATH, {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}).json()
            for _ in range(2)]  # fmt: skip
    first, second = (r["choices"][0]["prompt_logprobs"] for r in rows)
    assert first[0] is None
    assert len(first) == rows[0]["usage"]["prompt_tokens"]
    for a, b in zip(first[1:], second[1:], strict=True):
        assert a.keys() == b.keys()
        assert next(iter(a.values()))["logprob"] == pytest.approx(next(iter(b.values()))["logprob"], abs=1e-4)


@pytest.mark.live
def test_stop_token_ids_and_min_tokens(server):
    ids = server.post(PATH, {**ASK, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    stopped = server.post(PATH, {**ASK, "stop_token_ids": [ids[2]]}).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == ids[2]
    later = server.post(PATH, {**ASK, "stop_token_ids": [ids[2]], "min_tokens": 6}).json()
    assert later["usage"]["completion_tokens"] >= 6


def test_truncation(server):
    for side, kept in (("left", "c d"), ("right", "a b")):
        body = {"prompt": "a b c d", "max_tokens": 1, "truncate_prompt_tokens": 2, "truncation_side": side,
                "return_token_ids": True}  # fmt: skip
        answer = server.post(PATH, body).json()
        ids = answer["choices"][0]["prompt_token_ids"]
        assert len(ids) == answer["usage"]["prompt_tokens"] == 2
        whole = server.post(PATH, {**body, "truncate_prompt_tokens": None}).json()["choices"][0]["prompt_token_ids"]
        assert ids == (whole[-2:] if side == "left" else whole[:2]), kept


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1] * 3000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2, "temperature": 1}, "best_of"),
        ({"best_of": 3, "temperature": 1, "stream": True}, "best_of"),
        ({"best_of": 200, "temperature": 1}, "best_of"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens"),
        ({"bad_words": ["x" * 300]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "up"}, "truncation_side"),
    ],
)
def test_refusals_name_the_field(server, change, named):
    answer = server.post(PATH, {**ASK, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == named


@pytest.mark.live
def test_long_max_tokens_are_cut_to_the_context(server):
    body = server.post(PATH, {**ASK, "max_tokens": 1_000_000, "ignore_eos": True}).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 2048


@pytest.mark.live
def test_models(server):
    models = server.get("/v1/models").json()
    card, *adapters = models["data"]
    assert models["object"] == "list"
    assert card["id"] == "demo"
    assert [(adapter["id"], adapter["parent"]) for adapter in adapters] == [("json", "demo"), ("pirate", "demo")]
    assert card["max_model_len"] == 2048
    assert server.get("/v1/models/demo").json() == card
    assert server.get("/v1/models/org%2Fnobody").status_code == 404


@pytest.mark.live
def test_the_best_of_several(server):
    """n of best_of: the likeliest per token among what the same seeds give one by one."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 7,
        "logprobs": 0,
        "ignore_eos": True,
    }
    made = server.post("/v1/completions", {**body, "n": 5}).json()
    shown = server.post("/v1/completions", {**body, "n": 2, "best_of": 5}).json()
    mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / 12  # noqa: E731
    expected = sorted(made["choices"], key=mean, reverse=True)[:2]
    assert [c["text"] for c in shown["choices"]] == [c["text"] for c in expected]
    assert [c["index"] for c in shown["choices"]] == [0, 1]
    assert shown["usage"] == made["usage"]
    plain = {**body, "best_of": 3}
    del plain["logprobs"]
    assert server.post("/v1/completions", plain).json()["choices"][0]["logprobs"] is None
