"""Whatever is sent, no route of any plane fails: an answer in the dialect's own shape, and an engine that goes on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import calls

HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"1e999",
    "NaN": b'{"inputs": NaN, "prompt": NaN, "text_input": NaN, "temperature": NaN}',
    "infinity": b'{"prompt": "a", "inputs": "a", "temperature": 1e999, "parameters": {"temperature": 1e999}}',
    "deep": b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "deep in a field": b'{"messages":' + b"[" * 300 + b"]" * 300 + b',"prompt":' + b"[" * 300 + b"]" * 300 + b"}",
    "invalid UTF-8": b'{"prompt": "\xff\xfe", "inputs": "\xff"}',
    "lone surrogate": b'{"prompt": "\\ud800", "inputs": "\\ud800", "text_input": "\\udfff", "model": "demo", '
    b'"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}',
    "NUL": b'{"prompt": "a\\u0000b", "inputs": "a\\u0000b", "text_input": "\\u0000", "model": "\\u0000"}',
    "huge numbers": b'{"prompt": "a", "inputs": "a", "text_input": "a", "n": 1' + b"0" * 400 + b', "parameters": '
    b'{"seed": 1' + b"0" * 400 + b', "max_new_tokens": 1' + b"0" * 30 + b'}, "max_tokens": 1' + b"0" * 30 + b"}",
    "huge n": b'{"model": "demo", "prompt": "a", "n": 1000000, "best_of": 1000000, "temperature": 1, '
    b'"messages": [{"role": "user", "content": "a"}]}',
    "out of vocabulary": b'{"model": "demo", "prompt": [4000000000], "input_id": [4000000000], "tokens": [4000000000]}',
    "long key": b'{"' + b"k" * 100_000 + b'": 1, "prompt": "a", "max_tokens": 1, "model": "demo"}',
    "twice": b'{"prompt": "a", "prompt": 5, "inputs": "a", "inputs": 5, "model": "demo"}',
}
WRONG = [None, True, 0, -1, 1.5, "", "x", [], [None], {}, {"a": 1}, [[]], "\u0000", 2**70]
FRONT = [
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize", "/generate",
    "/generate_stream", "/", "/invocations", "/chat_tokenize", "/vertex", "/v2/models/demo/infer",
    "/v2/models/demo/generate", "/v2/models/demo/generate_stream", "/v2/repository/index", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/v2/repository/models/none/load",
]  # fmt: skip
SERVICE = ["/", "/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/infer", "/infer_token",
           "/v2/models/demo/infer", "/v2/models/demo/generate", "/v2/models/demo/generate_stream",
           "/v2/models/demo/stopInfer", "/v1/tokenizer"]  # fmt: skip
MANAGEMENT = ["/v1/role/prefill", "/v2/role/decode", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
GOOD: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "demo", "prompt": "a", "max_tokens": 1, "temperature": 0.5, "top_p": 0.5, "n": 1, "stop": ["x"],
                        "seed": 1, "logprobs": 1, "stream": False, "best_of": 1, "top_k": 5, "presence_penalty": 0.1,
                        "response_format": {"type": "text"}, "stop_token_ids": [5], "logit_bias": {"5": 1.0}},
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [],
                             "tool_choice": "none", "logprobs": True, "top_logprobs": 1, "chat_template_kwargs": {}},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "text": {"format": {"type": "text"}}, "tools": [],
                      "reasoning": {}, "instructions": "a", "top_logprobs": 1},
    "/tokenize": {"prompt": "a", "add_special_tokens": True, "return_token_strs": True},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 1}, "stream": False},
    "/": {"inputs": "a", "parameters": {"max_new_tokens": 1}, "stream": False},
    "/infer": {"inputs": "a", "parameters": {"max_new_tokens": 1, "temperature": 0.5, "priority": 1}, "stream": False},
    "/v2/models/demo/infer": {"inputs": [{"name": "input0", "shape": [1, 1], "datatype": "UINT32", "data": [5]}],
                              "outputs": [{"name": "output0"}], "parameters": {"max_tokens": 1, "max_new_tokens": 1}, "id": "a"},
    "/v2/models/demo/generate": {"text_input": "a", "parameters": {"max_tokens": 1, "max_new_tokens": 1}, "id": "a",
                                 "stream": False},
}  # fmt: skip


def bases(server):
    return {"front": server.url, "service": server.mindie_url, "management": server.management_url}


ROUTES = [("front", p) for p in FRONT] + [("service", p) for p in SERVICE] + [("management", p) for p in MANAGEMENT]


def check(answer: httpx.Response, plane: str, path: str) -> None:
    """A status that a client's mistake can have, and an error in the dialect's shape."""
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    assert "Traceback" not in answer.text
    assert "/work" not in answer.text
    if answer.status_code == 200 or not answer.content:
        return
    body = answer.json() if not answer.text.startswith("Input invalid") else None
    if body is None:
        return
    if plane != "front":
        assert set(body) == {"error", "error_type"}, body
    elif path.startswith("/v2"):
        assert list(body) == ["error"], body
    elif path.startswith("/v1"):
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
    else:
        assert isinstance(body["error"], dict) or set(body) == {"error", "error_type"}, body


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies(server, name):
    for plane, path in ROUTES:
        check(calls.post(bases(server)[plane] + path, content=HOSTILE[name], timeout=60), plane, path)
    assert server.healthy()


@pytest.mark.parametrize(("plane", "path"), [r for r in ROUTES if r[1] in GOOD])
def test_every_field_of_every_wrong_type(server, plane, path):
    with httpx.Client(base_url=bases(server)[plane], timeout=60) as client:
        for field in GOOD[path]:
            for value in WRONG:
                content = json.dumps({**GOOD[path], field: value})
                check(client.post(path, content=content), plane, path)
    assert server.healthy()


@pytest.mark.parametrize("plane", ["service", "front"])
def test_parameters_at_random(server, plane):
    """Nested parameters of random types; the seed is fixed, so that a failure comes again."""
    chance = random.Random(5)
    names = ["temperature", "top_k", "top_p", "typical_p", "do_sample", "seed", "repetition_penalty", "watermark", "details",
             "max_new_tokens", "stop", "truncate", "priority", "timeout", "batch_size", "best_of", "grammar", "top_n_tokens",
             "return_full_text", "decoder_input_details", "adapter_id", "max_tokens", "lora_name", "sampling_parameters"]  # fmt: skip
    values = [*WRONG, 0.5, 3, ["x"], {"type": "regex", "value": "("}, "(", 1e-300, 1e300, -0.0]
    paths = {"service": ["/generate", "/infer", "/v2/models/demo/generate"],
             "front": ["/generate", "/v2/models/demo/generate", "/v2/models/demo/infer"]}[plane]  # fmt: skip
    with httpx.Client(base_url=bases(server)[plane], timeout=60) as client:
        for _ in range(150):
            parameters = {name: chance.choice(values) for name in chance.sample(names, 3)}
            parameters.setdefault("max_new_tokens", 1)
            path = chance.choice(paths)
            tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
            body = {
                "parameters": parameters,
                "text_input": "a",
                "inputs": [tensor] if path.endswith("infer") and "/v2" in path else "a",
            }
            check(client.post(path, content=json.dumps(body)), plane, path)
    server.wait_idle()


FRAMES = "^/$|^/invocations$|generate_stream$"
REFUSED_BY_THE_VENDOR = f"/unload$|sharedmemory|/trace/setting$|/v2/logging$|{FRAMES}"
"""Unloading would end the test; Triton itself answers the others with 501 and 503 (tests/dialects/triton)."""


def test_generated_bodies_meet_no_failure_and_no_undocumented_answer(server):
    """schemathesis over the front plane's own document. It takes a stream's schema for that of the event around a frame."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    for checked, *chosen in (
        (f"{checks},response_schema_conformance", "--exclude-path-regex", REFUSED_BY_THE_VENDOR),
        (checks, "--include-path-regex", FRAMES),
    ):
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json", "--checks", checked,
            *chosen, "--max-examples", "8", "--phases", "examples,coverage,fuzzing", "--seed", "1", "--no-color",
            "--request-timeout", "60",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    server.wait_idle()
