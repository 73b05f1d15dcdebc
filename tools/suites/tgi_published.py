"""Holds what Text Generation Inference publishes against a running server: its API document and its dashboard.

    python -m tools.suites.tgi_published CHECKOUT URL

`tools.suites.tgi` runs it after the tests, when every metric has been counted; it needs `jsonschema`. From the vendor's `docs/openapi.json` come
the operations (their ids and tag), the fields of their schemas, and the form of real answers; from
`assets/tgi_grafana.json` the metrics that its panels read. Only the router's own routes are held against the document:
`/v1` is vLLM's here. Nothing of the vendor's is kept.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

if TYPE_CHECKING:
    from collections.abc import Iterator

VLLMS = {"ChatRequest", "SagemakerRequest", "SagemakerResponse", "SagemakerStreamResponse"}
"""Schemas of chats and completions, which are vLLM's here."""
TAG = "Text Generation Inference"
ASK = {"inputs": "Question: What is the capital of Spain?\nAnswer:", "parameters": {"max_new_tokens": 4}}
DETAILS = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "max_new_tokens": 4}
FULL = {**ASK, "parameters": {**DETAILS, "do_sample": True, "best_of": 2}}
FRAMES = {**ASK, "parameters": {"details": True, "top_n_tokens": 2, "max_new_tokens": 4}}
WRONG = {**ASK, "parameters": {"temperature": 0}}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
CALLS: tuple[tuple[str, str, Any, int], ...] = (
    ("get", "/health", None, 200),
    ("get", "/info", None, 200),
    ("get", "/metrics", None, 200),
    *(("post", path, body, 200) for path in ("/", "/generate", "/invocations") for body in (ASK, FULL)),
    *(("post", path, WRONG, 422) for path in ("/", "/generate", "/generate_stream", "/invocations")),
    *(("post", "/generate_stream", body, 200) for body in (ASK, FRAMES)),
    *(("post", path, {**FRAMES, "stream": True}, 200) for path in ("/", "/invocations")),
    ("post", "/tokenize", ASK, 200),
    ("post", "/chat_tokenize", CHAT, 200),
)
"""Method, path, body, and the status that the document describes."""


