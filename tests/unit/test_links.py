"""Each deployment's own address: its routes, its key, and nothing of the others."""

from __future__ import annotations

import msgspec
import pytest

from management.snapshot import ApiKeyEntry, Snapshot, hash_key
from tests.unit.serving import Serving

BODY = {"prompt": [5, 6], "max_tokens": 2}
LINK = "/deployments/abc1/inference"


def endpoint_key(text: str, deployment: str) -> dict[str, ApiKeyEntry]:
    prefix = text.partition(".")[0]
    return {prefix: ApiKeyEntry(prefix, "endpoint", hash_key(text), frozenset({"infer"}), None, deployment)}


def publish(serving: Serving, keys=None, stopped=()):
    """The deployment of the fake workers, known as abc1."""
    serving.publish()
    (entry,) = serving.holder.current.deployments
    entry = msgspec.structs.replace(entry, public_id="abc1", title="my model")
    serving.holder.publish(Snapshot((entry,), keys or {}, frozenset(stopped)))


async def status(serving: Serving, path: str, body=BODY, *, plane="links", method="POST", **headers) -> int:
    return (await serving.begin(path, body, plane=plane, method=method, **headers).end()).status


@pytest.mark.parametrize("model", [None, "demo", "my model"])
async def test_it_works_whatever_the_deployment_is_called(start, model):
    serving = await start()
    publish(serving)
    body = BODY if model is None else {**BODY, "model": model}
    assert await status(serving, f"{LINK}/v1/completions", body) == 200
    assert await status(serving, f"{LINK}/v1/models", None, method="GET") == 200
    assert await status(serving, f"{LINK}/health", None, method="GET") == 200


async def test_another_deployment_is_not_found_below_it(start):
    serving = await start()
    publish(serving)
    assert await status(serving, f"{LINK}/v1/completions", {**BODY, "model": "other"}) == 404


@pytest.mark.parametrize(
    "path",
    ["/deployments/abc2/inference/v1/completions", "/deployments/abc1/v1/completions", "/deployments/", f"{LINK}/nonsense",
     "/deployments/../abc1/inference/v1/completions", f"{LINK}/v1/load_lora_adapter"],
)  # fmt: skip
async def test_nothing_else_is_there(start, path):
    serving = await start()
    publish(serving)
    assert await status(serving, path) == 404


async def test_metrics_of_all_deployments_are_not_below_one(start):
    serving = await start()
    publish(serving)
    assert await status(serving, f"{LINK}/metrics", None, method="GET") == 404


async def test_the_link_of_a_deployment_with_a_key_is_never_open_without_it(start):
    serving = await start()
    key = "prefix12.secret"
    publish(serving, endpoint_key(key, "abc1"))
    path = f"{LINK}/v1/completions"
    assert await status(serving, path) == 401
    assert await status(serving, path, authorization="Bearer nonsense") == 401
    assert await status(serving, path, authorization=f"Bearer {key}") == 200
    assert (
        await status(serving, "/v1/completions", plane="front") == 200
    )  # as every deployment where no keys are required


async def test_its_key_opens_nothing_of_others(start):
    serving = await start(api_key_required=True)
    key = "prefix12.secret"
    publish(serving, endpoint_key(key, "abc1"))
    assert await status(serving, f"{LINK}/v1/completions", authorization=f"Bearer {key}") == 200
    assert await status(serving, "/v1/completions", plane="front", authorization=f"Bearer {key}") == 200
    assert await status(serving, "/metrics", None, plane="front", method="GET", authorization=f"Bearer {key}") == 403
    publish(serving, endpoint_key(key, "abc2"))
    assert await status(serving, f"{LINK}/v1/completions", authorization=f"Bearer {key}") == 401


async def test_a_stopped_deployment_is_unavailable_not_unknown(start):
    serving = await start()
    publish(serving, stopped=["abc3"])
    assert await status(serving, "/deployments/abc3/inference/v1/completions") == 503
