"""What each dialect answers to each way in which an engine ends a request."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from tests.unit.scripts import Script, ids

TRITON = {"text_input": "The capital", "parameters": {"max_tokens": 5}}
DIALECTS = {
    "openai": ("front", "/v1/completions", {"model": "demo", "prompt": "The capital"}),
    "chat": ("front", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "responses": ("front", "/v1/responses", {"input": "Hello"}),
    "vllm": ("front", "/generate", {"prompt": "The capital"}),
    "tgi": ("front", "/generate", {"inputs": "The capital"}),
    "triton": ("front", "/v2/models/demo/generate", TRITON),
    "mindie": ("mindie", "/infer", {"inputs": "The capital"}),
}
STATUSES = {
    FailureCode.OVERLOADED: {"tgi": 429, "": 503},
    FailureCode.DRAINING: {"tgi": 429, "": 503},
    FailureCode.TOO_LATE: {"tgi": 429, "": 503},
    FailureCode.OVER_SHARE: {"": 429},
    FailureCode.GRAMMAR: {"tgi": 422, "mindie": 422, "": 400},
}


FACTS = {"reason": "too large", "tokens": 9, "limit": 8, "highest": 7, "adapter": "not_loaded"}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("code", list(FailureCode), ids=str)
async def test_statuses(serving, dialect, code):
    plane, path, body = DIALECTS[dialect]
    serving.worker.default = Script(fail_after=0, failure=Failure(code, FACTS))
    answer = await serving.post(path, body, plane=plane)
    expected = STATUSES.get(code, {"tgi": 424, "": 500})
    assert answer.status == expected.get(dialect, expected[""])
    assert "error" in answer.json()
    assert serving.services.admission.in_flight == 0


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_deadlines(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    serving.worker.default = Script(tokens=ids(" of"), finish=FinishReason.TIMEOUT)
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == {"tgi": 424, "triton": 503, "mindie": 500}.get(dialect, 504)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_abort_that_nobody_asked_for_is_a_failure(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    serving.worker.default = Script(tokens=ids(" of"), finish=FinishReason.ABORT)
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == {"tgi": 424}.get(dialect, 500)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_nobody_foresaw_is_told_without_details(serving, dialect, monkeypatch):
    plane, path, body = DIALECTS[dialect]

    def broken(*_: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(serving.router, "resolve", broken)
    monkeypatch.setattr(type(serving.mindie), "capacity", broken)
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == 500
    assert "secret" not in answer.text
    assert serving.services.admission.in_flight == 0
