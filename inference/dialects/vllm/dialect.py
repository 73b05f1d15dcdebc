"""The declaration of vLLM's own routes, besides OpenAI's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inference.dialects.vllm import answers, generate, lora, tokenization
from inference.dialects.vllm import status as operations
from inference.dialects.vllm.generate import DemoRequest
from inference.dialects.vllm.lora import LoadRequest, UnloadRequest
from inference.dialects.vllm.tokenization import DetokenizeRequest, TokenizeRequest
from inference.http.routing import Described, Empty, Never, Route, RouteSet
from inference.planes.declaration import Dialect
from inference.vendors.openai_errors import STATUSES, render

TEXT = Described(answer=str, kind="text/plain")
ROUTES = (
    Route(
        "POST", "/generate", generate.generate, render, "Complete a prompt, as vLLM's demo server did",
        body=DemoRequest, keys=("prompt",), described=Described(answer=answers.DemoResponse),
    ),
    Route(
        "POST", "/tokenize", tokenization.tokenize, render, "Tokenize a prompt or a conversation",
        body=TokenizeRequest, keys=("prompt", "messages"), described=Described(answer=answers.TokenizeResponse),
    ),
    Route(
        "POST", "/detokenize", tokenization.detokenize, render, "Turn tokens into text", body=DetokenizeRequest,
        needs_permit=True, described=Described(answer=answers.DetokenizeResponse),
    ),
    Route(
        "GET", "/tokenizer_info", tokenization.tokenizer_info, render, "Get the tokenizer's configuration",
        described=Described(answer=dict[str, Any]),
    ),
    Route(
        "GET", "/version", operations.version, render, "Get the server's version", scope=None,
        described=Described(answer=answers.VersionResponse),
    ),
    Route(
        "GET", "/load", operations.load, render, "Count the running requests", scope="metrics",
        described=Described(answer=answers.LoadResponse),
    ),
    Route(
        "POST", "/ping", operations.ping, render, "Check whether requests can be served", scope=None,
        described=Described(answer=Empty),
    ),
    Route(
        "POST", "/v1/load_lora_adapter", lora.load, render, "Load an adapter", scope="manage", body=LoadRequest,
        described=TEXT,
    ),
    Route(
        "POST", "/v1/unload_lora_adapter", lora.unload, render, "Unload an adapter", scope="manage",
        body=UnloadRequest, described=TEXT,
    ),
    *(
        Route(method, path, operations.refuse, render, "Refuse the request (not served)", described=Described(answer=Never))
        for method, paths in operations.REFUSED.items()
        for path in paths
    ),
)  # fmt: skip

DIALECT = Dialect(
    "vllm", "vLLM", front=RouteSet(tuple(replace(route, trailing_slash=True) for route in ROUTES), render, STATUSES)
)
