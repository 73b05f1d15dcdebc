"""The answers of vLLM's own routes, for the documentation. They are built where they are sent, and a test compares
both.
"""

from __future__ import annotations

import msgspec


class TokenizeResponse(msgspec.Struct):
    """Token ids, their number, the longest sequence in tokens, and the tokens' texts if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class VersionResponse(msgspec.Struct):
    """The server's version."""

    version: str


class LoadResponse(msgspec.Struct):
    """The number of requests in flight."""

    server_load: int


class DemoResponse(msgspec.Struct):
    """The prompt and its completion, once for each sequence."""

    text: list[str]
