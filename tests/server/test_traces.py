"""A live server exports traces and metrics to a collector, and says in its log and answers which trace is whose."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import grpc
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests import calls
from tests.live import LiveServer
from tests.otlp import collector
from tests.waiting import wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"model": "demo", "prompt": "Once upon a secret time", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CALL, GENERATION = "POST /v1/completions", "text_completion demo"
PHASES = ("prepare", "queue", "prefill", "decode")
SERVER = 2
"""OTLP's number of the kind of a server's span."""


@pytest.fixture(scope="module")
def receiver():
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def traced(receiver, tmp_path_factory):
    environment = {**receiver.environment, "DRAGOMAN_LOG_FORMAT": "json", "OTEL_RESOURCE_ATTRIBUTES": "team=blue"}
    live = LiveServer(tmp_path_factory.mktemp("traced") / "var", environment=environment).start()
    yield live
    assert live.stop() == 0, live.log


def parent(number: int) -> tuple[str, dict[str, str]]:
    """A trace of the caller's, and its headers."""
    trace = f"{TRACE[:-4]}{number:04x}"
    return trace, {"traceparent": f"00-{trace}-{SPAN}-01", "tracestate": "vendor=1"}


def logged(server, trace):
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("trace_id") == trace]


def test_a_whole_answer(receiver, traced):
    trace, headers = parent(1)
    answer = traced.post("/v1/completions", ASK, headers={**headers, "x-request-id": "mine"})
    spans = receiver.trace(trace, CALL, GENERATION, *PHASES)
    call, generation = spans[CALL], spans[GENERATION]
    assert answer.headers["traceresponse"] == f"00-{trace}-{call.id}-01"
    assert (call.parent, call.kind, generation.parent) == (SPAN, SERVER, call.id)
    assert {spans[phase].parent for phase in PHASES} == {generation.id}
    assert all(first.end <= second.begin for first, second in pairwise(spans[phase] for phase in PHASES))
    assert call.begin <= generation.begin <= generation.end <= call.end
    assert call.attributes["http.response.status_code"] == 200
    assert call.attributes["http.route"] == call.attributes["url.path"] == "/v1/completions"
    usage, found = answer.json()["usage"], generation.attributes
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "demo"
    assert found["gen_ai.usage.input_tokens"] == found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == found["gen_ai.usage.completion_tokens"] == 6
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.request.id"] == "mine"
    latency = {name: found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 <= latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    assert (call.resource["service.name"], call.resource["team"]) == ("dragoman", "blue")
    assert not call.failed
    assert not generation.failed
    line = next(line for line in logged(traced, trace) if line["event"] == "generation")
    assert (line["request_id"], line["model"], line["completion_tokens"]) == ("mine", "demo", 6)
    assert "secret" not in repr(receiver.spans)


def test_a_stream(receiver, traced):
    trace, headers = parent(2)
    body = {"model": "demo", "messages": [{"role": "user", "content": "A secret"}], "max_tokens": 5, "stream": True}
    answer = traced.post("/v1/chat/completions", body, headers=headers)
    assert answer.headers["traceresponse"].startswith(f"00-{trace}-")
    spans = receiver.trace(trace, "POST /v1/chat/completions", "chat demo", *PHASES)
    assert spans["chat demo"].attributes["gen_ai.operation.name"] == "chat"


def test_a_refused_request(receiver, traced):
    trace, headers = parent(3)
    assert traced.post("/v1/completions", {**ASK, "temperature": 9}, headers=headers).status_code == 400
    spans = receiver.trace(trace, CALL)
    assert (spans[CALL].attributes["http.response.status_code"], spans[CALL].failed) == (400, False)
    assert [line["event"] for line in logged(traced, trace)] == ["request refused"]


def test_a_request_without_a_key_to_a_route_has_its_trace_in_the_log(traced):
    trace, headers = parent(4)
    assert traced.post("/v1/completions", ASK, headers={**headers, "host": "elsewhere.example"}).status_code == 403
    wait_until(lambda: [line["event"] for line in logged(traced, trace)] == ["request refused"])


def test_a_generation_that_fails(receiver, traced):
    trace, headers = parent(5)
    body = {**ASK, "structured_outputs": {"grammar": "start: unknown"}}
    assert traced.post("/v1/completions", body, headers=headers).status_code == 400
    generation = receiver.trace(trace, CALL, GENERATION)[GENERATION]
    assert generation.failed
    assert (generation.attributes["error.type"], generation.attributes["dragoman.end_cause"]) == ("grammar", "failed")
    assert "decode" not in receiver.trace(trace, CALL)


def test_a_client_that_leaves(receiver, traced):
    trace, headers = parent(6)
    body = {**ASK, "max_tokens": 1500, "stream": True}
    with calls.stream("POST", f"{traced.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        next(answer.iter_bytes())
    generation = receiver.trace(trace, CALL, GENERATION)[GENERATION]
    assert generation.attributes["error.type"] == generation.attributes["dragoman.end_cause"] == "client_left"
    assert not generation.failed
    assert generation.attributes["gen_ai.response.finish_reasons"] == []


def test_a_call_over_grpc(receiver, traced):
    trace, headers = parent(7)
    request = pb.ModelInferRequest(model_name="demo")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"A secret")
    method = "inference.GRPCInferenceService/ModelInfer"
    with grpc.insecure_channel(f"127.0.0.1:{traced.grpc_port}") as channel:
        infer = channel.unary_unary(
            f"/{method}", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        _, call = infer.with_call(request, metadata=tuple(headers.items()), timeout=60)
        assert dict(call.trailing_metadata())["traceresponse"].startswith(f"00-{trace}-")
        request.model_name = "nothing"
        with pytest.raises(grpc.RpcError) as refused:
            infer(request, metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),), timeout=60)
        assert dict(refused.value.trailing_metadata())["traceresponse"].startswith(f"00-{TRACE}-")
    spans = receiver.trace(trace, method, GENERATION, *PHASES)
    assert (spans[method].attributes["rpc.response.status_code"], spans[method].kind) == ("OK", SERVER)
    assert spans[GENERATION].parent == spans[method].id
    status = receiver.trace(TRACE, method)[method].attributes["rpc.response.status_code"]
    assert status == refused.value.code().name


