"""The routes of this dialect."""

from __future__ import annotations

from inference.dialects.vllm import generate, lora, tokenization
from inference.dialects.vllm import status as operations
from inference.dialects.vllm.generate import DemoRequest
from inference.dialects.vllm.lora import LoadRequest, UnloadRequest
from inference.dialects.vllm.tokenization import DetokenizeRequest, TokenizeRequest
from inference.http.routing import Dialect, Route
from inference.vendors.openai_errors import STATUSES, render

DIALECT = Dialect(
    (
        Route(
            "POST", "/generate", generate.generate, render, "Continue a prompt, as the demo server did",
            body=DemoRequest, keys=("prompt",),
        ),
        Route(
            "POST", "/tokenize", tokenization.tokenize, render, "Tokenize a prompt or a conversation",
            body=TokenizeRequest, keys=("prompt", "messages"),
        ),
        Route("POST", "/detokenize", tokenization.detokenize, render, "Tokens to text", body=DetokenizeRequest, takes_place=True),
        Route("GET", "/tokenizer_info", tokenization.tokenizer_info, render, "The tokenizer's configuration"),
        Route("GET", "/version", operations.version, render, "The server's version", scope=None),
        Route("GET", "/load", operations.load, render, "Requests that are inside", scope="metrics"),
        Route("POST", "/ping", operations.ping, render, "Whether requests can be served", scope=None),
        Route("POST", "/v1/load_lora_adapter", lora.load, render, "Load an adapter", scope="manage", body=LoadRequest),
        Route(
            "POST", "/v1/unload_lora_adapter", lora.unload, render, "Unload an adapter", scope="manage",
            body=UnloadRequest,
        ),
        *(Route("POST", path, operations.refuse, render, "Not served") for path in operations.REFUSED),
    ),
    render,
    STATUSES,
)  # fmt: skip
