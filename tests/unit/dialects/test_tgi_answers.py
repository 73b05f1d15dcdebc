"""TGI's /, /generate and /generate_stream: whole answers and streams, byte for byte."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from tests.unit.golden import Case, check_case
from tests.unit.scripts import EMBEDDING, Script, ids, says

ROOT, GENERATE, STREAM = "/", "/generate", "/generate_stream"
SPAIN, ITALY = says(" The capital of Spain is Madrid."), says(" Rome.", logprobs=[-0.25, -0.5, -0.75])
STEP_FAILED = Script(tokens=ids("The capital of Spain"), fail_after=2)
FAILED_AT_ONCE = Script(fail_after=0)
OVERLOADED = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
GRAMMAR = Script(fail_after=0, failure=Failure(FailureCode.GRAMMAR, {"reason": "it is too large"}))
LATE = Script(tokens=ids("The capital"), finish=FinishReason.TIMEOUT)
DIES = Script(tokens=ids("The capital of Spain"), die_after=2)


def ask(**parameters: object) -> dict[str, object]:
    return {"inputs": "The capital", "parameters": {"max_new_tokens": 20, **parameters}}


FULL = ask(details=True, decoder_input_details=True, top_n_tokens=2, seed=3, do_sample=True)

CASES = [
    Case("generate", GENERATE, ask(), (SPAIN,)),
    Case("generate-details", GENERATE, ask(details=True), (SPAIN,)),
    Case("generate-all-details", GENERATE, FULL, (ITALY,)),
    Case("generate-length", GENERATE, ask(details=True, max_new_tokens=2), (SPAIN,)),
    Case("generate-stop", GENERATE, ask(details=True, stop=["Spain"]), (SPAIN,)),
    Case("generate-stop-at-the-end", GENERATE, ask(details=True, stop=["<|im_end|>"]), (SPAIN,)),
    Case("generate-full-text", GENERATE, ask(return_full_text=True), (SPAIN,)),
    Case("generate-truncate", GENERATE, ask(details=True, decoder_input_details=True, truncate=1), (ITALY,)),
    Case("generate-best-of", GENERATE, ask(details=True, best_of=2, do_sample=True), (SPAIN, ITALY)),
    Case("generate-grammar", GENERATE, ask(details=True, grammar={"type": "regex", "value": "a+"}),
         (Script(tokens=ids("aa")),)),
    Case("generate-error-validation", GENERATE, ask(temperature=0)),
    Case("generate-error-body", GENERATE, b"{"),
    Case("generate-error-list", GENERATE, ["The capital"]),
    Case("stream-error-list", STREAM, ["The capital"]),
    Case("generate-error-inputs", GENERATE, {"inputs": 5}),
    Case("generate-error-long", GENERATE, {"inputs": "a " * 3000}),
    Case("generate-error-step", GENERATE, ask(), (STEP_FAILED,)),
    Case("generate-error-overloaded", GENERATE, ask(), (OVERLOADED,)),
    Case("generate-error-grammar", GENERATE, ask(grammar={"type": "regex", "value": "a+"}), (GRAMMAR,)),
    Case("generate-error-deadline", GENERATE, ask(), (LATE,)),
    Case("generate-error-death", GENERATE, ask(), (DIES,)),
    Case("root", ROOT, ask(), (SPAIN,)),
    Case("root-details", ROOT, ask(details=True, return_full_text=False), (SPAIN,)),
    Case("root-stream", ROOT, {**ask(), "stream": True}, (ITALY,)),
    Case("root-error", ROOT, ask(top_p=2)),
    Case("stream", STREAM, ask(), (SPAIN,)),
    Case("stream-details", STREAM, ask(details=True, top_n_tokens=2), (ITALY,)),
    Case("stream-length", STREAM, ask(details=True, max_new_tokens=2), (SPAIN,)),
    Case("stream-stop", STREAM, ask(details=True, stop=["Spain"]), (SPAIN,)),
    Case("stream-accents", STREAM, ask(), (says("Hé 🙂 ok"),)),
    Case("stream-two-a-step", STREAM, ask(), (says(" The capital of Spain is Madrid.", per_step=2),)),
    Case("stream-error-validation", STREAM, ask(temperature=0)),
    Case("stream-error-best-of", STREAM, ask(best_of=2, do_sample=True)),
    Case("stream-error-body", STREAM, b"{"),
    Case("stream-error-at-once", STREAM, ask(), (FAILED_AT_ONCE,)),
    Case("stream-error-step", STREAM, ask(), (STEP_FAILED,)),
    Case("stream-error-overloaded", STREAM, ask(), (OVERLOADED,)),
    Case("stream-error-grammar", STREAM, ask(grammar={"type": "regex", "value": "a+"}), (GRAMMAR,)),
    Case("stream-error-deadline", STREAM, ask(), (LATE,)),
    Case("stream-error-death", STREAM, ask(), (DIES,)),
    Case("invocations", "/invocations", ask(), (SPAIN,)),
    Case("vertex", "/vertex", {"instances": [ask(), ask(max_new_tokens=2)]}, (SPAIN, ITALY)),
    Case("tokenize", "/tokenize", {"inputs": "Hé 1"}),
    Case("chat-tokenize", "/chat_tokenize", {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}),
    Case("not-found", "/nothing", {}),
]  # fmt: skip
VECTORS = [
    Case("embed", ROOT, {"inputs": ["The capital", "of"]}),
    Case("embed-one", ROOT, {"inputs": "The capital"}),
    Case("embed-error-task", GENERATE, {"inputs": "a"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_answers(serving, case):
    await check_case(serving, case, "tgi")


@pytest.mark.parametrize("case", VECTORS, ids=str)
async def test_vectors(start, case):
    await check_case(await start(info=EMBEDDING), case, "tgi")
