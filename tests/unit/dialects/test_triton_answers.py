"""Triton's .../infer, .../generate and .../generate_stream: whole answers and streams, byte for byte."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from tests.unit.golden import Case, check_case
from tests.unit.scripts import Script, ids, says

INFER, GENERATE, STREAM = (f"/v2/models/demo/{name}" for name in ("infer", "generate", "generate_stream"))
GREEDY = {"max_tokens": 20, "temperature": 0}
SPAIN, ITALY = says(" The capital of Spain is Madrid."), says(" Rome.")
STEP_FAILED = Script(tokens=ids("The capital of Spain"), fail_after=2)
OVERLOADED = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
LATE = Script(tokens=ids("The capital"), finish=FinishReason.TIMEOUT)
DIES = Script(tokens=ids("The capital of Spain"), die_after=2)
FLAGS = ("return_finish_reason", "return_num_output_tokens", "return_num_input_tokens", "return_cumulative_logprob",
         "return_logprobs", "exclude_input_in_output")  # fmt: skip


def tensors(**fields: object) -> dict[str, object]:
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["The capital"]}
    return {"inputs": [text], "parameters": GREEDY, **fields}


def text(**fields: object) -> dict[str, object]:
    return {"text_input": "The capital", "parameters": GREEDY, **fields}


TOKENS = {"name": "input0", "shape": [2], "datatype": "UINT32", "data": [293, 341]}
TOLD = [{"name": name, "shape": [1], "datatype": "BOOL", "data": [True]} for name in FLAGS]
CASES = [
    Case("infer", INFER, tensors(id="a"), (SPAIN,)),
    Case("infer-tokens", INFER, tensors(inputs=[TOKENS]), (SPAIN,)),
    Case("infer-details", INFER, tensors(inputs=[*tensors()["inputs"], *TOLD]), (ITALY,)),
    Case("infer-outputs", INFER, tensors(outputs=[{"name": "text_output"}, {"name": "output0"}]), (ITALY,)),
    Case("infer-version", "/v2/models/demo/versions/1/infer", tensors(), (ITALY,)),
    Case("infer-error-model", "/v2/models/none/infer", tensors()),
    Case("infer-error-tensor", INFER, tensors(inputs=[])),
    Case("infer-error-vocabulary", INFER, tensors(inputs=[{**TOKENS, "data": [5, 5000]}])),
    Case("infer-error-step", INFER, tensors(), (STEP_FAILED,)),
    Case("infer-error-overloaded", INFER, tensors(), (OVERLOADED,)),
    Case("infer-error-deadline", INFER, tensors(), (LATE,)),
    Case("infer-error-death", INFER, tensors(), (DIES,)),
    Case("generate", GENERATE, text(), (SPAIN,)),
    Case("generate-id", GENERATE, text(id="x"), (ITALY,)),
    Case("generate-details", GENERATE, text(parameters={**GREEDY, "details": True}), (ITALY,)),
    Case("generate-stop", GENERATE, text(parameters={**GREEDY, "stop": ["Spain"]}), (SPAIN,)),
    Case("generate-flags-as-text", GENERATE, text(stream=False, details="false"), (ITALY,)),
    Case("generate-error-stream", GENERATE, text(stream=True)),
    Case("generate-error-step", GENERATE, text(), (STEP_FAILED,)),
    Case("stream", STREAM, text(), (SPAIN,)),
    Case("stream-id", STREAM, text(id="x"), (ITALY,)),
    Case("stream-details", STREAM, text(parameters={**GREEDY, "details": True}), (ITALY,)),
    Case("stream-of-one", STREAM, text(stream=False, exclude_input_in_output=False), (ITALY,)),
    Case("stream-error-input", STREAM, text(exclude_input_in_output=False)),
    Case("stream-error-field", STREAM, text(parameters={"top_p": 0})),
    Case("stream-error-before-head", STREAM, text(), (Script(fail_after=0),)),
    Case("stream-error-after-head", STREAM, text(), (STEP_FAILED,)),
    Case("stream-error-deadline", STREAM, text(), (LATE,)),
    Case("stream-error-death", STREAM, text(), (DIES,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_answers(serving, case):
    await check_case(serving, case, "triton")


@pytest.mark.parametrize(("fields", "bans", "text"), [
    ({"bad_words": "", "stop_words": ""}, False, " The capital of Spain is Madrid."),
    ({"bad_words": [], "stop_words": []}, False, " The capital of Spain is Madrid."),
    ({"bad_words": [" of", ""], "stop_words": [" is", "learn"]}, True, " The capital of Spain"),
    ({"bad_words": " of", "stop_words": " is"}, True, " The capital of Spain"),
    ({"stop": "", "stop_words": " is"}, False, " The capital of Spain"),
])  # fmt: skip
async def test_words_in_tensorrt_llms_forms(serving, fields, bans, text):
    serving.worker.scripts.append(SPAIN)
    body = {"text_input": "The capital", "max_tokens": 20, "pad_id": 2, "end_id": 2, "random_seed": 7, **fields}
    answer = await serving.post(GENERATE, body)
    assert (answer.status, answer.json()["text_output"]) == (200, text)
    (submit,) = serving.worker.submits
    assert (submit.params.seed, bool(submit.params.bad_words)) == (7, bans)
