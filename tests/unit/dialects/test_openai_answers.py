"""/v1/chat/completions, /v1/completions, /v1/responses and /v1/embeddings: whole answers and streams, byte for byte."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from tests.unit.golden import Case, check_case
from tests.unit.scripts import EMBEDDING, Script, ids, says

CHAT, TEXT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
PROMPT = {"model": "demo", "prompt": "The capital", "temperature": 0}
INPUT = {"model": "demo", "input": "Hello", "temperature": 0}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SAMPLED = {"temperature": 1.0, "seed": 7}
SPAIN, ITALY = says("The capital of Spain is Madrid."), says("Rome.", cached_tokens=16)
BEAMS = (Script(tokens=[300]), *(Script(tokens=[300, 301 + i], logprobs=[-0.125, -0.125]) for i in range(2)))
"""A step of one beam, then one of two."""
CUT = Script(tokens=ids("The capital of Spain"), finish=FinishReason.LENGTH)
ACCENTS = says("Hé 🙂 ok")
TWO_A_STEP = says("The capital of Spain is Madrid.", per_step=2)
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}
TOOLS = {"tools": [CLOCK]}
NAMED = {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
FLAT = {"type": "function", "name": "clock", "parameters": CLOCK["function"]["parameters"]}
PATCH = {"type": "custom", "name": "patch", "description": "Changes a file."}
PATCHES = '<tool_call>{"name": "patch", "arguments": {"input": "+a\\n-b"}}</tool_call>'
SPACED = {"type": "namespace", "name": "time", "description": "Of the day.", "tools": [FLAT]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
STEP_FAILED = Script(tokens=ids("The capital of Spain"), fail_after=2)
FAILED_AT_ONCE = Script(fail_after=0)
OVERLOADED = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
GRAMMAR = Script(fail_after=0, failure=Failure(FailureCode.GRAMMAR, {"reason": "it is too large"}))
LATE = Script(tokens=ids("The capital"), finish=FinishReason.TIMEOUT)
DIES = Script(tokens=ids("The capital of Spain"), die_after=2)

CASES = [
    Case("chat", CHAT, HELLO, (SPAIN,)),
    Case("chat-cached", CHAT, HELLO, (ITALY,)),
    Case("chat-length", CHAT, {**HELLO, "max_tokens": 3}, (SPAIN,)),
    Case("chat-n", CHAT, {**HELLO, **SAMPLED, "n": 2}, (SPAIN, ITALY)),
    Case("chat-logprobs", CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}, (SPAIN,)),
    Case("chat-logprobs-none-on-top", CHAT, {**HELLO, "logprobs": True}, (ITALY,)),
    Case("chat-prompt-logprobs", CHAT, {**HELLO, "prompt_logprobs": 1}, (ITALY,)),
    Case("chat-stop", CHAT, {**HELLO, "stop": [" of", "Madrid"]}, (SPAIN,)),
    Case("chat-stop-kept", CHAT, {**HELLO, "stop": "Madrid", "include_stop_str_in_output": True}, (SPAIN,)),
    Case("chat-stop-token", CHAT, {**HELLO, "stop_token_ids": ids(" of")}, (SPAIN,)),
    Case("chat-token-ids", CHAT, {**HELLO, "return_token_ids": True}, (SPAIN,)),
    Case("chat-special-tokens", CHAT, {**HELLO, "skip_special_tokens": False}, (Script(tokens=[1, *ids("Hi"), 2]),)),
    Case("chat-grammar-complete", CHAT, {**HELLO, "response_format": {"type": "json_object"}},
         (Script(tokens=ids('{"a": 1}')),)),
    Case("chat-echo", CHAT, {**HELLO, "messages": [*HELLO["messages"], {"role": "assistant", "content": "The"}],
                             "add_generation_prompt": False, "continue_final_message": True, "echo": True}, (SPAIN,)),
    Case("chat-thoughts", CHAT, HELLO, (says("<think>Hm.</think>Yes."),)),
    Case("chat-tools", CHAT, {**HELLO, **TOOLS}, (says(f"Let me see.\n{CALL}"),)),
    Case("chat-tools-two", CHAT, {**HELLO, **TOOLS}, (says(CALL * 2),)),
    Case("chat-tools-none", CHAT, {**HELLO, **TOOLS}, (says("It is late < early."),)),
    Case("chat-tools-broken", CHAT, {**HELLO, **TOOLS}, (says(CALL.replace("}}", ", }}")),)),
    Case("chat-tools-unknown", CHAT, {**HELLO, **TOOLS}, (says(CALL.replace("clock", "watch")),)),
    Case("chat-tools-named", CHAT, {**HELLO, **NAMED}, (says('{"zone": "UTC"}'),)),
    Case("chat-tools-required", CHAT, {**HELLO, **TOOLS, "tool_choice": "required"},
         (says('[{"name": "clock", "parameters": {"zone": "UTC"}}]'),)),
    Case("chat-stream", CHAT, {**HELLO, **STREAM}, (SPAIN,)),
    Case("chat-stream-two-a-step", CHAT, {**HELLO, **STREAM}, (TWO_A_STEP,)),
    Case("chat-stream-length", CHAT, {**HELLO, **STREAM, "max_tokens": 3}, (SPAIN,)),
    Case("chat-stream-accents", CHAT, {**HELLO, **STREAM}, (ACCENTS,)),
    Case("chat-stream-usage", CHAT, {**HELLO, **USAGE}, (ITALY,)),
    Case("chat-stream-usage-continuous", CHAT, {**HELLO, **CONTINUOUS}, (ITALY,)),
    Case("chat-stream-n", CHAT, {**HELLO, **SAMPLED, **USAGE, "n": 2}, (SPAIN, ITALY)),
    Case("chat-stream-logprobs", CHAT, {**HELLO, **STREAM, "logprobs": True, "top_logprobs": 1}, (ACCENTS,)),
    Case("chat-stream-token-ids", CHAT, {**HELLO, **STREAM, "return_token_ids": True}, (ITALY,)),
    Case("chat-stream-stop", CHAT, {**HELLO, **STREAM, "stop": ["is Mad"]}, (SPAIN,)),
    Case("chat-stream-stop-token", CHAT, {**HELLO, **STREAM, "stop_token_ids": ids(" of")}, (SPAIN,)),
    Case("chat-stream-thoughts", CHAT, {**HELLO, **STREAM}, (says("<think>Hm.</think>Yes."),)),
    Case("chat-stream-tools", CHAT, {**HELLO, **STREAM, **TOOLS}, (says(f"Let me see.\n{CALL}"),)),
    Case("chat-stream-tools-unknown", CHAT, {**HELLO, **STREAM, **TOOLS}, (says(CALL.replace("clock", "watch")),)),
    Case("chat-stream-tools-named", CHAT, {**HELLO, **STREAM, **NAMED}, (says('{"zone": "UTC"}'),)),
    Case("chat-error-template", CHAT, {**HELLO, "messages": []}),
    Case("chat-error-model", CHAT, {**HELLO, "model": "none"}),
    Case("chat-error-field", CHAT, {**HELLO, "temperature": 9}),
    Case("chat-error-tools", CHAT, {**HELLO, "tools": [{"type": "retrieval"}]}),
    Case("chat-error-overloaded", CHAT, HELLO, (OVERLOADED,)),
    Case("chat-error-grammar", CHAT, {**HELLO, "response_format": {"type": "json_object"}}, (GRAMMAR,)),
    Case("chat-error-step", CHAT, HELLO, (STEP_FAILED,)),
    Case("chat-error-deadline", CHAT, HELLO, (LATE,)),
    Case("chat-error-death", CHAT, HELLO, (DIES,)),
    Case("chat-stream-error-before-head", CHAT, {**HELLO, **STREAM}, (FAILED_AT_ONCE,)),
    Case("chat-stream-error-overloaded", CHAT, {**HELLO, **STREAM}, (OVERLOADED,)),
    Case("chat-stream-error-after-head", CHAT, {**HELLO, **STREAM}, (STEP_FAILED,)),
    Case("chat-stream-error-deadline", CHAT, {**HELLO, **STREAM}, (LATE,)),
    Case("chat-stream-error-death", CHAT, {**HELLO, **STREAM}, (DIES,)),
    Case("completions", TEXT, PROMPT, (SPAIN,)),
    Case("completions-length", TEXT, {**PROMPT, "max_tokens": 2}, (SPAIN,)),
    Case("completions-echo", TEXT, {**PROMPT, "echo": True}, (SPAIN,)),
    Case("completions-echo-logprobs", TEXT, {**PROMPT, "echo": True, "logprobs": 2, "max_tokens": 2}, (SPAIN,)),
    Case("completions-echo-nothing", TEXT, {**PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}, (SPAIN,)),
    Case("completions-logprobs", TEXT, {**PROMPT, "logprobs": 2}, (SPAIN,)),
    Case("completions-logprobs-as-ids", TEXT, {**PROMPT, "logprobs": 1, "return_tokens_as_token_ids": True}, (ITALY,)),
    Case("completions-logprobs-named", TEXT, {**PROMPT, "logprobs": 0, "logprob_token_ids": [5, 6]}, (ITALY,)),
    Case("completions-prompt-logprobs", TEXT, {**PROMPT, "prompt_logprobs": 1}, (ITALY,)),
    Case("completions-n", TEXT, {**PROMPT, **SAMPLED, "n": 2}, (SPAIN, ITALY)),
    Case("completions-best-of", TEXT, {**PROMPT, **SAMPLED, "best_of": 2, "n": 1}, (SPAIN, ITALY)),
    Case("completions-prompts", TEXT, {**PROMPT, "prompt": ["The capital", ids("of Spain")]}, (SPAIN, ITALY)),
    Case("completions-stop", TEXT, {**PROMPT, "stop": "Madrid"}, (SPAIN,)),
    Case("completions-token-ids", TEXT, {**PROMPT, "return_token_ids": True}, (ITALY,)),
    Case("completions-beams", TEXT, {**PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 2},
         BEAMS),
    Case("completions-stream", TEXT, {**PROMPT, **STREAM}, (SPAIN,)),
    Case("completions-stream-usage", TEXT, {**PROMPT, **USAGE}, (SPAIN,)),
    Case("completions-stream-usage-continuous", TEXT, {**PROMPT, **CONTINUOUS}, (ITALY,)),
    Case("completions-stream-echo", TEXT, {**PROMPT, **STREAM, "echo": True, "logprobs": 1}, (ITALY,)),
    Case("completions-stream-n", TEXT, {**PROMPT, **SAMPLED, **STREAM, "n": 2}, (SPAIN, ITALY)),
    Case("completions-stream-prompts", TEXT, {**PROMPT, **USAGE, "prompt": ["The", "of"]}, (SPAIN, ITALY)),
    Case("completions-stream-logprobs", TEXT, {**PROMPT, **STREAM, "logprobs": 1}, (SPAIN,)),
    Case("completions-stream-stop", TEXT, {**PROMPT, **STREAM, "stop": ["is Mad"]}, (SPAIN,)),
    Case("completions-error-empty", TEXT, {**PROMPT, "prompt": ""}),
    Case("completions-error-long", TEXT, {**PROMPT, "prompt": [5] * 2048}),
    Case("completions-error-vocabulary", TEXT, {**PROMPT, "prompt": [5000]}),
    Case("completions-error-body", TEXT, b"{"),
    Case("completions-error-step", TEXT, PROMPT, (STEP_FAILED,)),
    Case("completions-stream-error-before-head", TEXT, {**PROMPT, **STREAM}, (FAILED_AT_ONCE,)),
    Case("completions-stream-error-after-head", TEXT, {**PROMPT, **STREAM}, (STEP_FAILED,)),
    Case("responses", RESPONSES, INPUT, (SPAIN,)),
    Case("responses-length", RESPONSES, {**INPUT, "max_output_tokens": 2}, (SPAIN,)),
    Case("responses-thoughts", RESPONSES, INPUT, (says("<think>Hm.</think>Yes."),)),
    Case("responses-tools", RESPONSES, {**INPUT, "tools": [FLAT]}, (says(f"Let me see.\n{CALL}"),)),
    Case("responses-stream", RESPONSES, {**INPUT, **STREAM}, (SPAIN,)),
    Case("responses-stream-length", RESPONSES, {**INPUT, **STREAM, "max_output_tokens": 2}, (SPAIN,)),
    Case("responses-stream-thoughts", RESPONSES, {**INPUT, **STREAM}, (says("<think>Hm.</think>Yes."),)),
    Case("responses-stream-tools", RESPONSES, {**INPUT, **STREAM, "tools": [FLAT]}, (says(f"Let me see.\n{CALL}"),)),
    Case("responses-thoughts-hidden", RESPONSES, {**INPUT, "include_reasoning": False},
         (says("<think>Hm.</think>Yes."),)),
    Case("responses-logprobs", RESPONSES, {**INPUT, **LOGPROBS}, (ITALY,)),
    Case("responses-messages", RESPONSES, {**INPUT, "enable_response_messages": True, "request_id": "resp_1"}, (ITALY,)),
    Case("responses-custom", RESPONSES, {**INPUT, "tools": [PATCH]}, (says(PATCHES),)),
    Case("responses-spaced", RESPONSES, {**INPUT, "tools": [SPACED]}, (says(CALL.replace("clock", "time__clock")),)),
    Case("responses-stream-logprobs", RESPONSES, {**INPUT, **LOGPROBS, **STREAM}, (ITALY,)),
    Case("responses-stream-custom", RESPONSES, {**INPUT, **STREAM, "tools": [PATCH]}, (says(PATCHES),)),
    Case("responses-stream-two", RESPONSES, {**INPUT, **STREAM, "tools": [FLAT]}, (says(f"<think>Hm.</think>{CALL}Then.{CALL}"),)),
    Case("responses-stream-empty", RESPONSES, {**INPUT, **STREAM}, (says(""),)),
    Case("responses-error-field", RESPONSES, {**INPUT, "background": True}),
    Case("responses-error-step", RESPONSES, INPUT, (STEP_FAILED,)),
    Case("responses-stream-error-before-head", RESPONSES, {**INPUT, **STREAM}, (FAILED_AT_ONCE,)),
    Case("responses-stream-error-after-head", RESPONSES, {**INPUT, **STREAM}, (STEP_FAILED,)),
    Case("embeddings-error-task", EMBEDDINGS, {"model": "demo", "input": "a"}),
    Case("invocations-chat", "/invocations", HELLO, (SPAIN,)),
    Case("invocations-completion", "/invocations", {**PROMPT, **STREAM}, (ITALY,)),
]  # fmt: skip
VECTORS = [
    Case("embeddings", EMBEDDINGS, {"model": "demo", "input": ["The capital", "of"]}),
    Case("embeddings-base64", EMBEDDINGS, {"model": "demo", "input": [5, 6], "encoding_format": "base64"}),
    Case(
        "embeddings-big-endian",
        EMBEDDINGS,
        {"model": "demo", "input": [5, 6], "encoding_format": "base64", "embed_dtype": "fp8_e5m2", "endianness": "big"},
    ),
    Case("embeddings-conversations", EMBEDDINGS, {"model": "demo", "input": [HELLO["messages"]] * 2}),
    Case("embeddings-conversation", EMBEDDINGS, {"model": "demo", "input": HELLO["messages"]}),
    Case("invocations-embedded", "/invocations", {**HELLO, "encoding_format": "float"}),
    Case("pooling", "/pooling", {"model": "demo", "input": "The capital", "task": "embed"}),
    Case("pooling-error-task", "/pooling", {"model": "demo", "input": "The capital", "task": "classify"}),
    Case("embeddings-error-format", EMBEDDINGS, {"model": "demo", "input": "The", "encoding_format": "hex"}),
    Case("embeddings-error-vocabulary", EMBEDDINGS, {"model": "demo", "input": [-1]}),
    Case("embeddings-dimensions", EMBEDDINGS, {"model": "demo", "input": "The", "dimensions": 2}),
    Case("embeddings-error-dimensions", EMBEDDINGS, {"model": "demo", "input": "The", "dimensions": 9}),
    Case("embeddings-error-empty", EMBEDDINGS, {"model": "demo", "input": []}),
    Case("embeddings-error-chat", CHAT, HELLO),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_answers(serving, case):
    await check_case(serving, case, "openai")


@pytest.mark.parametrize("case", VECTORS, ids=str)
async def test_vectors(start, case):
    await check_case(await start(info=EMBEDDING), case, "openai")


FAILURES = [FailureCode.STEP_FAILED, FailureCode.OVERLOADED]
FAILING = [Case(f"embeddings-error-{code}", EMBEDDINGS, {"model": "demo", "input": "a"}) for code in FAILURES]


@pytest.mark.parametrize(("code", "case"), list(zip(FAILURES, FAILING, strict=True)), ids=str)
async def test_vectors_that_fail(start, code, case):
    serving = await start(info=EMBEDDING)
    serving.worker.embed_failure = Failure(code)
    await check_case(serving, case, "openai")
