"""Single fields of OpenAI's bodies: ids, counts, log-probabilities, model cards, and the key that an error names."""

from __future__ import annotations

import msgspec
import pytest

from engine.failures import Failure, FailureCode
from engine.messages import TokenLogprob
from inference.http.validation import lenient
from inference.services import Shown
from inference.vendors.openai_logprobs import Context, LogprobTexts
from management.snapshot import AdapterEntry
from tests.unit.scripts import EMBEDDING, Script, ids, says
from tests.waiting import eventually

CHAT, TEXT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
PROMPT = {"model": "demo", "prompt": "The capital", "temperature": 0}
INPUT = {"model": "demo", "input": "Hello", "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LONG = "word " * 5000


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_cached_tokens_are_counted_where_the_operator_shows_them(start, path, body):
    for shown, details in ((Shown(cached_tokens=True), {"cached_tokens": 16}), (Shown(), None)):
        serving = await start(shown=shown)
        serving.worker.scripts += [says("Rome.", cached_tokens=16)] * 2
        whole, stream = await serving.post(path, body), await serving.post(path, {**body, **USAGE})
        assert whole.json()["usage"]["prompt_tokens_details"] == details
        assert stream.events[-2]["usage"]["prompt_tokens_details"] == details
        await serving.stop()


@pytest.mark.parametrize(("path", "body", "prompts"), [
    (CHAT, {**HELLO, "temperature": 1, "n": 2}, [12, 12]),
    (TEXT, {**PROMPT, "prompt": ["The capital", "The capital of"]}, [2, 3]),
])  # fmt: skip
async def test_running_usage_is_that_of_the_chunks_choice(serving, path, body, prompts):
    """As in vLLM; the last chunk has the sum."""
    serving.worker.scripts += [says(" is Rome."), says(" Paris.")]
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await serving.post(path, {**body, "stream": True, "stream_options": options})
    *chunks, last, _ = answer.events
    found = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    counts = [len(ids(" is Rome.")) + 1, len(ids(" Paris.")) + 1]
    keys = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [[found[i][key] for key in keys] for i in (0, 1)] == [
        [prompt, count, prompt + count] for prompt, count in zip(prompts, counts, strict=True)
    ]
    assert last["usage"]["completion_tokens"] == sum(counts)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_prompts_text_or_its_ids(serving, stream):
    """As in vLLM: not both."""
    serving.worker.default = says("Rome.")
    answer = await serving.post(TEXT, {**PROMPT, "echo": True, "return_token_ids": True, "stream": stream})
    parts = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json()["choices"]
    assert "".join(part["text"] for part in parts) == "Rome."
    assert [token for part in parts for token in part["token_ids"]] == [*ids("Rome."), 2]
    assert parts[0]["prompt_token_ids"] == ids(PROMPT["prompt"])
    assert not any("prompt_token_ids" in part for part in parts[1:])


async def test_cached_tokens_of_several_prompts(start):
    serving = await start(shown=Shown(cached_tokens=True))
    serving.worker.scripts += [says("Rome.", cached_tokens=16), says("Rome.")]
    answer = await serving.post(TEXT, {**PROMPT, "prompt": ["The capital", "of"]})
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(("path", "body", "prefix"), [
    (CHAT, HELLO, "chatcmpl-"), (TEXT, PROMPT, "cmpl-"), (RESPONSES, INPUT, "resp_"),
])  # fmt: skip
async def test_a_body_may_name_its_request(serving, path, body, prefix):
    answer = await serving.post(path, {**body, "request_id": "mine"})
    own = "mine" if path == RESPONSES else f"{prefix}mine"
    assert (answer.json()["id"], answer.header("x-request-id")) == (own, "mine")
    answer = await serving.post(path, {**body, "request_id": "mine"}, x_request_id="header's")
    assert (answer.json()["id"], answer.header("x-request-id")) == (prefix + "header's", "header's")


async def test_a_body_may_name_its_request_for_vectors(start):
    serving = await start(info=EMBEDDING)
    answer = await serving.post(EMBEDDINGS, {"model": "demo", "input": "The", "request_id": "x" * 128})
    assert answer.json()["id"] == "embd-" + "x" * 128


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "é"])
async def test_names_of_requests_that_are_refused(serving, name):
    answer = await serving.post(CHAT, {**HELLO, "request_id": name})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize(("path", "body", "param"), [
    (CHAT, {**HELLO, "temperature": "hot"}, "temperature"),
    (CHAT, {**HELLO, "messages": [{"role": "user", "content": LONG}]}, "messages"),
    (CHAT, {**HELLO, "messages": [{"role": 1}]}, "messages[0].role"),
    (CHAT, {**HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {**HELLO, "stream_options": {"include_usage": "x"}, "stream": True}, "stream_options.include_usage"),
    (CHAT, {**HELLO, "model": "none"}, "model"),
    (TEXT, {**PROMPT, "prompt": LONG}, "prompt"),
    (TEXT, {**PROMPT, "prompt": [5000]}, "prompt"),
    (RESPONSES, {**INPUT, "input": LONG}, "input"),
    (RESPONSES, {**INPUT, "input": [{"role": 1, "content": "a"}]}, "input"),
    (RESPONSES, {**INPUT, "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {**INPUT, "text": {"format": {"type": "xml"}}}, "text"),
])  # fmt: skip
async def test_an_error_names_the_bad_key(serving, path, body, param):
    answer = await serving.post(path, body)
    error = answer.json()["error"]
    assert (answer.status in (400, 404), error["param"]) == (True, param)
    if path == RESPONSES:
        assert not {"messages", "max_completion_tokens", "response_format"} & set(error["message"].split())


@pytest.mark.parametrize(("path", "body", "param"), [(CHAT, HELLO, "messages"), (RESPONSES, INPUT, "input")])
async def test_a_template_that_fails_is_the_messages_error(serving, monkeypatch, path, body, param):
    monkeypatch.setattr(serving.router.resolve("demo").tokenizer, "template", None)
    error = (await serving.post(path, body)).json()["error"]
    assert (error["code"], error["param"]) == (None if path == RESPONSES else 400, param)


class Texts:
    """Token n is the text "tn", but 9 has the text of 8."""

    def token_text_after(self, context, token_id: int) -> str:
        return f"t{8 if token_id == 9 else token_id}"


def test_the_actual_token_is_first_among_the_most_likely():
    texts = LogprobTexts(Texts(), as_ids=False)
    unlikely = TokenLogprob(5, -4.0, 4, [(1, -0.5), (2, -1.0), (3, -2.0)])
    second = TokenLogprob(2, -1.0, 2, [(1, -0.5), (2, -1.0), (3, -2.0)])
    twins = TokenLogprob(9, -3.0, 4, [(8, -0.5), (1, -1.0)])

    def named(entries):
        return [(entry["token"], entry["logprob"]) for entry in entries]

    chat = texts.chat([unlikely, second], 2, Context(), actual_first=True)["content"]
    assert named(chat[0]["top_logprobs"]) == [("t5", -4.0), ("t1", -0.5)]
    assert named(chat[1]["top_logprobs"]) == [("t2", -1.0), ("t1", -0.5)]
    assert texts.chat([unlikely], 0, Context(), actual_first=True)["content"][0]["top_logprobs"] == []
    tops = texts.completion([(5, unlikely), (2, second), (9, twins)], 0, Context())["top_logprobs"]
    assert [list(top.items()) for top in tops] == [
        [("t5", -4.0), ("t1", -0.5), ("t2", -1.0), ("t3", -2.0)],
        [("t2", -1.0), ("t1", -0.5), ("t3", -2.0)],
        [("t8", -3.0), ("t1", -1.0)],
    ]
    row = msgspec.json.decode(texts.prompt([1, 5], [unlikely]))[1]
    assert [(key, entry["rank"]) for key, entry in row.items()] == [("5", 4), ("1", 1), ("2", 2), ("3", 3)]


async def test_the_card_of_an_adapter_shows_its_directory_only_if_the_operator_does(start):
    entry = AdapterEntry("formal", "d", "/store/d", 1, source="/adapters/formal")
    for shown, root in ((Shown(adapter_paths=True), "/adapters/formal"), (Shown(), "formal")):
        serving = await start(shown=shown)
        serving.adapters = (entry, AdapterEntry("bare", "e", "/store/e", 1))
        serving.publish()
        await eventually(lambda serving=serving: serving.router.targets[0].entry.adapters)
        cards = {card["id"]: card for card in (await serving.get("/v1/models")).json()["data"]}
        assert (cards["formal"]["root"], cards["formal"]["parent"]) == (root, "demo")
        assert (cards["demo"]["root"], cards["bare"]["root"]) == ("demo", "bare")
        assert (await serving.get("/v1/models/formal")).json() == cards["formal"]
        await serving.stop()


async def test_refusals_for_too_many_requests_are_counted_as_vllm_does(start):
    serving = await start(max_concurrent_requests=1)

    async def counted(model: str) -> float:
        page = (await serving.get("/metrics")).text
        name = f'vllm:admission_rejections_total{{model_name="{model}",reason="max_num_queued_reqs"}}'
        return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), -1)

    assert await counted("") == 0
    with serving.services.admission.permit():
        assert (await serving.post(CHAT, HELLO)).status == 503
        assert serving.planes["front"].overloaded("POST", CHAT, {b"host": b"x"}).status == 503
    assert (await counted(""), await counted("demo")) == (2, -1)
    serving.worker.default = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
    assert (await serving.post(TEXT, PROMPT)).status == 503
    serving.services.admission.draining = True
    assert (await serving.post(TEXT, PROMPT)).status == 503
    assert (await counted(""), await counted("demo")) == (2, 1)


async def test_refused_embeddings_are_counted_too(start):
    serving = await start(info=EMBEDDING)
    serving.worker.embed_failure = Failure(FailureCode.OVERLOADED)
    assert (await serving.post("/v1/embeddings", {"model": "demo", "input": "a"})).status == 503
    assert (
        'vllm:admission_rejections_total{model_name="demo",reason="max_num_queued_reqs"} 1.0'
        in (await serving.get("/metrics")).text
    )


async def test_allowed_tokens_are_put_in_order_once_for_all_prompts(serving, monkeypatch):
    """There may be as many as the vocabulary has."""
    ordered = []

    class Ids(list):
        def __iter__(self):
            ordered.append(len(self))
            return super().__iter__()

    def parsed(value, schema):
        body = lenient(value, schema)
        body.allowed_token_ids = Ids(body.allowed_token_ids)
        return body

    monkeypatch.setattr("inference.dialects.openai.completions.lenient", parsed)
    answer = await serving.post(TEXT, {**PROMPT, "prompt": ["a", "b", "c"], "allowed_token_ids": [9, 5, 9, 7]})
    assert answer.status == 200, answer.text
    assert [submit.params.allowed_token_ids for submit in serving.worker.submits] == [[5, 7, 9]] * 3
    assert ordered == [4]


@pytest.mark.parametrize("ids", [[-1, 5], [5, 1736]])
async def test_allowed_tokens_are_in_the_vocabulary(serving, ids):
    answer = await serving.post(TEXT, {**PROMPT, "allowed_token_ids": ids})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize(
    ("allowed", "bad", "fields", "status"),
    [
        (["Spain"], ["Spain"], {}, 400),
        (["Spain"], ["Spain Spain"], {}, 400),
        (["Spain", "Italy"], ["Spain"], {}, 200),
        (["Spain", "Italy"], ["Spain", "Spain Italy"], {}, 200),
        (["Spain", "Italy"], ["Spain", "Italy Italy"], {}, 400),
        (["Spain", "Italy"], ["Spain Spain", "Italy Italy"], {}, 200),
        (["Spain", "Italy"], ["Spain Italy Spain", "Spain Italy Italy"], {}, 400),
        (["Spain", "Italy"], ["Spain Spain", "Italy Spain Italy"], {}, 400),
        (["Spain", "Italy"], ["Spain", "France Italy"], {}, 200),
        (["Spain", "eos"], ["Spain"], {"min_tokens": 1}, 400),
        (["Spain", "eos"], ["Spain"], {}, 200),
        (["Spain"], [], {"min_tokens": 1, "stop_token_ids": ["Spain"]}, 400),
        (["Spain"], [], {"stop_token_ids": ["Spain"]}, 200),
    ],
)
async def test_some_of_the_allowed_tokens_stay_allowed(serving, allowed, bad, fields, status):
    """What is banned at one place depends on the tokens before it."""
    token = {"eos": 2, **{name: ids(f" {name}")[0] for name in ("Spain", "Italy", "France")}}
    fields = fields | {name: [token[text] for text in fields[name]] for name in fields if name == "stop_token_ids"}
    body = {
        **PROMPT,
        "allowed_token_ids": [token[text] for text in allowed],
        "bad_words": bad,
        "max_tokens": 4,
        **fields,
    }
    answer = await serving.post(TEXT, body)
    assert answer.status == status, answer.text
    assert status == 200 or answer.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 4.5), ("max_tokens", "four"), ("max_tokens", True), ("temperature", "nan"), ("temperature", ""),
     ("stream", "maybe"), ("n", 1.5), ("user", 5)],
)  # fmt: skip
async def test_values_of_another_type_are_refused(serving, name, value):
    answer = await serving.post(TEXT, {**PROMPT, name: value})
    assert (answer.status, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(("name", "value", "meant"), [
    ("max_tokens", 4.0, 4), ("max_tokens", "4", 4), ("temperature", "0.5", 0.5), ("seed", "7", 7), ("top_k", 5.0, 5),
    ("logit_bias", {"5": "2"}, {5: 2.0}),
])  # fmt: skip
@pytest.mark.parametrize(("path", "body"), [(TEXT, PROMPT), (CHAT, HELLO)])
async def test_texts_stand_for_the_numbers_that_they_write(serving, path, body, name, value, meant):
    """As pydantic takes them in vLLM."""
    answer = await serving.post(path, {**body, name: value})
    assert answer.status == 200, answer.text
    assert getattr(serving.worker.submits[0].params, name) == meant


async def test_texts_stand_for_booleans(serving):
    assert (await serving.post(CHAT, {**HELLO, "stream": "true"})).chunks[-1] == b"data: [DONE]\n\n"
    assert (await serving.post(CHAT, {**HELLO, "stream": "false"})).json()["object"] == "chat.completion"


async def test_fields_that_need_others(serving):
    """As in vLLM: an empty object asks for nothing."""
    for path, body, logprobs in ((CHAT, HELLO, True), (TEXT, PROMPT, 0)):
        assert (await serving.post(path, {**body, "stream_options": {}})).status == 200
        refused = await serving.post(path, {**body, "stream_options": {"include_usage": True}})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "stream_options")
        refused = await serving.post(path, {**body, "logprob_token_ids": [5]})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "logprob_token_ids")
        assert (await serving.post(path, {**body, "logprobs": logprobs, "logprob_token_ids": [5]})).status == 200


