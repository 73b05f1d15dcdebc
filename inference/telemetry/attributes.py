"""The attributes of spans and metrics: OpenTelemetry's names for generative AI, and beside them vLLM's older ones.

Values never contain prompts, generated text or stop strings. This module imports nothing of OpenTelemetry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.generation.requests import ChatPrompt

if TYPE_CHECKING:
    from inference.generation.generation import Generation
    from inference.telemetry.base import EmbeddingRun

PROVIDER = "dragoman"
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
GIVEN = {
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Sampling parameters that are attributes if the client gave them."""


def operation(generation: Generation) -> str:
    """The operation's name in the conventions."""
    return CHAT if isinstance(generation.request.prompt, ChatPrompt) else COMPLETION


def model_names(generation: Generation) -> tuple[str, str]:
    """The requested model, which may be an adapter, and the deployment that answers. Both are registered names, so a client
    cannot create series.
    """
    target = generation.target
    return (target.entry.name if target.adapter is None else target.adapter.name), target.entry.name


def error_type(generation: Generation) -> str | None:
    """The failure's code or the cause of the end; None for a generation that ended by itself or was stopped by its client."""
    if generation.finish in ("stop", "length"):
        return None
    failure = generation.ending.failure
    return failure[0] if failure is not None else generation.ending.causes[0] if generation.ending.causes else "aborted"


def metric_attributes(name: str, requested: str, answering: str, error: str | None) -> dict[str, Any]:
    """The attributes of a measurement."""
    attributes = {
        "gen_ai.operation.name": name,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": requested,
        "gen_ai.response.model": answering,
    }
    return attributes if error is None else {**attributes, "error.type": error}


def generation_attributes(generation: Generation) -> dict[str, Any]:
    """The attributes of the span of a generation that has ended."""
    request, params, usage = generation.request, generation.params, generation.usage
    error = error_type(generation)
    attributes = metric_attributes(operation(generation), *model_names(generation), error) | {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": generation.finish_reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "dragoman.dialect": generation.dialect,
        "dragoman.end_cause": str(generation.ending.fields["cause"]),
        # vLLM's
        "gen_ai.request.id": generation.request_id,
        "gen_ai.request.n": request.n,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.usage.num_sequences": request.n,
        **_latencies(generation),
    }
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if request.seed is not None:
        attributes["gen_ai.request.seed"] = str(request.seed) if abs(request.seed) >> 63 else request.seed
    given = request.sampling.given
    attributes |= {attribute: given[name] for name, attribute in GIVEN.items() if name in given}
    if generation.replays:
        attributes["dragoman.replays"] = generation.replays.total()
    return attributes


def _latencies(generation: Generation) -> dict[str, float]:
    """Latencies by vLLM's names, in seconds; those of phases only if there was a first token."""
    timings = generation.timings
    latencies = {"gen_ai.latency.e2e": timings.finished - timings.arrived}
    if timings.first_token:
        scheduled = timings.submitted + timings.queue_s
        latencies |= {
            "gen_ai.latency.time_in_queue": timings.queue_s,
            "gen_ai.latency.time_to_first_token": timings.first_token - timings.arrived,
            "gen_ai.latency.time_in_model_prefill": max(0.0, timings.first_token - scheduled),
            "gen_ai.latency.time_in_model_decode": timings.last_token - timings.first_token,
            "gen_ai.latency.time_in_model_inference": max(0.0, timings.last_token - scheduled),
        }
    return latencies


def embedding_attributes(run: EmbeddingRun) -> dict[str, Any]:
    """The attributes of the span of a request for embeddings."""
    return metric_attributes(EMBEDDINGS, run.deployment, run.deployment, run.error) | {
        "gen_ai.usage.input_tokens": run.prompt_tokens,
        "gen_ai.usage.prompt_tokens": run.prompt_tokens,
        "gen_ai.latency.e2e": run.finished - run.arrived,
        "gen_ai.request.id": run.request_id,
        "dragoman.dialect": run.dialect,
        "dragoman.inputs": run.inputs,
    }