def test_a_call_without_a_trace_begins_one(receiver, traced):
    answer = traced.post("/generate", {"inputs": "Once", "parameters": {"max_new_tokens": 2}})
    _, trace, span, _ = answer.headers["traceresponse"].split("-")
    call = receiver.trace(trace, "POST /generate")["POST /generate"]
    assert (call.id, call.parent) == (span, "")
    assert logged(traced, trace)


def test_a_caller_that_does_not_sample_is_heeded(receiver, traced):
    trace, _ = parent(8)
    answer = traced.post("/v1/completions", ASK, headers={"traceparent": f"00-{trace}-{SPAN}-00"})
    assert answer.headers["traceresponse"].endswith("-00")
    marker, headers = parent(9)
    traced.post("/v1/completions", ASK, headers=headers)
    receiver.trace(marker, CALL, GENERATION)  # it came later, and is there
    assert trace not in {span.trace for span in receiver.spans}
    assert logged(traced, trace)


def test_no_span_tells_of_health_checks(receiver, traced):
    traced.get("/health")
    marker, headers = parent(10)
    traced.post("/v1/completions", ASK, headers=headers)
    receiver.trace(marker, CALL)
    assert not [span.name for span in receiver.spans if "health" in span.name]


def test_the_metrics_of_the_conventions(receiver, traced):
    traced.post("/v1/completions", ASK)
    names = [f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")]

    def whole(name):
        points = [
            (dict((a.key, a.value.string_value) for a in point.attributes), point) for point in receiver.points(name)
        ]
        return [
            point
            for labels, point in points
            if "error.type" not in labels and labels["gen_ai.operation.name"] == "text_completion"
        ]

    wait_until(lambda: all(whole(name) for name in names), 60, lambda: receiver.metrics)
    for name in names:
        point = whole(name)[0]
        assert receiver.metrics[name].unit == "s"
        assert point.count > 0
        assert point.sum > 0
    assert list(whole(names[0])[0].explicit_bounds)[:3] == [0.01, 0.02, 0.04]


def test_what_is_left_is_exported_at_the_end(tmp_path):
    with collector() as found:
        environment = {**found.environment, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        live = LiveServer(tmp_path / "var", environment=environment).start()
        live.post("/v1/completions", ASK)
        assert live.stop() == 0
        assert {CALL, GENERATION} <= {span.name for span in found.spans}


def test_a_collector_that_is_away_delays_neither_answers_nor_the_end(tmp_path):
    environment = {"DRAGOMAN_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}
    live = LiveServer(tmp_path / "var", environment=environment).start()
    assert live.post("/v1/completions", ASK).status_code == 200
    begin = time.monotonic()
    assert live.stop() == 0
    assert time.monotonic() - begin < 60
