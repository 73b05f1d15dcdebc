"""Inference: which model and adapter answer, LMI's schema, and OpenAI's bodies."""

from __future__ import annotations

import json

import pytest

from inference.dialects.djl import inference
from inference.dialects.djl.lmi_reply import STREAMS
from inference.errors import Unavailable
from management.snapshot import AdapterEntry
from tests.unit.dialects.djl.models import Djl
from tests.unit.scripts import EMBEDDING, Gate, Script, ids, says
from tests.waiting import eventually

ROUTES = (
    "/invocations",
    "/predictions/demo",
    "/predictions/demo/1.0",
    "/models/demo/invoke",
    "/invocations?model_name=demo",
)
ASK = {"inputs": "Hello"}
MESSAGES = [{"role": "user", "content": "Hello"}]


def lines(answer):
    return [json.loads(line) for line in answer.text.splitlines()]


def adapter_of(djl):
    used = djl.worker.submits[-1].adapter
    return "" if used is None else used.digest


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_answers(djl, route):
    djl.worker.scripts.append(says("Ahoy there"))
    answer = await djl.post(route, ASK)
    assert (answer.status, answer.json()) == (200, {"generated_text": "Ahoy there"})
    assert djl.worker.submits[0].params.max_tokens == 30
    assert djl.worker.submits[0].params.greedy
    assert (await djl.call("OPTIONS", route)).json() == {}


async def test_details(djl):
    djl.worker.scripts.append(says("Ahoy there"))
    answer = (await djl.post("/invocations", {**ASK, "parameters": {"details": True}})).json()
    details = answer["details"]
    assert (details["finish_reason"], details["inputs"]) == ("eos_token", "Hello")
    assert details["generated_tokens"] == len(details["tokens"])
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"] == "Ahoy there"
    assert details["tokens"][0].keys() == {"id", "text", "log_prob"}
    assert details["tokens"][-1]["special_token"] is True
    assert "prefill" not in details


async def test_prefill_top_tokens_and_full_text(djl):
    djl.worker.scripts.append(says("Ahoy"))
    parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "return_full_text": True}
    answer = (await djl.post("/invocations", {**ASK, "parameters": parameters})).json()
    assert answer["generated_text"] == "HelloAhoy"
    assert len(answer["details"]["prefill"]) == len(djl.worker.submits[0].prompt_token_ids)
    assert answer["details"]["prefill"][0]["log_prob"] is None
    assert [len(top) for top in answer["details"]["top_tokens"]] == [2] * answer["details"]["generated_tokens"]


