"""The routes of this dialect."""

from __future__ import annotations

from inference.dialects.openai import chat, completions, embeddings, models
from inference.dialects.openai.embeddings import EmbeddingsRequest
from inference.dialects.openai.errors import render
from inference.dialects.openai.schema import ChatCompletionRequest, CompletionRequest
from inference.routing import Route

ROUTES = [
    Route("GET", "/v1/models", models.list_models, render, "List the models that are served"),
    Route("GET", "/v1/models/{id}", models.retrieve, render, "One model"),
    Route("POST", "/v1/completions", completions.create, render, "Continue a prompt", body=CompletionRequest),
    Route("POST", "/v1/chat/completions", chat.create, render, "Answer a conversation", body=ChatCompletionRequest),
    Route("POST", "/v1/embeddings", embeddings.create, render, "Make vectors of texts", body=EmbeddingsRequest),
]
