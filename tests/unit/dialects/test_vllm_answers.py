"""vLLM's own routes: whole answers and streams, byte for byte."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode
from tests.unit.golden import Case, check_case
from tests.unit.scripts import Script, ids, says

PATH = "/generate"
ASK = {"prompt": "The capital", "max_tokens": 20, "temperature": 0}
SAMPLED = {**ASK, "temperature": 1.0, "seed": 7, "n": 2}
SPAIN, ITALY = says(" The capital of Spain is Madrid."), says(" Rome.")
STEP_FAILED = Script(tokens=ids("The capital of Spain"), fail_after=2)
CASES = [
    Case("generate", PATH, ASK, (SPAIN,)),
    Case("generate-n", PATH, SAMPLED, (SPAIN, ITALY)),
    Case("generate-stop", PATH, {**ASK, "stop": ["Spain"]}, (SPAIN,)),
    Case("generate-length", PATH, {**ASK, "max_tokens": 2}, (SPAIN,)),
    Case("generate-stream", PATH, {**ASK, "stream": True}, (SPAIN,)),
    Case("generate-stream-n", PATH, {**SAMPLED, "stream": True}, (SPAIN, ITALY)),
    Case("generate-error-field", PATH, {**ASK, "unknown": 1}),
    Case("generate-error-model", PATH, {**ASK, "model": "none"}),
    Case("generate-error-step", PATH, ASK, (STEP_FAILED,)),
    Case("generate-error-overloaded", PATH, ASK, (Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED)),)),
    Case("generate-stream-error-before-head", PATH, {**ASK, "stream": True}, (Script(fail_after=0),)),
    Case("generate-stream-error-after-head", PATH, {**ASK, "stream": True}, (STEP_FAILED,)),
    Case("tokenize", "/tokenize", {"prompt": "The capital"}),
    Case("tokenize-chat", "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}),
    Case("detokenize", "/detokenize", {"tokens": [293, 341]}),
    Case("load-adapter-error", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_answers(serving, case):
    await check_case(serving, case, "vllm")