@pytest.mark.parametrize(
    ("script", "parameters", "reason", "text"),
    [
        (says("Ahoy there"), {"max_new_tokens": 1}, "length", None),
        (says("Ahoy there"), {}, "eos_token", "Ahoy there"),
        (says("one two three"), {"stop_sequences": ["two"]}, "stop_sequence", "one "),
        (
            says("one two three"),
            {"stop_sequences": "two", "include_stop_str_in_output": True},
            "stop_sequence",
            "one two",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_ends(djl, script, parameters, reason, text, stream):
    djl.worker.scripts.append(script)
    answer = await djl.post("/invocations", {**ASK, "parameters": {**parameters, "details": True}, "stream": stream})
    last = lines(answer)[-1]
    assert last["details"]["finish_reason"] == reason
    assert text in (None, last["generated_text"])
    tokens = [line["token"] for line in lines(answer)] if stream else last["details"]["tokens"]
    shown = "".join(token["text"] for token in tokens)
    assert shown == last["generated_text"] or (not stream and reason == "stop_sequence" and shown == "one two")


async def test_a_stream_is_a_line_for_each_token(djl):
    djl.worker.scripts.append(says("Ahoy there"))
    answer = await djl.post("/invocations", {**ASK, "stream": True, "parameters": {"return_full_text": True}})
    assert answer.header("content-type") == "application/jsonlines"
    *first, last = lines(answer)
    assert all(line.keys() == {"token"} for line in first)
    assert last["generated_text"] == "HelloAhoy there"
    assert "details" not in last
    djl.worker.scripts.append(says("Ahoy there"))
    parameters = {"output_formatter": "sse", "details": True}
    events = (await djl.post("/invocations", {**ASK, "parameters": parameters})).events
    assert events[-1]["details"] == {"finish_reason": "eos_token", "generated_tokens": len(events), "inputs": "Hello"}


async def test_several_inputs(djl):
    djl.worker.scripts += [says("one"), says("two")]
    answer = await djl.post("/invocations", {"inputs": ["a", "b"]})
    assert sorted(each["generated_text"] for each in answer.json()) == ["one", "two"]
    answer = await djl.post("/predictions/demo", b"Hello", content_type="text/plain")
    assert [each.keys() for each in answer.json()] == [{"generated_text"}]


async def test_a_stream_of_several_inputs_has_a_line_for_each_step(djl):
    djl.worker.scripts += [says("one two three"), says("four")]
    answer = await djl.post("/invocations", {"inputs": ["a", "b"], "stream": True})
    assert answer.header("content-type") == "application/jsonlines"
    texts = [line["outputs"] for line in lines(answer)]
    assert len(texts) == len(ids("one two three")) + 1
    assert sorted("".join(column) for column in zip(*texts, strict=True)) == ["four", "one two three"]
    djl.worker.scripts += [says("one two three"), Script(fail_after=1)]
    answer = await djl.post("/invocations", {"inputs": ["a", "b"], "stream": True})
    assert lines(answer)[-1]["code"] == 424


async def test_several_sequences(djl):
    djl.worker.scripts += [says("one", logprobs=[-2.0] * 9), says("two", logprobs=[-1.0] * 9)]
    parameters = {"n": 2, "do_sample": True, "seed": 1}
    answer = (await djl.post("/invocations", {**ASK, "parameters": parameters})).json()
    assert answer["generated_text"] == "two"
    assert [each["generated_text"] for each in answer["details"]["best_of_sequences"]] == ["one"]


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"top_p": 0.9}, 0.0),
    ],
)
async def test_when_tokens_are_sampled(djl, given, temperature):
    await djl.post("/invocations", {**ASK, "parameters": given})
    assert djl.worker.submits[0].params.temperature == temperature


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 424, "Input Parsing failed"),
        (b"[]", 424, "Input Parsing failed"),
        ({}, 424, "'inputs' field"),
        ({"inputs": ""}, 424, "does not contain any content"),
        ({"inputs": []}, 424, "does not contain any content"),
        ({"inputs": ["a", ""]}, 424, "does not contain any content"),
        ({"inputs": 3}, 424, "inputs"),
        ({"inputs": "a", "parameters": []}, 424, "parameters"),
        ({"inputs": "a", "stream": "yes"}, 424, "stream"),
        ({"inputs": "a", "parameters": {"temperature": "hot"}}, 424, "parameters.temperature"),
        ({"inputs": "a", "parameters": {"temperature": -1}}, 400, "temperature must be between 0 and 2"),
        ({"inputs": "a", "parameters": {"top_p": 0}}, 400, "top_p must be in (0, 1]"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, 400, "max_new_tokens must be between 1"),
        ({"inputs": "a", "parameters": {"stop_sequences": [""]}}, 400, "stop_sequences"),
        ({"inputs": "a", "parameters": {"stop_sequences": ["x"] * 99}}, 400, "stop_sequences"),
        ({"inputs": "a", "parameters": {"n": 2, "do_sample": True}, "stream": True}, 400, "n, best_of and num_beams"),
        ({"inputs": ["a"] * 1000}, 400, "inputs must have at most"),
        (
            {"inputs": "a", "parameters": {"details": True, "decoder_input_details": True}, "stream": True},
            400,
            "stream",
        ),
        ({"inputs": "word " * 4000}, 400, "maximum context length"),
    ],
)
async def test_bodies_that_cannot_be(djl, body, status, words):
    answer = await djl.post("/invocations", body)
    assert (answer.status, answer.json()["code"]) == (status, status)
    assert words in answer.json()["error"]
    assert not djl.worker.submits


