"""The declaration of OpenAI's dialect as vLLM serves it, and its routes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inference.dialects.openai import (
    answers,
    batch,
    chat,
    completions,
    embeddings,
    models,
    render,
    response_answers,
    responses,
)
from inference.dialects.openai.embeddings import EmbeddingsRequest, PoolingRequest
from inference.dialects.openai.responses_schema import ResponsesRequest
from inference.dialects.openai.schema import BatchChatCompletionRequest, ChatCompletionRequest, CompletionRequest
from inference.errors import MalformedBody
from inference.http.routing import Described, Never, Route, RouteSet
from inference.planes.declaration import Dialect
from inference.vendors import responses_errors
from inference.vendors.openai_errors import STATUSES
from inference.vendors.openai_errors import render as render_error
from inference.vendors.sagemaker import ADAPTER

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.http.routing import Handler, Render
    from inference.services import Services


KSERVE = "/openai"
"""Below which KServe's runtimes serve OpenAI's routes."""


async def _json_only(handler: Handler, exchange: Exchange, services: Services) -> None:
    """Refuse bodies with a Content-Type other than JSON, as vLLM does; a missing one is accepted."""
    kind = (exchange.header("content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise MalformedBody("Unsupported Media Type: Only 'application/json' is allowed")
    await handler(exchange, services)


def _post(
    path: str, handler: Handler, summary: str, body: type, render: Render = render_error, **described: Any
) -> Route:
    """`described`: the fields of `Described`."""
    handler, told = partial(_json_only, handler), Described(**described)
    return Route("POST", path, handler, render, summary, body=body, needs_permit=True, described=told)


def _invoke(key: str, handler: Handler, body: type, **described: Any) -> Route:
    """POST /invocations (SageMaker): dispatch by the body's keys. `described`: the fields of `Described`."""
    return Route(
        "POST",
        "/invocations",
        partial(_with_adapter, handler),
        render_error,
        "Answer a SageMaker request, by the keys of its body",
        body=body,
        keys=(key,),
        selecting=(ADAPTER,),
        described=Described(**described),
    )


async def _with_adapter(handler: Handler, exchange: Exchange, services: Services) -> None:
    """Answer as the adapter that SageMaker's header names, if it does."""
    adapter = exchange.header(ADAPTER)
    if adapter:
        (await exchange.json())["model"] = adapter
    await handler(exchange, services)


async def _converse(exchange: Exchange, services: Services) -> None:
    """Answer a conversation, or embed it if the model does that."""
    model = (await exchange.json()).get("model")
    embeds = isinstance(model, str | None) and services.router.resolve(model).info.embedding is not None
    await (embeddings.create if embeds else chat.create)(exchange, services)


ROUTES = (
    Route(
        "GET",
        "/v1/models",
        models.list_models,
        render_error,
        "List the models",
        described=Described("openai_get_model_info", answers.ModelsInfo),
    ),
    Route(
        "GET",
        "/v1/models/{id:path}",
        models.retrieve,
        render_error,
        "Retrieve a model",
        described=Described("retrieve_model", answers.ModelInfo),
    ),
    _post(
        "/v1/completions",
        completions.create,
        "Complete a prompt",
        CompletionRequest,
        operation="completions",
        answer=answers.Completion,
        frames=answers.Completion,
    ),
    _post(
        "/v1/chat/completions",
        chat.create,
        "Answer a conversation",
        ChatCompletionRequest,
        operation="chat_completions",
        answer=answers.ChatCompletion,
        frames=answers.ChatCompletionChunk,
    ),
    _post(
        "/v1/chat/completions/batch",
        batch.create,
        "Answer several conversations",
        BatchChatCompletionRequest,
        answer=answers.ChatCompletion,
    ),
    _post(
        "/v1/chat/completions/render",
        render.render_chat,
        "Show the tokens and parameters of a conversation",
        ChatCompletionRequest,
        answer=answers.Rendered,
    ),
    _post(
        "/v1/completions/render",
        render.render_completion,
        "Show the tokens and parameters of prompts",
        CompletionRequest,
        answer=list[answers.Rendered],
    ),
    _post(
        "/v1/embeddings",
        embeddings.create,
        "Create embeddings of texts",
        EmbeddingsRequest,
        operation="embeddings",
        answer=answers.Embeddings,
    ),
    _post(
        "/v1/responses",
        responses.create,
        "Create a response, as a list of output items",
        ResponsesRequest,
        responses_errors.render,
        answer=response_answers.Response,
        frames=response_answers.ResponseEvent,
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        responses.retrieve,
        responses_errors.render,
        "Retrieve a stored response (always not found: responses are not stored)",
        described=Described(answer=Never),
    ),
    Route(
        "POST",
        "/v1/responses/{id}/cancel",
        responses.retrieve,
        responses_errors.render,
        "Cancel a stored response (always not found: responses are not stored)",
        described=Described(answer=Never),
    ),
    _post(
        "/pooling",
        embeddings.pool,
        "Create embeddings of texts, as vLLM's pooling models do",
        PoolingRequest,
        answer=answers.Pooled,
    ),
    _invoke(
        "messages",
        _converse,
        ChatCompletionRequest,
        answer=answers.ChatCompletion,
        frames=answers.ChatCompletionChunk,
    ),
    _invoke("prompt", completions.create, CompletionRequest, answer=answers.Completion, frames=answers.Completion),
    _invoke("input", embeddings.create, EmbeddingsRequest, answer=answers.Embeddings),
)

DIALECT = Dialect(
    "openai",
    "OpenAI",
    # vLLM redirects paths with one more slash; clients that follow no redirects are answered too.
    front=RouteSet(
        tuple(replace(route, trailing_slash=True) for route in ROUTES),
        render_error,
        STATUSES,
        prefixes=("/v1/",),
        mounts=(KSERVE,),
    ),
)
