"""The inference routes: /invocations, /predictions, /models/{model}/invoke and /v1/chat/completions.

The body decides who answers: `inputs` is LMI's own schema, `messages` and `prompt` are OpenAI's, which the front plane's routes
answer.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from inference.dialects.djl.body import read_body
from inference.dialects.djl.embeddings import embed
from inference.dialects.djl.errors import LmiError, bad_request, not_found, not_ready
from inference.dialects.djl.jsonlines import as_lines
from inference.dialects.djl.lmi import generation_request, parse
from inference.dialects.djl.lmi_reply import STREAMS, BatchReply, LmiReply
from inference.dialects.djl.models import running, startup_model
from inference.dialects.djl.parameters import query_of
from inference.dialects.djl.selection import (
    PARSING_FAILED,
    STARTING_TOKEN,
    attribute,
    reference,
    refuse_handler,
    select,
)
from inference.errors import ModelNotFound
from inference.generation.answer import Job, answer, preparing
from inference.workers.scope import scoped, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inference.dialects.djl.state import DjlState
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services
    from management.snapshot import DeploymentEntry

SYNCHRONOUS = "x-synchronous"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OWN_KEYS = frozenset({"adapters", "model_name", "model_version"})
"""Keys of a body that are this dialect's, not OpenAI's."""


async def infer(exchange: Exchange, services: Services, state: DjlState) -> None:
    """Answer a request, begin one whose result is polled (`x-synchronous: false`), or return such a result."""
    refuse_handler(exchange)
    token = attribute(exchange, STARTING_TOKEN)
    if token is not None:
        await state.results.answer(exchange, token, attribute(exchange, "x-max-items"))
        return
    body = await read_body(exchange)
    entry = await _entry(exchange, services, body)
    if _is_synchronous(exchange):
        await _answer(exchange, services, entry, body)
        return
    services.admission.check(exchange.tenant)

    async def run(recorded: Exchange) -> None:
        time_left_s = services.time_left_s(recorded.standing)
        await services.router.when_known(exchange.tenant, lambda: _answer(recorded, services, entry, body), time_left_s)

    await state.results.begin(exchange, body, run)


def _is_synchronous(exchange: Exchange) -> bool:
    value = (attribute(exchange, SYNCHRONOUS) or "true").lower()
    if value not in ("true", "false"):
        raise bad_request(f"The header {SYNCHRONOUS} must be true or false")
    return value == "true"


async def _entry(exchange: Exchange, services: Services, body: dict[str, Any]) -> DeploymentEntry:
    """The deployment by path, query, header or body, then by OpenAI's `model`, then the startup model; raises
    ModelNotFoundException, BadRequestException without a name.
    """
    name, version = _named(exchange, body, "model"), _named(exchange, body, "version")
    if not name:
        named = _by_model(services, body)
        if named is not None:
            return named
        name = startup_model(services) or ""
    if not name:
        raise bad_request("Parameter model_name is required.")
    try:
        entry = await running(services, name, version)
    except ModelNotFound as error:
        shown = f"{name}:{version}" if version else name
        raise not_found(f"Model or workflow not found: {shown[:300]}") from error
    if entry is None:
        raise not_ready(f"Model or workflow is not ready: {name[:300]}")
    return entry


def _named(exchange: Exchange, body: dict[str, Any], what: str) -> str:
    """The model's name or version by path, query, header or body; "" without one."""
    key = "model_name" if what == "model" else "model_version"
    given = exchange.parameters.get(what) or query_of(exchange).get(key, [""])[0] or attribute(exchange, key)
    found = given or body.get(key) or ""
    if not isinstance(found, str):
        raise bad_request(f"Parameter {key} must be a text.")
    return found


def _by_model(services: Services, body: dict[str, Any]) -> DeploymentEntry | None:
    """The deployment that OpenAI's `model` names, itself or by an adapter; None if it names none."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        return None
    found = scoped(services.holder.current).resolve(model)
    return None if found is None else found.deployment


async def _answer(exchange: Exchange, services: Services, entry: DeploymentEntry, body: dict[str, Any]) -> None:
    if body.get("prompt") is not None:
        await _openai(exchange, services, entry, body, COMPLETIONS)
    elif body.get("messages") is not None and body.get("inputs") is None:
        await _openai(exchange, services, entry, body, CHAT)
    elif exchange.path == CHAT:
        raise LmiError(f"{PARSING_FAILED}invalid payload. must contain messages")
    else:
        with within(entry.public_id):
            await _lmi(exchange, services, entry, body)


async def _lmi(exchange: Exchange, services: Services, entry: DeploymentEntry, body: dict[str, Any]) -> None:
    target = services.router.resolve(entry.name)
    if target.info.embedding is not None:
        await embed(exchange, services, entry, body)
        return
    parsed = await exchange.work(parse, body, services.limits)
    names = select(exchange, entry, body, len(parsed.texts))
    requests = [generation_request(parsed, number, reference(entry, name), target) for number, name in enumerate(names)]

    def reply(generations: list[Generation]) -> LmiReply:
        batched = parsed.as_list and parsed.form != "json"
        return (BatchReply if batched else LmiReply)(parsed, generations)

    prepare_all = preparing(requests, exchange, services, "djl")

    async def prepare() -> list[Generation]:
        with _still_registered(names):
            return await prepare_all()

    job = Job(
        prepare,
        reply,
        STREAMS.get(parsed.form),
        lambda: services.admission.permit(exchange.permit_holder),
    )
    await answer(exchange, job)


async def _openai(
    exchange: Exchange, services: Services, entry: DeploymentEntry, body: dict[str, Any], path: str
) -> None:
    """Let the front plane answer, with events on OpenAI's own path and lines on the others, as in LMI."""
    (adapter,) = select(exchange, entry, body)
    if adapter:
        plain = services.holder.current.only(entry.public_id).resolve(adapter)
        model = adapter if plain is not None and plain.adapter is not None else reference(entry, adapter)
    else:
        model = entry.name
    inner = {**{key: value for key, value in body.items() if key not in OWN_KEYS}, "model": model}
    through = None if exchange.path == CHAT else as_lines
    with _still_registered([adapter]):
        await services.delegation.run(exchange, path, inner, entry.public_id, through)


@contextmanager
def _still_registered(names: list[str]) -> Iterator[None]:
    """An adapter that is unregistered after it was selected is an unknown adapter, as it would have been a moment later."""
    try:
        yield
    except ModelNotFound as error:
        adapters = ", ".join(sorted({name for name in names if name}))
        if not adapters:
            raise
        raise LmiError(f"{PARSING_FAILED}LoRA adapter {adapters} is no longer registered") from error