async def test_an_engine_failure_whole_and_in_a_stream(djl):
    djl.worker.scripts += [Script(fail_after=1), Script(fail_after=2)]
    answer = await djl.post("/invocations", ASK)
    assert answer.status == 424
    body = answer.json()
    assert (body["generated_text"], body["code"], body["details"]) == (None, 424, {"finish_reason": "error"})
    answer = await djl.post("/invocations", {"inputs": "one two three", "stream": True})
    last = lines(answer)[-1]
    assert answer.status == 200
    assert (last["token"]["id"], last["token"]["text"], last["details"]["finish_reason"]) == (-1, "", "error")
    assert "the step that computed this request failed" in last["token"]["error_msg"]


async def test_unknown_models(djl):
    for path in ("/predictions/none", "/models/none/invoke", "/invocations?model_name=none"):
        await djl.refused("POST", path, 404, "ModelNotFoundException", "Model or workflow not found: none", body=ASK)
    text = "Model or workflow not found: demo:9"
    await djl.refused("POST", "/predictions/demo/9", 404, "ModelNotFoundException", text, body=ASK)
    djl.registry.deployed["demo"].is_default = False
    djl.registry.add("other", [])
    text = "Parameter model_name is required."
    await djl.refused("POST", "/invocations", 400, "BadRequestException", text, body=ASK)
    assert (await djl.post("/invocations", {**ASK, "model_name": "demo"})).status == 200
    attributes = "trace=1; model_name=demo"
    assert (await djl.post("/invocations", ASK, x_amzn_sagemaker_custom_attributes=attributes)).status == 200


async def test_adapters_by_header_query_body_and_model(djl):
    await djl.has("a", "b", "c", "d")
    body = {**ASK, "adapters": "c", "model": "d"}
    header = {"x_amzn_sagemaker_adapter_identifier": "a"}
    for path, given, headers, used in (
        ("/invocations?adapter=b", body, header, "digest-a"),
        ("/invocations?adapter=b", body, {}, "digest-b"),
        ("/invocations", body, {}, "digest-c"),
        ("/invocations", {**ASK, "model": "d"}, {}, "digest-d"),
        ("/invocations", {**ASK, "model": "demo:d"}, {}, "digest-d"),
        ("/invocations", {**ASK, "model": "demo"}, {}, ""),
        ("/invocations", {**ASK, "adapters": "", "model": "d"}, {}, ""),
        ("/invocations", ASK, {}, ""),
    ):
        assert (await djl.post(path, given, **headers)).status == 200
        assert adapter_of(djl) == used, (path, given, headers)


async def test_an_adapter_for_each_input(djl):
    await djl.has("a", "b")
    body = {"inputs": ["1", "2", "3"], "adapters": ["a", "", "b"]}
    assert (await djl.post("/invocations", body)).status == 200
    used = [None if submit.adapter is None else submit.adapter.digest for submit in djl.worker.submits]
    assert sorted(used, key=str) == [None, "digest-a", "digest-b"]
    answer = await djl.post("/invocations", {**body, "adapters": ["a", "b"]})
    assert answer.status == 424
    assert "Number of adapters is not equal to the number of inputs" in answer.json()["error"]


