"""The declaration of Text Generation Inference's dialect, and its routes."""

from __future__ import annotations

from inference.dialects.tgi import answers, embed, generate, vertex
from inference.dialects.tgi import status as operations
from inference.dialects.tgi.errors import STATUSES, render
from inference.dialects.tgi.schema import CompatGenerateRequest, GenerateRequest
from inference.dialects.tgi.status import ChatRequest
from inference.dialects.tgi.vertex import VertexRequest
from inference.http.routing import Described, Document, Empty, Route, RouteSet
from inference.planes.declaration import Dialect

TAG = "Text Generation Inference"
FRAME = answers.StreamResponse


def _health(path: str, operation: str = "") -> Route:
    text = "Check whether requests can be served"
    return Route("GET", path, operations.health, render, text, scope=None, described=Described(operation, Empty))


ROUTES = (
    Route(
        "POST",
        "/",
        generate.compat,
        render,
        "Generate text, streamed on request",
        body=CompatGenerateRequest,
        described=Described("compat_generate", list[answers.GenerateResponse], FRAME),
    ),
    Route(
        "POST",
        "/generate",
        generate.generate,
        render,
        "Generate text",
        body=GenerateRequest,
        keys=("inputs",),
        described=Described("generate", answers.GenerateResponse),
    ),
    Route(
        "POST",
        "/generate_stream",
        generate.generate_stream,
        render,
        "Stream generated text",
        body=GenerateRequest,
        described=Described("generate_stream", frames=FRAME),
    ),
    Route(
        "POST",
        "/tokenize",
        operations.tokenize,
        render,
        "Tokenize a prompt",
        body=GenerateRequest,
        keys=("inputs",),
        described=Described("tokenize", list[answers.SimpleToken]),
    ),
    Route(
        "POST",
        "/invocations",
        generate.compat,
        render,
        "Generate text for SageMaker, as POST / does",
        body=CompatGenerateRequest,
        keys=("inputs",),
        described=Described("sagemaker_compatibility", list[answers.GenerateResponse], FRAME),
    ),
    Route(
        "POST",
        "/chat_tokenize",
        operations.chat_tokenize,
        render,
        "Apply the chat template and tokenize a conversation",
        body=ChatRequest,
        needs_permit=True,
        described=Described("get_chat_tokenize", answers.ChatTokenizeResponse),
    ),
    Route(
        "POST",
        "/vertex",
        vertex.predict,
        render,
        "Generate text for several Vertex AI instances",
        body=VertexRequest,
        needs_permit=True,
        refused=generate.overloaded,
        described=Described("vertex_compatibility", answers.VertexResponse),
    ),
    Route(
        "POST",
        "/embed",
        embed.embed_texts,
        render,
        "Compute one vector for each text",
        body=embed.EmbedRequest,
        described=Described("embed", list[list[float]]),
    ),
    Route(
        "GET",
        "/info",
        operations.info,
        render,
        "Describe the served model and the limits",
        described=Described("get_model_info", answers.Info),
    ),
    _health("/"),
    _health("/health", "health"),
    _health("/ping"),
)

DOCUMENT = Document(
    "/api-doc/openapi.json",
    TAG,
    {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
    ({"name": TAG, "description": "Hugging Face Text Generation Inference API"},),
    others=("/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics"),
)
"""As the router's."""

DIALECT = Dialect(
    "tgi", "TGI", front=RouteSet(ROUTES, render, STATUSES, tag=TAG, error=answers.ErrorResponse, document=DOCUMENT)
)
