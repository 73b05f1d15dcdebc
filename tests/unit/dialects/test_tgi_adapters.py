"""TGI's `adapter_id` that names another served model: its limits count, and the default deployment has no part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.unit.fake_worker import FakeWorker
from tests.unit.scripts import EMBEDDING, model_info
from tests.unit.serving import Serving

LONG = "The capital " * 40


@pytest_asyncio.fixture(params=["short", "embeddings", "coming"])
async def pair(request: pytest.FixtureRequest, sockets: Path) -> AsyncIterator[Serving]:
    """A default deployment with a short context, for embeddings, or without a worker; and one named "other"."""
    info = {"short": model_info(max_model_len=16), "embeddings": EMBEDDING, "coming": model_info()}[request.param]
    other = FakeWorker(sockets / "1.sock", "other/0", info=model_info())
    first = [] if request.param == "coming" else [FakeWorker(sockets / "0.sock", "demo/0", info=info)]
    serving = Serving([*first, other])
    for worker in serving.workers:
        await worker.start()
    serving.publish(first)
    (demo,) = serving.holder.current.deployments
    serving.publish([other])
    (named,) = serving.holder.current.deployments
    named = msgspec.structs.replace(named, name="other", model="other", is_default=False)
    serving.holder.publish(msgspec.structs.replace(serving.holder.current, deployments=(demo, named)))
    serving.router.start()
    await serving.connected(len(serving.workers))
    yield serving
    await serving.stop()


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
async def test_the_named_model_answers(pair, path):
    body = {"inputs": LONG, "parameters": {"adapter_id": "other", "max_new_tokens": 20, "truncate": 100}}
    answer = await pair.post(path, body)
    assert answer.status == 200, answer.text
    assert "error" not in answer.text
    (submit,) = pair.workers[-1].submits
    assert len(submit.prompt_token_ids) > 16
    assert submit.params.max_tokens == 20
