"""TGI's routes while the model that a request names starts for the first time."""

from __future__ import annotations

import pytest

from tests.unit.second_model import Second
from tests.waiting import eventually

BODY = {"inputs": "The capital", "parameters": {"max_new_tokens": 2, "adapter_id": "second"}}


@pytest.mark.parametrize(("path", "more"), [("/generate", {}), ("/generate_stream", {}), ("/", {"stream": True})])
async def test_a_request_waits_for_the_first_worker(serving, sockets, path, more):
    second = Second(serving, sockets)
    second.publish()
    try:
        call = serving.begin(path, {**BODY, **more})
        await eventually(lambda: serving.router.holding.deployments or call.task.done())
        assert not call.task.done(), call.answer
        await second.start()
        answer = await call.end()
        assert answer.status == 200
        assert "generated_text" in answer.text
        assert "error" not in answer.text
    finally:
        await second.close()
