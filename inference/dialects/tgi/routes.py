"""The routes of this dialect."""

from __future__ import annotations

from inference.dialects.tgi import generate, vertex
from inference.dialects.tgi import status as operations
from inference.dialects.tgi.errors import STATUSES, render
from inference.dialects.tgi.schema import CompatGenerateRequest, GenerateRequest
from inference.dialects.tgi.status import ChatRequest
from inference.dialects.tgi.vertex import VertexRequest
from inference.http.routing import Dialect, Route

DIALECT = Dialect(
    (
        Route("POST", "/", generate.compat, render, "Generate, streamed if asked", body=CompatGenerateRequest),
        Route(
            "POST", "/generate", generate.generate, render, "Generate tokens", body=GenerateRequest, keys=("inputs",)
        ),
        Route("POST", "/generate_stream", generate.generate_stream, render, "Stream tokens", body=GenerateRequest),
        Route(
            "POST", "/tokenize", operations.tokenize, render, "Tokenize inputs", body=GenerateRequest, keys=("inputs",)
        ),
        Route(
            "POST",
            "/invocations",
            generate.compat,
            render,
            "SageMaker: as POST /",
            body=CompatGenerateRequest,
            keys=("inputs",),
        ),
        Route(
            "POST",
            "/chat_tokenize",
            operations.chat_tokenize,
            render,
            "Template and tokenize a conversation",
            body=ChatRequest,
            takes_place=True,
        ),
        Route(
            "POST",
            "/vertex",
            vertex.predict,
            render,
            "Vertex AI: several instances at once",
            body=VertexRequest,
            takes_place=True,
            refused=generate.overloaded,
        ),
        Route("GET", "/info", operations.info, render, "The served model and the limits"),
        Route("GET", "/", operations.health, render, "Whether requests can be served", scope=None),
        Route("GET", "/health", operations.health, render, "Whether requests can be served", scope=None),
        Route("GET", "/ping", operations.health, render, "Whether requests can be served", scope=None),
    ),
    render,
    STATUSES,
)
