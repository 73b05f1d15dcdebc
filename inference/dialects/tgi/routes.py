"""The routes of this dialect."""

from __future__ import annotations

from inference.dialects.tgi import generate, operations
from inference.dialects.tgi.errors import render
from inference.dialects.tgi.schema import CompatGenerateRequest, GenerateRequest
from inference.routing import Route

ROUTES = [
    Route("POST", "/", generate.compat, render, "Generate, streamed if asked", body=CompatGenerateRequest),
    Route("POST", "/generate", generate.generate, render, "Generate tokens", body=GenerateRequest),
    Route("POST", "/generate_stream", generate.generate_stream, render, "Stream tokens", body=GenerateRequest),
    Route("POST", "/tokenize", operations.tokenize, render, "Tokenize inputs", body=GenerateRequest),
    Route("GET", "/info", operations.info, render, "The served model and the limits"),
    Route("GET", "/", operations.health, render, "Whether requests can be served", scope=None),
    Route("GET", "/health", operations.health, render, "Whether requests can be served", scope=None),
    Route("GET", "/ping", operations.health, render, "Whether requests can be served", scope=None),
]
