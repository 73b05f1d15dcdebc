"""Keys: their scopes, and that a polled result belongs to the key that asked for it."""

from __future__ import annotations

import pytest

from management.snapshot import ApiKeyEntry, hash_key
from tests.unit.dialects.djl.models import Djl
from tests.waiting import eventually

ASK = {"inputs": "Hello"}
SCOPES = ("infer", "manage", "metrics")


@pytest.fixture
async def guarded(start):
    """A key for each scope, and a second one for inference."""
    djl = Djl(await start(api_key_required=True))
    for name in (*SCOPES, "infer2"):
        scopes = frozenset({name.rstrip("2")})
        djl.serving.keys[name] = ApiKeyEntry(name, name, hash_key(f"{name}.secret"), scopes, None)
    djl.registry.publish()
    return djl


def bearer(name):
    return {"authorization": f"Bearer {name}.secret"}


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/adapters", "manage"),
        ("POST", "/models/demo/adapters", "manage"),
        ("GET", "/adapters/a", "manage"),
        ("POST", "/adapters/a/update", "manage"),
        ("DELETE", "/models/demo/adapters/a", "manage"),
        ("GET", "/models", "manage"),
        ("POST", "/models", "manage"),
        ("PUT", "/models/none", "manage"),
        ("DELETE", "/models/none", "manage"),
        ("GET", "/workflows", "manage"),
        ("POST", "/server/logging?level=", "manage"),
        ("GET", "/server/metrics", "metrics"),
        ("POST", "/invocations", "infer"),
        ("POST", "/predictions/demo", "infer"),
        ("POST", "/models/demo/invoke", "infer"),
        ("POST", "/v1/chat/completions", "infer"),
    ],
)
async def test_a_key_opens_what_its_scope_says(guarded, method, path, scope):
    answer = await guarded.call(method, path)
    assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
    assert answer.json()["type"] == "UnauthorizedException"
    for given in SCOPES:
        answer = await guarded.call(method, path, **bearer(given))
        assert (answer.status == 403) == (given != scope), answer.text


async def test_a_result_belongs_to_its_key(guarded):
    begun = await guarded.post("/invocations", ASK, x_synchronous="false", **bearer("infer"))
    token = begun.header("x-next-token")
    await eventually(lambda: all(r.ended is not None for r in guarded.state.results._results.values()))
    refused = await guarded.post("/invocations", x_starting_token=token, **bearer("infer2"))
    assert (refused.status, refused.json()["type"]) == (400, "BadRequestException")
    assert (await guarded.post("/invocations", x_starting_token=token, **bearer("infer"))).status == 200
