"""Of two rules that a request breaks, the one that is checked first is told: key, rate, content, model, room."""

from __future__ import annotations

import pytest

from engine.failures import Failure, FailureCode
from inference.admission.rates import RateMeter
from management.snapshot import ApiKeyEntry, KeyLimits, hash_key
from tests.unit.scripts import Script

CHAT = [{"role": "user", "content": "Hello"}]
DIALECTS = {
    # plane, path for a model, good body, what is wrong with a field; the statuses of both errors
    "openai": ("front", "/v1/completions", {"prompt": "The capital"}, {"temperature": 99}, 400, 404),
    "chat": ("front", "/v1/chat/completions", {"messages": CHAT}, {"temperature": 99}, 400, 404),
    "responses": ("front", "/v1/responses", {"input": "Hello"}, {"temperature": 99}, 400, 404),
    "embeddings": ("front", "/v1/embeddings", {"input": "Hello"}, {"encoding_format": "morse"}, 400, 404),
    "tgi": ("front", "/generate", {"inputs": "The capital"}, {"parameters": {"top_p": 9}}, 422, None),
    "vllm": ("front", "/generate", {"prompt": "The capital"}, {"temperature": 99}, 400, None),
    "triton": ("front", "/v2/models/{model}/generate", {"text_input": "The capital"}, {"temperature": 99}, 400, 404),
    "mindie": ("mindie", "/v1/completions", {"prompt": "The capital"}, {"top_p": 9}, 422, 422),
}
FULL = {"tgi": 429}


def parts(dialect: str, model: str = "demo", wrong: bool = False):
    plane, path, body, change, *_ = DIALECTS[dialect]
    named = {"model": model} if DIALECTS[dialect][5] is not None and "{" not in path else {}
    return plane, path.format(model=model), {**body, **named, **(change if wrong else {})}


@pytest.fixture
async def full(start):
    """A server that has room for nobody, and three keys: one without limits, one that is used up, one without the scope."""
    serving = await start(api_key_required=True, rates=RateMeter())
    limits = {"good": KeyLimits(), "spent": KeyLimits(requests_per_minute=1), "other": KeyLimits(requests_per_minute=1)}
    serving.keys = {
        name: ApiKeyEntry(
            name, name, hash_key(f"{name}.s"), frozenset({"metrics" if name == "other" else "infer"}), None, limits=each
        )
        for name, each in limits.items()
    }
    serving.publish()
    for name in ("spent", "other"):
        serving.services.rates.admit(serving.keys[name])
    serving.worker.default = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
    return serving


async def ask(serving, key, plane, path, body):
    return (await serving.post(path, body, plane=plane, authorization=f"Bearer {key}.s")).status


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_key_comes_before_everything(full, dialect):
    plane, path, body = parts(dialect, wrong=True)
    assert await ask(full, "nobody", plane, path, body) == 401
    assert await ask(full, "other", plane, path, body) == 403  # and it is used up


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_rate_comes_before_the_content(full, dialect):
    assert await ask(full, "spent", *parts(dialect, wrong=True)) == 429
    plane, path, _ = parts(dialect)
    assert await ask(full, "spent", plane, path, b"{") == 429


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_rate_comes_before_the_model(full, dialect):
    assert await ask(full, "spent", *parts(dialect, "nobody")) == 429


@pytest.mark.parametrize("dialect", [name for name, told in DIALECTS.items() if told[5] not in (None, 422)])
async def test_the_content_comes_before_the_model(full, dialect):
    """But not in Triton's dialect, as in Triton: there the model is a part of the path."""
    assert await ask(full, "good", *parts(dialect, "nobody")) == DIALECTS[dialect][5]
    first = DIALECTS[dialect][5 if dialect == "triton" else 4]
    assert await ask(full, "good", *parts(dialect, "nobody", wrong=True)) == first


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_content_and_the_model_come_before_the_room(full, dialect):
    if dialect != "embeddings":  # its model makes no text
        assert await ask(full, "good", *parts(dialect)) == FULL.get(dialect, 503)
        assert len(full.worker.submits) == 1
    assert await ask(full, "good", *parts(dialect, wrong=True)) == DIALECTS[dialect][4]
    if DIALECTS[dialect][5] is not None:
        assert await ask(full, "good", *parts(dialect, "nobody")) == DIALECTS[dialect][5]


@pytest.mark.parametrize(("path", "body"), [
    ("/v2/models/none/generate", {}),
    ("/v2/models/none/generate_stream", {}),
    ("/v2/models/none/infer", {"inputs": []}),
    ("/v2/models/demo/versions/9/infer", {"inputs": []}),
])  # fmt: skip
async def test_tritons_model_comes_before_the_body(serving, path, body):
    assert (await serving.post(path, body)).status == 404


async def test_a_length_of_many_digits_is_refused(serving):
    answer = await serving.post("/v2/models/demo/infer", {"inputs": []}, inference_header_content_length="9" * 5000)
    assert (answer.status, "inference-header-content-length" in answer.text) == (400, True)