LETTERS = "Hé 🙂 中 ok"
WRITTEN = LETTERS + "<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_are_parts_of_a_character_have_it_at_their_last(serving, stream):
    """As in vLLM, so that the texts, and their bytes, are together those of the answer."""
    serving.worker.default = says(LETTERS)
    answer = await serving.post(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2, "stream": stream})
    events = answer.events[:-1] if stream else [answer.json()]
    entries = [e for event in events for c in event["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
    assert len(entries) > len(LETTERS)
    assert "".join(entry["token"] for entry in entries) == WRITTEN
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == WRITTEN
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_the_answers_characters(serving, stream):
    serving.worker.default = says(LETTERS)
    answer = await serving.post(TEXT, {"model": "demo", "prompt": "中", "echo": True, "logprobs": 1, "stream": stream})
    events = answer.events[:-1] if stream else [answer.json()]
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert "".join(tokens) == "中" + WRITTEN
    assert [o for part in parts for o in part["text_offset"]] == [len("".join(tokens[:i])) for i in range(len(tokens))]


async def test_sagemakers_header_names_the_adapter(serving):
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "no-such"}
    for body in ({"prompt": "a"}, {"messages": HELLO["messages"]}, {"input": "a"}):
        answer = await serving.post("/invocations", {**body, "model": "demo", "max_tokens": 1}, **header)
        assert (answer.status, "no-such" in answer.text) == (404, True)