async def test_an_unknown_adapter_is_never_the_base(djl):
    await djl.has("a")
    unknown = "Input parsing failed: LoRA adapter x not found in registry. Available adapters: ['a']"
    for path, body, headers, status, text in (
        ("/invocations", ASK, {"x_amzn_sagemaker_adapter_identifier": "x"}, 424, unknown),
        ("/invocations?adapter=x", ASK, {}, 424, "The adapter x has not been registered"),
        ("/invocations", {**ASK, "adapters": "x"}, {}, 424, unknown),
        ("/invocations", {**ASK, "adapters": ["x"]}, {}, 424, unknown),
        ("/invocations", {**ASK, "adapters": 7}, {}, 424, "Input parsing failed: adapters must be a text"),
        ("/invocations", {**ASK, "model": "x"}, {}, 404, "The model `x` does not exist."),
        ("/invocations", {**ASK, "model": "demo:x"}, {}, 404, "The model `demo:x` does not exist."),
        ("/invocations", {**ASK, "model": "other:a"}, {}, 404, "The model `other:a` does not exist."),
        ("/invocations", {**ASK, "model": "tgi"}, {}, 404, "The model `tgi` does not exist."),
        ("/invocations", {"messages": MESSAGES, "adapters": "x"}, {}, 424, unknown),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "x"}, {}, 404, "The model `x` does not exist."),
        ("/v1/chat/completions?adapter=x", {"messages": MESSAGES}, {}, 424, "The adapter x has not been registered"),
    ):
        answer = await djl.post(path, body, **headers)
        assert (answer.status, answer.json()["code"]) == (status, status)
        assert answer.json()["error"].startswith(text)
    assert not djl.worker.submits


@pytest.mark.parametrize("body", [ASK, {"messages": MESSAGES}])
async def test_an_adapter_that_goes_after_it_was_selected_is_unknown(djl, body, monkeypatch):
    await djl.has("a")
    chosen = inference.select

    def select(exchange, entry, *rest):
        found = chosen(exchange, entry, *rest)
        djl.registry.deployed["demo"].adapters.clear()
        djl.registry.publish()
        return found

    monkeypatch.setattr(inference, "select", select)
    answer = await djl.post("/invocations", {**body, "adapters": "a"})
    assert (answer.status, answer.json()["error"]) == (
        424,
        "Input parsing failed: LoRA adapter a is no longer registered",
    )
    assert not djl.worker.submits


async def test_the_handler_cannot_be_named(djl):
    text = "The handler can't be overridden in a request"
    headers = {"handler": "register_adapter", "name": "bad", "src": "/bad"}
    await djl.refused("POST", "/predictions/demo", 400, "BadRequestException", text, body=ASK, **headers)
    given = {"x_amzn_sagemaker_custom_attributes": "Handler=x"}
    await djl.refused("POST", "/invocations", 400, "BadRequestException", text, body=ASK, **given)
    assert await djl.adapters() == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/predictions/demo", "/models/demo/invoke"])
async def test_conversations(djl, path):
    await djl.has("a")
    djl.worker.scripts.append(says("Ahoy"))
    answer = await djl.post(path, {"messages": MESSAGES, "adapters": "a"})
    assert (answer.status, answer.json()["object"], answer.json()["model"]) == (200, "chat.completion", "a")
    assert answer.json()["choices"][0]["message"]["content"] == "Ahoy"
    assert adapter_of(djl) == "digest-a"
    assert answer.header("x-request-id")


async def test_conversations_are_streamed_as_events_or_lines(djl):
    for path, kind in (("/v1/chat/completions", "text/event-stream"), ("/invocations", "application/jsonlines")):
        djl.worker.scripts.append(says("Ahoy there"))
        answer = await djl.post(path, {"messages": MESSAGES, "stream": True})
        assert answer.header("content-type").startswith(kind)
        chunks = [each for each in answer.events if each != "[DONE]"] if path != "/invocations" else lines(answer)
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Ahoy there"


async def test_completions_and_openais_errors(djl):
    djl.worker.scripts.append(says("Ahoy"))
    answer = await djl.post("/invocations", {"prompt": "Hello", "max_tokens": 5})
    assert answer.json()["choices"][0]["text"] == "Ahoy"
    answer = await djl.post("/v1/chat/completions", {"messages": MESSAGES, "temperature": 9})
    assert (answer.status, answer.json()["code"]) == (400, 400)
    assert "temperature" in answer.json()["error"]
    assert (await djl.post("/v1/chat/completions", ASK)).status == 424


async def test_an_adapter_may_have_the_name_of_a_default(djl):
    await djl.has("tgi")
    for body in ({"messages": MESSAGES, "adapters": "tgi"}, {**ASK, "adapters": "tgi"}):
        assert (await djl.post("/invocations", body)).status == 200
        assert adapter_of(djl) == "digest-tgi"


