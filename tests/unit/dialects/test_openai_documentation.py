"""OpenAI's part of the documentation: every recorded answer has the fields of its schema, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference.dialects.openai import answers
from inference.dialects.openai.dialect import ROUTES

GOLDENS = Path(__file__).parents[1] / "goldens" / "openai"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}


def recorded() -> list[tuple[str, str, dict[str, Any]]]:
    """(name, route, body) of each answer or frame with status 200 of these routes."""
    found = []
    for file in sorted(GOLDENS.glob("*.txt")):
        path, text = PATHS.get(file.name.partition("-")[0].removesuffix(".txt")), file.read_text()
        if path is None or not text.startswith("200"):
            continue
        for line in re.sub(r":<time>", ":0", text).splitlines():
            body = line.removeprefix("data: ")
            if body.startswith('{"id"'):
                found.append((f"{file.stem}-{len(found)}", path, json.loads(body)))
    return found


RECORDED = recorded()


def described(path: str) -> Any:
    return next(route.described for route in ROUTES if route.path == path)


def check(value: Any, known: Any) -> None:
    """Every key of the answer is one of its schema's."""
    if isinstance(known, msgspec.Struct):
        names, tag = set(known.__struct_fields__), known.__struct_config__.tag_field
        assert set(value) <= names | {tag}, (set(value), known)
        for name in names & set(value):
            check(value[name], getattr(known, name))
    elif isinstance(known, list):
        for each, one in zip(value, known, strict=True):
            check(each, one)


@pytest.mark.parametrize(("name", "path", "body"), RECORDED, ids=[name for name, *_ in RECORDED])
def test_answers_are_as_described(name, path, body):
    told = described(path)
    frame = body["object"].endswith("chunk") or (path == PATHS["completions"] and "-stream" in name)
    schema = told.frames if frame else told.answer
    check(body, msgspec.convert(body, schema))


def test_there_are_enough_of_them():
    assert {path for _, path, _ in RECORDED} == set(PATHS.values())
    assert len(RECORDED) > 100


async def test_models_are_as_described(serving):
    found = (await serving.get("/v1/models")).json()
    check(found, msgspec.convert(found, answers.ModelsInfo))
    one = (await serving.get("/v1/models/demo")).json()
    check(one, msgspec.convert(one, answers.ModelInfo))


async def test_the_document_has_them(serving):
    document = (await serving.get("/api-doc/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["operationId"] == "chat_completions"
    assert chat["responses"]["200"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/ChatCompletion"}},
        "text/event-stream": {"schema": {"$ref": "#/components/schemas/ChatCompletionChunk"}},
    }
