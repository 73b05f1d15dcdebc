"""The OpenAPI documents: every operation says what it answers, and what is answered is as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference.dialects.openai import dialect as openai
from inference.dialects.triton import routes as triton
from inference.dialects.vllm import dialect as vllm
from inference.http.routing import Empty, Never
from tests.unit.dialects.test_openai_documentation import check

GOLDENS = Path(__file__).parents[1] / "goldens"
ROUTES = [*vllm.ROUTES, *openai.ROUTES, *triton.FRONT.routes]
MODEL = "/v2/models/{model:path}"
RECORDED = [
    ("vllm", "generate", "/generate"), ("vllm", "tokenize", "/tokenize"),
    ("vllm", "detokenize", "/detokenize"), ("triton", "generate", f"{MODEL}/generate"), ("triton", "infer", f"{MODEL}/infer"),
    ("triton", "stream", f"{MODEL}/generate_stream"), ("openai", "responses", "/v1/responses"),
    ("openai", "pooling", "/pooling"), ("queries", "vllm-load", "/load"), ("queries", "vllm-version", "/version"),
    ("queries", "triton-config", f"{MODEL}/config"), ("queries", "embedding-v2-models-demo-config", f"{MODEL}/config"),
    ("queries", "triton-model", MODEL), ("queries", "triton-live", "/v2/health/live"),
    ("queries", "triton-ready", "/v2/health/ready"), ("queries", "triton-model-ready", f"{MODEL}/ready"),
    ("queries", "triton-server", "/v2"), ("queries", "triton-logging", "/v2/logging"),
    ("queries", "triton-trace", "/v2/trace/setting"),
]  # fmt: skip
"""A folder of recorded answers, how a name of them begins, and their route. The longest beginning counts."""


def recorded() -> list[tuple[str, str, dict[str, Any], bool]]:
    """(name, route, body, whether it is a frame) of each answer with status 200."""
    found = []
    for folder, name, path in RECORDED:
        for file in sorted((GOLDENS / folder).glob(f"{name}*.txt")):
            text = file.read_text()
            longer = [each for other, each, _ in RECORDED if other == folder and len(each) > len(name)]
            if not text.startswith("200") or any(file.stem.startswith(each) for each in longer):
                continue
            for line in re.sub(r":<time>", ":0", text).replace("\0", "\n").splitlines():
                body = line.removeprefix("data: ")
                if body.startswith("{") and '"error":{' not in body and '"error":"' not in body:
                    frame = "text/event-stream" in text and path not in ("/generate",)
                    found.append((f"{file.stem}-{len(found)}", path, json.loads(body), frame))
    return found


ANSWERS = recorded()


@pytest.mark.parametrize(("name", "path", "body", "frame"), ANSWERS, ids=[name for name, *_ in ANSWERS])
def test_answers_are_as_described(name, path, body, frame):
    told = next(route.described for route in ROUTES if route.path == path)
    schema = told.frames if frame else told.answer
    check(body, msgspec.convert(body, schema))


def test_all_of_these_routes_have_recorded_answers():
    assert {path for _, path, _, _ in ANSWERS} == {path for _, _, path in RECORDED}


@pytest.mark.parametrize(("method", "path", "body"), [
    ("GET", "/v2/models/stats", None), ("GET", "/v2/models/demo/stats", None), ("POST", "/v2/repository/index", {}),
    ("GET", "/v2/systemsharedmemory/status", None), ("GET", "/tokenizer_info", None),
    ("POST", "/v1/chat/completions/render", {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}),
    ("POST", "/v1/completions/render", {"model": "demo", "prompt": ["a", "b"]}),
    ("POST", "/v1/chat/completions/batch", {"model": "demo", "messages": [[{"role": "user", "content": "Hi"}]] * 2}),
])  # fmt: skip
async def test_other_answers_are_as_described(serving, method, path, body):
    answer = await (serving.get(path) if method == "GET" else serving.post(path, body))
    assert answer.status == 200, answer.text
    plain = path.replace("/demo", "/{model}")
    schema = next(r.described.answer for r in ROUTES if (r.method, r.plain_path) == (method, plain))
    check(answer.json(), msgspec.convert(answer.json(), schema))


async def test_every_operation_says_what_it_answers(serving):
    document = (await serving.get("/openapi.json")).json()
    empty = {(r.method.lower(), r.plain_path) for r in ROUTES if r.described.answer is Empty}
    never = {(r.method.lower(), r.plain_path) for r in ROUTES if r.described.answer is Never}
    empty |= {("get", "/"), ("get", "/health"), ("get", "/ping")}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert ("200" in answers) is ((method, path) not in never), path
            assert bool(answers.get("200", {}).get("content")) is ((method, path) not in empty | never), path


async def test_the_routers_document_is_the_routers(serving):
    document = (await serving.get("/api-doc/openapi.json")).json()
    assert document["info"]["title"] == "Text Generation Inference"
    assert document["info"]["license"] == {
        "name": "Apache 2.0",
        "url": "https://www.apache.org/licenses/LICENSE-2.0",
    }
    assert document["tags"] == [
        {"name": "Text Generation Inference", "description": "Hugging Face Text Generation Inference API"}
    ]
    assert {tag for methods in document["paths"].values() for each in methods.values() for tag in each["tags"]} == {
        "Text Generation Inference"
    }
    assert {"/generate", "/v1/chat/completions", "/v1/models", "/metrics"} <= set(document["paths"])
    assert not [path for path in document["paths"] if path.startswith("/v2")]
    assert document["paths"]["/generate"]["post"]["responses"]["200"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/GenerateResponse"}}
    }
    whole = (await serving.get("/openapi.json")).json()
    assert whole["info"]["title"] == "Dragoman"
    assert [name for name in whole["components"]["schemas"] if "." in name] == []
