"""The log says why: the cause of every generation's end, and one line for every refused request. Never what was sent."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from engine.failures import Failure, FailureCode, FinishReason
from inference.http.refusals import LINES, SPAN_S, Sample
from tests.unit.scripts import EMBEDDING, Gate, Script, ids, says
from tests.waiting import eventually

PATH = "/v1/completions"
ASK = {"model": "demo", "prompt": "The secret capital", "temperature": 0}


@pytest.fixture
def lines():
    with capture_logs() as logs:
        yield logs


def only(lines, event):
    found = [line for line in lines if line["event"] == event]
    assert len(found) == 1, lines
    assert "secret" not in repr(found)
    return found[0]


async def ended(serving, lines, script, **body):
    serving.worker.default = script
    await serving.post(PATH, {**ASK, **body})
    return only(lines, "generation")


async def test_an_end_of_sequence(serving, lines):
    line = await ended(serving, lines, says(" of Spain"))
    assert (line["finish"], line["cause"], line["sequences"]) == ("stop", "end_of_sequence", 1)
    assert (line["dialect"], line["deployment"]) == ("openai", "demo")
    assert line["request_id"]


async def test_a_stop_string_is_named(serving, lines):
    line = await ended(serving, lines, says(" of Spain"), stop=["Spain"])
    assert (line["cause"], line["stop"]) == ("stop_string", "Spain")


async def test_a_stop_token_is_named(serving, lines):
    token = ids(" of Spain")[-1]
    line = await ended(serving, lines, says(" of Spain"), stop_token_ids=[token])
    assert (line["cause"], line["stop"]) == ("stop_token", token)


async def test_a_length(serving, lines):
    line = await ended(serving, lines, says(" of Spain"), max_tokens=1)
    assert (line["finish"], line["cause"]) == ("length", "length")


async def test_a_complete_grammar(serving, lines):
    script = Script(tokens=ids(" of"), finish=FinishReason.STOP)
    assert (await ended(serving, lines, script, guided_regex=" of"))["cause"] == "grammar_complete"


async def test_sequences_that_end_otherwise_are_all_told(serving, lines):
    body = {"n": 2, "temperature": 1, "seed": 0, "max_tokens": 2}
    serving.worker.scripts.extend([says(" of"), Script(tokens=ids(" of Spain and France"))])
    await serving.post(PATH, {**ASK, **body})
    line = only(lines, "generation")
    assert line["sequences"] == 2
    assert sorted(line["cause"].split(",")) == ["end_of_sequence", "length"]


async def test_a_failed_step_has_its_code_and_words(serving, lines):
    line = await ended(serving, lines, Script(tokens=ids(" of"), fail_after=0))
    assert (line["finish"], line["cause"], line["failure"]) == ("error", "failed", "step_failed")
    assert line["reason"] == "the step that computed this request failed"


async def test_a_grammar_that_cannot_be_followed(serving, lines):
    failure = Failure(FailureCode.GRAMMAR, {"reason": "too deep"})
    line = await ended(serving, lines, Script(tokens=ids(" of"), fail_after=0, failure=failure), guided_regex="a+")
    assert (line["cause"], line["failure"]) == ("failed", "grammar")
    assert not [other for other in lines if other["event"] == "request refused"]


async def test_a_lost_worker(serving, lines):
    line = await ended(serving, lines, Script(tokens=ids(" of Spain"), die_after=1), stream=True)
    assert (line["finish"], line["cause"]) == ("error", "worker_lost")


async def test_a_deadline(serving, lines):
    line = await ended(serving, lines, Script(tokens=ids(" of"), finish=FinishReason.TIMEOUT))
    assert (line["finish"], line["cause"]) == ("error", "deadline")


async def test_a_client_that_left(serving, lines):
    gate = Gate()
    serving.worker.default = Script(tokens=ids(" of Spain"), gate_after=1, gate=gate)
    call = serving.begin(PATH, {**ASK, "stream": True})
    await call.chunks(1)
    call.hang_up()
    await call.task
    line = only(lines, "generation")
    assert (line["finish"], line["cause"]) == ("abort", "client_left")


async def test_a_request_that_its_client_stopped(serving, lines):
    gate = Gate()
    serving.worker.default = Script(tokens=ids(" of Spain"), gate_after=1, gate=gate)
    body = {"id": "mine", "text_input": "The secret capital", "parameters": {"max_new_tokens": 4}}
    call = serving.begin("/v2/models/demo/generate", body, plane="mindie")
    await eventually(lambda: serving.worker.submits)
    assert (await serving.post("/v2/models/demo/stopInfer", {"id": "mine"}, plane="mindie")).status == 200
    await call.end()
    assert only(lines, "generation")["cause"] == "cancelled"


@pytest.mark.parametrize(
    ("path", "body", "error", "field", "status"),
    [
        (PATH, {**ASK, "temperature": 9}, "InvalidRequest", "temperature", 400),
        (PATH, {**ASK, "model": "other"}, "ModelNotFound", None, 404),
        ("/nowhere", ASK, "RouteNotFound", None, 404),
        ("/generate", {"inputs": "secret", "parameters": {"top_p": 3}}, "InvalidRequest", "top_p", 422),
        ("/generate_stream", {"inputs": "secret", "parameters": {"top_p": 3}}, "InvalidRequest", "top_p", 200),
    ],
)
async def test_a_refused_request_leaves_one_line(serving, lines, path, body, error, field, status):
    await serving.post(path, body)
    line = only(lines, "request refused")
    assert (line["error"], line["field"], line["path"], line["status"]) == (error, field, path, status)
    assert line["request_id"]
    assert line["method"] == "POST"
    assert not [other for other in lines if other["event"] == "generation"]


async def test_a_body_that_is_no_json(serving, lines):
    await serving.post(PATH, b"{secret")
    assert only(lines, "request refused")["error"] == "MalformedBody"


async def test_overload_before_the_body(start, lines):
    serving = await start(max_concurrent_requests=1)
    gate = Gate()
    serving.worker.default = Script(tokens=ids(" of Spain"), gate_after=1, gate=gate)
    serving.begin(PATH, {**ASK, "stream": True})
    await eventually(lambda: serving.worker.submits)
    assert serving.planes["front"].overloaded("POST", PATH, {}).status == 503
    assert only(lines, "request refused")["error"] == "Overloaded"


async def test_an_embedding_that_failed_has_the_failures_code(start, lines):
    serving = await start(1, info=EMBEDDING)
    serving.worker.embed_failure = Failure(FailureCode.STEP_FAILED)
    await serving.post("/v1/embeddings", {"model": "demo", "input": "secret"})
    line = only(lines, "request refused")
    assert (line["error"], line["failure"], line["status"]) == ("GenerationFailed", "step_failed", 500)


def test_of_many_refusals_of_one_kind_the_first_are_logged_and_the_rest_counted(lines):
    sample = Sample()
    guesses = [sample.takes("Unauthorized", 100.0 + number / 100) for number in range(865)]
    assert guesses == [True] * LINES + [False] * (865 - LINES)
    assert sample.takes("InvalidRequest", 105.0)
    assert sample.takes("Unauthorized", 100.0 + SPAN_S)
    told = only(lines, "requests refused, not logged one by one")
    assert (told["error"], told["count"], told["seconds"]) == ("Unauthorized", 865 - LINES, SPAN_S)
    assert sample.takes("Unauthorized", 101.0 + SPAN_S)
