"""Errors of /v1/responses: OpenAI's envelope, whose `code` is a text there, or null. Codex and OpenAI's agents read it:
by `context_length_exceeded` they shorten the conversation, by `insufficient_quota` they stop, by `rate_limit_exceeded`
they wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference import errors
from inference.http.exchange import json_response
from inference.vendors import openai_errors

if TYPE_CHECKING:
    from inference.errors import ServingError
    from inference.http.exchange import Response

# First match wins, so a subclass comes before its base.
CODES: list[tuple[type[ServingError], str]] = [
    (errors.PromptTooLong, "context_length_exceeded"),
    (errors.ModelNotFound, "model_not_found"),
    (errors.Unauthorized, "invalid_api_key"),
    (errors.QuotaExhausted, "insufficient_quota"),
    (errors.OverShare, "rate_limit_exceeded"),
]
SERVER_ERROR = "server_error"


def code_of(error: ServingError) -> str | None:
    """The code of an error; None: its status and text say all."""
    return next((code for kind, code in CODES if isinstance(error, kind)), None)


def render(error: ServingError) -> Response:
    """The error as a complete response."""
    if isinstance(error, errors.Unauthorized):
        told = {"message": error.message, "type": "invalid_request_error", "param": None, "code": code_of(error)}
        return json_response({"error": told}, 401)
    status, envelope = openai_errors.body(error)
    return openai_errors.complete(error, status, {"error": {**envelope["error"], "code": code_of(error)}})


def failure(error: ServingError) -> dict[str, str]:
    """The `error` of a response that failed after it began."""
    return {"code": code_of(error) or SERVER_ERROR, "message": error.message}
