"""W3C's trace context, what switches OpenTelemetry on, and the spans of requests that end in every way."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from config.telemetry import TelemetryError, exports, telemetry_of
from engine.failures import Failure, FailureCode, FinishReason
from inference.telemetry import trace_context
from inference.telemetry.spans import OpenTelemetry
from inference.telemetry.trace_context import TraceContext
from tests.unit.scripts import EMBEDDING, Gate, Script, ids, says

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
PATH = "/v1/completions"
ASK = {"model": "demo", "prompt": "The secret capital", "temperature": 0}
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [
        (PARENT, TraceContext(TRACE, SPAN)),
        (f"00-{TRACE}-{SPAN}-00", TraceContext(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-fe", TraceContext(TRACE, SPAN, sampled=False)),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", TraceContext(TRACE, SPAN)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE[1:]}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\n{TRACE}", None),
        ("", None),
        (None, None),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(traceparent, expected):
    assert trace_context.parse(traceparent) == expected


@pytest.mark.parametrize("state", ["x" * 513, "a=b\nforged=line", "a=\u00e9"])
def test_a_bad_tracestate_costs_the_state_alone(state):
    assert trace_context.parse(PARENT, state) == TraceContext(TRACE, SPAN)


async def test_a_trace_is_in_the_log_without_opentelemetry(serving):
    serving.worker.default = says(" of Spain")
    with capture_logs(processors=[merge_contextvars]) as lines:
        answer = await serving.post(PATH, ASK, traceparent=PARENT)
        await serving.post(PATH, {**ASK, "model": "other"}, traceparent=PARENT)
        await serving.post("/nowhere", ASK, traceparent=PARENT)
        await serving.post(PATH, ASK, traceparent="nonsense")
    traces = [(line["event"], line.get("trace_id")) for line in lines]
    assert traces == [("generation", TRACE), *[("request refused", TRACE)] * 2, ("generation", None)]
    assert lines[0]["model"] == "demo"
    assert answer.header("traceresponse") is None


@pytest.mark.parametrize(
    ("environment", "endpoint", "expected"),
    [
        ({}, "", (False, False)),
        (ENDPOINT, "", (True, True)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/v1/traces"}, "", (True, False)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a/v1/metrics"}, "", (False, True)),
        ({}, "http://a/v1/traces", (True, False)),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, "", (False, True)),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, "http://a/v1/traces", (False, False)),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "", (True, True)),
    ],
)
def test_an_endpoint_switches_a_signal_on(environment, endpoint, expected):
    assert (exports("TRACES", environment, endpoint), exports("METRICS", environment)) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name, value):
    with pytest.raises(TelemetryError, match=name):
        telemetry_of("", {**ENDPOINT, name: value})


def test_without_the_extra_its_name_is_told(monkeypatch):
    monkeypatch.delitem(sys.modules, "inference.telemetry.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(TelemetryError, match=r"dragoman\[otel\]"):
        telemetry_of("", ENDPOINT)
    assert telemetry_of("", {}) is None


@pytest.fixture
async def traced(start):
    """Begins to serve with spans in memory: the serving, and a function that takes the finished ones by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = OpenTelemetry(provider, None)

    async def begin(**settings):
        serving = await start(telemetry=telemetry, **settings)
        return serving, lambda: {span.name: span for span in exporter.get_finished_spans()}

    yield begin
    telemetry.close()


async def test_a_failed_step_is_an_error_with_its_code(traced):
    serving, spans = await traced()
    serving.worker.default = Script(tokens=ids(" of"), fail_after=0)
    await serving.post(PATH, ASK)
    generation = spans()["text_completion demo"]
    assert generation.attributes["error.type"] == "step_failed"
    assert not generation.status.is_ok
    assert spans()[f"POST {PATH}"].attributes["error.type"] == "500"


async def test_a_lost_worker_in_a_stream(traced):
    serving, spans = await traced()
    serving.worker.default = Script(tokens=ids(" of Spain"), die_after=1)
    await serving.post(PATH, {**ASK, "stream": True})
    assert spans()["text_completion demo"].attributes["error.type"] == "worker_lost"
    assert spans()[f"POST {PATH}"].attributes["http.response.status_code"] == 200


async def test_a_deadline(traced):
    serving, spans = await traced()
    serving.worker.default = Script(tokens=ids(" of"), finish=FinishReason.TIMEOUT)
    await serving.post(PATH, ASK)
    assert spans()["text_completion demo"].attributes["error.type"] == "deadline"


async def test_a_client_that_leaves_before_its_answer(traced):
    serving, spans = await traced()
    serving.worker.default = Script(tokens=ids(" of Spain"), gate_after=1, gate=Gate())
    call = serving.begin(PATH, {**ASK, "stream": True})
    await call.chunks(1)
    call.hang_up()
    await call.task
    generation = spans()["text_completion demo"]
    assert generation.attributes["error.type"] == "client_left"
    assert generation.attributes["gen_ai.response.finish_reasons"] == ()
    assert generation.status.status_code.name == "UNSET"


async def test_sequences_parameters_and_a_seed(traced):
    serving, spans = await traced()
    serving.worker.default = says(" of Spain")
    body = {**ASK, "n": 2, "temperature": 0.5, "seed": 7, "top_k": 3, "presence_penalty": 0.25, "stop": ["secret"]}
    await serving.post(PATH, body)
    known = spans()["text_completion demo"].attributes
    assert known["gen_ai.request.choice.count"] == known["gen_ai.request.n"] == 2
    assert known["gen_ai.request.seed"] == 7
    assert (known["gen_ai.request.temperature"], known["gen_ai.request.top_k"]) == (0.5, 3)
    assert known["gen_ai.request.presence_penalty"] == 0.25
    assert "gen_ai.request.frequency_penalty" not in known
    assert known["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert "secret" not in repr(dict(known))


async def test_embeddings(traced):
    serving, spans = await traced(info=EMBEDDING)
    await serving.post("/v1/embeddings", {"model": "demo", "input": ["secret", "two"]}, traceparent=PARENT)
    span = spans()["embeddings demo"]
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent.span_id == spans()["POST /v1/embeddings"].context.span_id
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert span.attributes["dragoman.inputs"] == 2


async def test_embeddings_that_fail(traced):
    serving, spans = await traced(info=EMBEDDING)
    serving.worker.embed_failure = Failure(FailureCode.STEP_FAILED)
    await serving.post("/v1/embeddings", {"model": "demo", "input": "secret"})
    assert spans()["embeddings demo"].attributes["error.type"] == "GenerationFailed"


async def test_the_caller_of_a_delegated_call_keeps_its_trace(traced):
    """MindIE's plane serves OpenAI's route by another handler; there is one call and one generation below it."""
    serving, spans = await traced()
    serving.worker.default = says(" of Spain")
    body = {"model": "demo", "messages": [{"role": "user", "content": "A secret"}]}
    await serving.post("/v1/chat/completions", body, plane="mindie", traceparent=PARENT)
    call, generation = spans()["POST /v1/chat/completions"], spans()["chat demo"]
    assert generation.parent.span_id == call.context.span_id
    assert f"{call.parent.span_id:016x}" == SPAN
