"""TGI's part of the documentation: the router's operations, tag and schemas, and that the answers are what they say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inference.dialects.tgi import answers
from inference.dialects.tgi.dialect import ROUTES
from tests.unit.scripts import EMBEDDING, says

OPERATIONS = {
    ("post", "/"): "compat_generate",
    ("post", "/generate"): "generate",
    ("post", "/generate_stream"): "generate_stream",
    ("post", "/tokenize"): "tokenize",
    ("post", "/chat_tokenize"): "get_chat_tokenize",
    ("post", "/invocations"): "sagemaker_compatibility",
    ("get", "/info"): "get_model_info",
    ("get", "/health"): "health",
}
FULL = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "do_sample": True, "best_of": 2}
ASK = {"inputs": "The capital", "parameters": {"max_new_tokens": 4}}


async def test_the_routers_operations(serving):
    document = (await serving.get("/api-doc/openapi.json")).json()
    for (method, path), name in OPERATIONS.items():
        operation = document["paths"][path][method]
        assert operation["operationId"] == name
        assert "Text Generation Inference" in operation["tags"]
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    whole = document["paths"]["/"]["post"]["responses"]
    assert whole["200"]["content"] == {
        "application/json": {"schema": {"type": "array", "items": {"$ref": "#/components/schemas/GenerateResponse"}}},
        "text/event-stream": {"schema": {"$ref": "#/components/schemas/StreamResponse"}},
    }
    assert whole["422"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}
    schemas = document["components"]["schemas"]
    assert {"Details", "BestOfSequence", "PrefillToken", "StreamDetails", "Token", "Info", "SimpleToken"} <= set(
        schemas
    )
    assert schemas["Details"]["properties"]["finish_reason"] == {"$ref": "#/components/schemas/FinishReason"}
    assert schemas["FinishReason"]["enum"] == ["eos_token", "length", "stop_sequence"]


def described(method: str, path: str) -> Any:
    return next(r.described for r in ROUTES if (r.method, r.path) == (method, path))


def check(value: Any, schema: Any) -> None:
    """The value has the schema's fields, and no others."""
    converted = msgspec.convert(value, schema)
    known = msgspec.to_builtins(converted)
    assert keys_of(value) <= keys_of(known) | OPTIONAL, keys_of(value) - keys_of(known)


OPTIONAL = {"seed", "details", "generated_text", "best_of_sequences"}
"""Left out by `to_builtins` where they are null."""


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(("path", "body"), [
    ("/", ASK),
    ("/generate", {"inputs": "The capital", "parameters": FULL}),
    ("/tokenize", {"inputs": "The capital"}),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/vertex", {"instances": [ASK]}),
    ("/invocations", ASK),
])  # fmt: skip
async def test_answers_are_as_described(serving, path, body):
    serving.worker.default = says(" Rome.")
    answer = await serving.post(path, body)
    assert answer.status == 200, answer.text
    check(answer.json(), described("POST", path).answer)


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
async def test_frames_are_as_described(serving, path):
    serving.worker.default = says(" Rome.")
    body = {"inputs": "a", "parameters": {"details": True, "top_n_tokens": 2}, "stream": True}
    events = (await serving.post(path, body)).events
    assert len(events) == 3
    for event in events:
        check(event, described("POST", path).frames)


async def test_info_and_errors_are_as_described(serving):
    check((await serving.get("/info")).json(), described("GET", "/info").answer)
    check((await serving.post("/generate", {"inputs": ""})).json(), answers.ErrorResponse)


async def test_vectors_are_as_described(start):
    answer = await (await start(info=EMBEDDING)).post("/embed", {"inputs": ["The capital"]})
    msgspec.convert(answer.json(), described("POST", "/embed").answer)