class Published:
    """The document, the dashboard, and the server."""

    def __init__(self, checkout: Path, url: str) -> None:
        self.document = json.loads((checkout / "docs" / "openapi.json").read_text())
        self.dashboard = json.loads((checkout / "assets" / "tgi_grafana.json").read_text())
        self.url = url

    def cases(self) -> Iterator[tuple[str, str, str]]:
        """Part, case, and what is wrong with it ("": nothing)."""
        ours = json.loads(self.ask("get", "/api-doc/openapi.json", None)[2])
        native = {path: methods for path, methods in self.document["paths"].items() if not path.startswith("/v1")}
        for path, methods in native.items():
            for method, operation in methods.items():
                described = ours["paths"].get(path, {}).get(method)
                yield "operations", f"{method} {path}", self.operation(operation, described)
        for name in sorted(self.reachable(native)):
            yield "schemas", name, self.fields(name, ours["components"]["schemas"])
        for method, path, body, status in CALLS:
            yield "answers", f"{method} {path} {json.dumps(body)[:60]}", self.answer(method, path, body, status)
        metrics = self.ask("get", "/metrics", None)[2].decode()
        present = {line.partition(" ")[0].partition("{")[0] for line in metrics.splitlines() if line[:1] != "#"}
        for expression in sorted(set(expressions(self.dashboard))):
            missing = set(re.findall(r"\btgi_\w+", expression)) - present
            missing |= {label for label in re.findall(r'method="\w+"', expression) if label not in metrics}
            yield "dashboard", expression[:70], f"missing: {sorted(missing)}" if missing else ""

    def operation(self, theirs: dict[str, Any], ours: dict[str, Any] | None) -> str:
        """The id, the tag, and a description of every status and content type."""
        if ours is None:
            return "not described"
        wrong = [] if ours["operationId"] == theirs["operationId"] else [f"operationId {ours['operationId']}"]
        wrong += [] if TAG in ours["tags"] else [f"tags {ours['tags']}"]
        for status, response in theirs["responses"].items():
            described = ours["responses"].get(status)
            if described is None:
                wrong.append(f"status {status} is not described")
            else:
                kinds = set(response.get("content", {})) - set(described.get("content", {}))
                wrong += [f"status {status} has no {kind}" for kind in sorted(kinds)]
        if ("requestBody" in theirs) != ("requestBody" in ours):
            wrong.append("requestBody")
        return "; ".join(wrong)

    def reachable(self, paths: dict[str, Any]) -> set[str]:
        """The names of all schemas that these paths refer to, through others too."""
        found: set[str] = set()
        waiting = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(paths)))
        while waiting:
            name = waiting.pop()
            if name in VLLMS:
                continue
            found.add(name)
            inner = json.dumps(self.document["components"]["schemas"][name])
            waiting |= set(re.findall(r"#/components/schemas/(\w+)", inner)) - found
        return found

    def fields(self, name: str, ours: dict[str, Any]) -> str:
        """Whether our schema of this name has the fields of theirs."""
        if name not in ours:
            return "no schema of this name"
        missing = sorted(properties(self.document["components"]["schemas"], name) - properties(ours, name))
        return f"missing: {missing}" if missing else ""

    def answer(self, method: str, path: str, body: Any, status: int) -> str:
        """Whether a real answer is as the document says."""
        given, kind, text = self.ask(method, path, body)
        streamed = kind == "text/event-stream"
        if given != (200 if streamed else status):
            return f"status {given}"
        content = self.document["paths"][path][method]["responses"][str(status)].get("content", {})
        if not content:
            return "" if not text else "a body where none is described"
        if kind not in content:
            return f"content type {kind}"
        lines = [line.removeprefix("data:") for line in text.decode().split("\n\n") if line.startswith("data:")]
        values = (
            [json.loads(line) for line in lines]
            if streamed
            else [json.loads(text) if "json" in kind else text.decode()]
        )
        schema = {
            "$ref": "#/s",
            "s": nullable(content[kind]["schema"]),
            **nullable({"components": self.document["components"]}),
        }
        errors = [error for value in values for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]
        return "; ".join(f"{error.json_path}: {error.message[:80]}" for error in errors[:3])

    def ask(self, method: str, path: str, body: Any) -> tuple[int, str, bytes]:
        """Status, content type, and body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method.upper())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get_content_type(), error.read()


def properties(schemas: dict[str, Any], name: str) -> set[str]:
    """The fields of a schema and of those that it combines."""
    found: set[str] = set()
    waiting = [schemas[name]]
    while waiting:
        schema = waiting.pop()
        found |= set(schema.get("properties", {}))
        waiting += [part for key in ("allOf", "oneOf", "anyOf") for part in schema.get(key, [])]
        if "$ref" in schema:
            waiting.append(schemas[schema["$ref"].rpartition("/")[2]])
    return found


def nullable(schema: Any) -> Any:
    """OpenAPI 3.0's `nullable` and exclusive limits in the words of JSON Schema."""
    if isinstance(schema, list):
        return [nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: nullable(value) for key, value in schema.items() if key not in ("nullable", "example", "format")}
    for limit in ("Minimum", "Maximum"):
        if made.get(f"exclusive{limit}") is True:
            made[f"exclusive{limit}"] = made.pop(limit.lower())
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made


def expressions(value: Any) -> Iterator[str]:
    """Every `expr` of a dashboard."""
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield value["expr"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from expressions(inner)


def check(checkout: Path, url: str) -> int:
    """Print a table, and every case that differs; returns how many do."""
    wrong: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for part, case, problem in Published(checkout, url).cases():
        counts[part] = counts.get(part, 0) + 1
        if problem:
            wrong.setdefault(part, []).append(f"{case}: {problem}")
    print(f"\n{'published':60} cases passed failed")
    for part, count in counts.items():
        failed = wrong.get(part, [])
        print(f"{part:60} {count:5} {count - len(failed):6} {len(failed):6}", *failed, sep="\n  ", flush=True)
    return sum(map(len, wrong.values()))


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[1]), sys.argv[2]) > 0)
