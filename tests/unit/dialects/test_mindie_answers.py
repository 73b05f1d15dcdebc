"""MindIE's inference routes: whole answers and streams, byte for byte."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from inference.dialects.mindie.settings import MindieSettings
from tests.unit.golden import Case, check_case
from tests.unit.scripts import Script, ids, says

CHAT, TEXT, GENERATE, ROOT = "/v1/chat/completions", "/v1/completions", "/generate", "/"
STREAM, INFER, INFER_TOKEN = "/generate_stream", "/infer", "/infer_token"
TRITON_INFER, TRITON, TRITON_STREAM = (f"/v2/models/demo/{n}" for n in ("infer", "generate", "generate_stream"))
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
PROMPT = {"model": "demo", "prompt": "The capital", "temperature": 0}
VLLM = {"prompt": "The capital", "temperature": 0, "max_tokens": 20}
SAMPLED = {"temperature": 1.0, "seed": 7, "n": 2}
STREAMED = {"stream": True}
SPAIN, ITALY = says(" The capital of Spain is Madrid."), says(" Rome.")
BEAMS = (Script(tokens=[300]), *(Script(tokens=[300, 301 + i], logprobs=[-0.125, -0.125]) for i in range(2)))
"""A step of one beam, then one of two."""
STEP_FAILED = Script(tokens=ids("The capital of Spain"), fail_after=2)
FAILED_AT_ONCE = Script(fail_after=0)
OVERLOADED = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
LATE = Script(tokens=ids("The capital"), finish=FinishReason.TIMEOUT)
DIES = Script(tokens=ids("The capital of Spain"), die_after=2)
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
TOOLS = {"tools": [{"type": "function", "function": {"name": "clock", "description": "", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string"}}}}}]}  # fmt: skip
TENSOR = {
    "id": "req-1",
    "inputs": [{"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [293, 341]}],
    "outputs": [{"name": "mine"}],
    "parameters": {"max_new_tokens": 20},
}


def tgi(**parameters: object) -> dict[str, object]:
    return {"inputs": "The capital", "parameters": {"max_new_tokens": 20, **parameters}}


def triton(**parameters: object) -> dict[str, object]:
    return {"id": "a", "text_input": "The capital", "parameters": {"max_new_tokens": 20, **parameters}}


CASES = [
    Case("chat", CHAT, HELLO, (SPAIN,)),
    Case("chat-length", CHAT, {**HELLO, "max_tokens": 2}, (SPAIN,)),
    Case("chat-n", CHAT, {**HELLO, **SAMPLED}, (ITALY, SPAIN)),
    Case("chat-logprobs", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}, (ITALY,)),
    Case("chat-stop", CHAT, {**HELLO, "stop": ["Spain"]}, (SPAIN,)),
    Case("chat-stop-token", CHAT, {**HELLO, "stop_token_ids": ids(" of")}, (SPAIN,)),
    Case("chat-tools", CHAT, {**HELLO, **TOOLS}, (says(CALL),)),
    Case("chat-tools-broken", CHAT, {**HELLO, **TOOLS}, (says(CALL.replace("}}", ", }}")),)),
    Case("chat-stream", CHAT, {**HELLO, **STREAMED}, (SPAIN,)),
    Case("chat-stream-two-a-step", CHAT, {**HELLO, **STREAMED}, (says(" The capital of Spain.", per_step=2),)),
    Case("chat-stream-n", CHAT, {**HELLO, **SAMPLED, **STREAMED}, (SPAIN, ITALY)),
    Case("chat-stream-logprobs", CHAT, {**HELLO, **STREAMED, "logprobs": True, "top_logprobs": 1}, (ITALY,)),
    Case("chat-stream-tools", CHAT, {**HELLO, **STREAMED, **TOOLS}, (says(CALL),)),
    Case("chat-stream-usage", CHAT, {**HELLO, **STREAMED, "stream_options": {"include_usage": True}}, (ITALY,)),
    Case("chat-error-model", CHAT, {**HELLO, "model": "none"}),
    Case("chat-error-step", CHAT, HELLO, (STEP_FAILED,)),
    Case("chat-stream-error-before-head", CHAT, {**HELLO, **STREAMED}, (FAILED_AT_ONCE,)),
    Case("chat-stream-error-after-head", CHAT, {**HELLO, **STREAMED}, (STEP_FAILED,)),
    Case("chat-stream-error-deadline", CHAT, {**HELLO, **STREAMED}, (LATE,)),
    Case("completions", TEXT, PROMPT, (SPAIN,)),
    Case("completions-tokens", TEXT, {**PROMPT, "prompt": [293, 341]}, (SPAIN,)),
    Case("completions-n", TEXT, {**PROMPT, **SAMPLED}, (ITALY, SPAIN)),
    Case("completions-best-of", TEXT, {**PROMPT, **SAMPLED, "n": 1, "best_of": 2}, (ITALY, SPAIN)),
    Case("completions-logprobs", TEXT, {**PROMPT, "logprobs": 2}, (ITALY,)),
    Case("completions-beams", TEXT, {**PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 2},
         BEAMS),
    Case("completions-stream", TEXT, {**PROMPT, **STREAMED}, (SPAIN,)),
    Case("completions-stream-n", TEXT, {**PROMPT, **SAMPLED, **STREAMED}, (SPAIN, ITALY)),
    Case("completions-stream-logprobs", TEXT, {**PROMPT, **STREAMED, "logprobs": 1}, (SPAIN,)),
    Case("completions-stream-beams", TEXT, {**PROMPT, **STREAMED, "use_beam_search": True, "n": 2, "max_tokens": 2},
         BEAMS),
    Case("completions-error-empty", TEXT, {**PROMPT, "prompt": ""}),
    Case("completions-error-step", TEXT, PROMPT, (STEP_FAILED,)),
    Case("completions-error-overloaded", TEXT, PROMPT, (OVERLOADED,)),
    Case("completions-error-deadline", TEXT, PROMPT, (LATE,)),
    Case("completions-error-death", TEXT, PROMPT, (DIES,)),
    Case("completions-stream-error-before-head", TEXT, {**PROMPT, **STREAMED}, (FAILED_AT_ONCE,)),
    Case("completions-stream-error-after-head", TEXT, {**PROMPT, **STREAMED}, (STEP_FAILED,)),
    Case("completions-stream-error-death", TEXT, {**PROMPT, **STREAMED}, (DIES,)),
    Case("vllm", GENERATE, VLLM, (SPAIN,)),
    Case("vllm-n", GENERATE, {**VLLM, **SAMPLED}, (ITALY, SPAIN)),
    Case("vllm-stream", GENERATE, {**VLLM, **STREAMED}, (SPAIN,)),
    Case("vllm-stream-n", GENERATE, {**VLLM, **SAMPLED, **STREAMED}, (SPAIN, ITALY)),
    Case("vllm-error-step", GENERATE, VLLM, (STEP_FAILED,)),
    Case("vllm-stream-error-after-head", GENERATE, {**VLLM, **STREAMED}, (STEP_FAILED,)),
    Case("tgi", GENERATE, tgi(), (SPAIN,)),
    Case("tgi-details", GENERATE, tgi(details=True, decoder_input_details=True, seed=12), (SPAIN,)),
    Case("tgi-stop", GENERATE, tgi(details=True, stop=" Spain"), (SPAIN,)),
    Case("tgi-full-text", GENERATE, tgi(return_full_text=True), (SPAIN,)),
    Case("tgi-error-field", GENERATE, tgi(top_p=1.0)),
    Case("tgi-error-long", GENERATE, {"inputs": "a " * 5000}),
    Case("tgi-error-step", GENERATE, tgi(), (STEP_FAILED,)),
    Case("tgi-root", ROOT, tgi(), (SPAIN,)),
    Case("tgi-root-stream", ROOT, {**tgi(details=True), "stream": True}, (ITALY,)),
    Case("tgi-stream", STREAM, tgi(), (SPAIN,)),
    Case("tgi-stream-details", STREAM, tgi(details=True, seed=12), (ITALY,)),
    Case("tgi-stream-error-before-head", STREAM, tgi(), (FAILED_AT_ONCE,)),
    Case("tgi-stream-error-after-head", STREAM, tgi(), (STEP_FAILED,)),
    Case("infer", INFER, tgi(), (SPAIN,)),
    Case("infer-details", INFER, tgi(details=True, seed=7), (SPAIN,)),
    Case("infer-stream", INFER, {**tgi(details=True, seed=7), "stream": True}, (SPAIN,)),
    Case("infer-error-both", INFER, {**tgi(), "input_id": [1]}),
    Case("infer-error-step", INFER, tgi(), (STEP_FAILED,)),
    Case("infer-stream-error-after-head", INFER, {**tgi(), "stream": True}, (STEP_FAILED,)),
    Case("infer-token", INFER_TOKEN, {"input_id": [293, 341], "parameters": {"details": True, "seed": 7}}, (ITALY,)),
    Case("infer-token-stream", INFER_TOKEN, {"input_id": [293, 341], "stream": True}, (ITALY,)),
    Case("triton-infer", TRITON_INFER, TENSOR, (SPAIN,)),
    Case("triton-infer-version", "/v2/models/demo/versions/1/infer", {**TENSOR, "id": None}, (SPAIN,)),
    Case("triton-infer-error", TRITON_INFER, {**TENSOR, "inputs": []}),
    Case("triton-infer-error-model", "/v2/models/none/infer", TENSOR),
    Case("triton-infer-error-step", TRITON_INFER, TENSOR, (STEP_FAILED,)),
    Case("triton", TRITON, triton(), (SPAIN,)),
    Case("triton-details", TRITON, triton(details=True), (ITALY,)),
    Case("triton-stream", TRITON_STREAM, triton(), (SPAIN,)),
    Case("triton-stream-details", TRITON_STREAM, triton(details=True), (ITALY,)),
    Case("triton-stream-error-before-head", TRITON_STREAM, triton(), (FAILED_AT_ONCE,)),
    Case("triton-stream-error-after-head", TRITON_STREAM, triton(), (STEP_FAILED,)),
    Case("tokenizer", "/v1/tokenizer", {"inputs": "The capital"}),
    Case("stop-error-unknown", "/v2/models/demo/stopInfer", {"id": "nothing"}),
    Case("not-found", "/nothing", {}),
]  # fmt: skip
CUMULATIVE = [
    Case("full-text-chat", CHAT, {**HELLO, **STREAMED}, (ITALY,)),
    Case("full-text-completions", TEXT, {**PROMPT, **STREAMED}, (ITALY,)),
    Case("full-text-vllm", GENERATE, {**VLLM, **STREAMED}, (ITALY,)),
    Case("full-text-triton", TRITON_STREAM, triton(), (ITALY,)),
    Case("full-text-tgi", STREAM, tgi(), (ITALY,)),
]
MEASURED = [
    Case("benchmark-chat", CHAT, HELLO, (ITALY,)),
    Case("benchmark-completions-stream", TEXT, {**PROMPT, **STREAMED}, (ITALY,)),
]
TIMED_OUT = [
    Case("timeout-infer", INFER, tgi(timeout=1)),
    Case("timeout-infer-stream", INFER, {**tgi(timeout=1), "stream": True}),
    Case("timeout-completions", TEXT, PROMPT),
    Case("timeout-completions-stream", TEXT, {**PROMPT, **STREAMED}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_answers(serving, case):
    await check_case(serving, case, "mindie", "mindie")


@pytest.mark.parametrize("case", CUMULATIVE, ids=str)
async def test_full_text(start, case):
    await check_case(await start(mindie=MindieSettings(full_text_enabled=True)), case, "mindie", "mindie")


@pytest.mark.parametrize("case", MEASURED, ids=str)
async def test_benchmark_fields(start, case):
    await check_case(await start(mindie=MindieSettings(benchmark_enabled=True)), case, "mindie", "mindie")


TOO_LATE = [
    Case("too-late-infer", INFER, tgi(timeout=1)),
    Case("too-late-infer-stream", INFER, {**tgi(timeout=1), "stream": True}),
    Case("too-late-chat-stream", CHAT, {**HELLO, **STREAMED}),
]


@pytest.mark.parametrize("case", TOO_LATE, ids=str)
async def test_no_first_token(start, case):
    """A stream that a timer ends before its first token has nothing but the bare text."""
    serving = await start(mindie=MindieSettings(token_timeout_s=1))
    serving.worker.default = Script(tokens=ids(" The capital of Spain"), gate_after=0)
    await check_case(serving, case, "mindie", "mindie")


@pytest.mark.parametrize("case", TIMED_OUT, ids=str)
async def test_timers(start, case):
    """The worker stands still after two tokens, until a timer of the server's or the client's ends the request."""
    serving = await start(mindie=MindieSettings(token_timeout_s=1))
    serving.worker.default = Script(tokens=ids(" The capital of Spain"), gate_after=2)
    await check_case(serving, case, "mindie", "mindie")