async def test_a_model_name_of_openai_chooses_the_deployment(djl):
    djl.registry.add("other", [])
    answer = await djl.post("/v1/chat/completions", {"messages": MESSAGES, "model": "demo"})
    assert (answer.status, answer.json()["model"]) == (200, "demo")


async def test_embeddings(start):
    djl = Djl(await start(info=EMBEDDING))
    answer = await djl.post("/invocations", {"inputs": ["one", "two"]})
    assert [len(vector) for vector in answer.json()] == [4, 4]
    for body in ({"inputs": []}, {"inputs": ""}, {"inputs": [1]}, {"inputs": "a", "parameters": {"normalize": 1}}):
        assert (await djl.post("/invocations", body)).status == 424


@pytest.mark.parametrize(("path", "given", "headers", "status", "words"), [
    ("/invocations", {}, {"x_amzn_sagemaker_adapter_identifier": "x"}, 424, "LoRA adapter x not found in registry"),
    ("/invocations?adapter=x", {}, {}, 424, "The adapter x has not been registered"),
    ("/invocations", {"adapters": ["", "x"]}, {}, 424, "LoRA adapter x not found in registry"),
    ("/invocations", {"adapters": [""]}, {}, 424, "Number of adapters is not equal to the number of inputs"),
    ("/invocations", {"model": "x"}, {}, 404, "x"),
    ("/invocations", {"adapters": ["", "mine"]}, {}, 400, "makes embeddings and takes no adapters"),
])  # fmt: skip
async def test_embeddings_have_no_adapters(start, path, given, headers, status, words):
    djl = Djl(await start(info=EMBEDDING))
    djl.registry.deployed["demo"].adapters.append(AdapterEntry("mine", "digest", "/mine", 1))
    djl.registry.publish()
    answer = await djl.post(path, {"inputs": ["one", "two"], **given}, **headers)
    assert (answer.status, words in answer.text) == (status, True), answer.text


async def test_overload_is_throttled(start):
    djl = Djl(await start(max_concurrent_requests=1))
    gate = Gate()
    djl.worker.scripts.append(Script(gate_after=0, gate=gate))
    running = djl.serving.begin("/invocations", ASK, plane="djl")
    await eventually(lambda: djl.worker.submits)
    answer = await djl.post("/invocations", ASK)
    assert (answer.status, answer.json()["type"]) == (503, "WlmCapacityException")
    assert answer.header("retry-after") == "1"
    gate.open()
    assert (await running.end()).status == 200
    assert djl.services.admission.in_flight == 0


@pytest.mark.parametrize(("penalty", "status"), [(1.0, 200), (1.1, 400)])
async def test_beams_take_neutral_penalties(djl, penalty, status):
    answer = await djl.post("/invocations", {**ASK, "parameters": {"num_beams": 2, "repetition_penalty": penalty}})
    assert answer.status == status, answer.text


async def test_a_path_may_end_with_a_slash(djl):
    assert (await djl.post("/predictions/demo/", {"inputs": "Hello"})).status == 200
    assert (await djl.get("/models/")).status == 200
    assert (await djl.get("/models/demo/adapters/")).status == 200
    assert (await djl.post("/models/demo//", {})).status in (404, 405)


async def test_an_error_after_a_keep_alive_is_an_event():
    error = STREAMS["sse"].render_error(Unavailable("gone"))
    assert error.startswith(b"data: {")
    assert error.endswith(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["code"] == 503


async def test_a_key_of_an_answer_counts_with_the_adapters_header(djl):
    named = {"idempotency_key": "one", "x_amzn_sagemaker_adapter_identifier": ""}
    assert (await djl.post("/invocations", {"inputs": "Hello"}, **named)).status == 200
    other = await djl.post("/invocations", {"inputs": "Hello"}, **{**named, "x_amzn_sagemaker_adapter_identifier": "b"})
    assert other.status == 422
