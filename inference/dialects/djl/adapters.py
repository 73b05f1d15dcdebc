"""The adapters API: list, register, describe, update and unregister, below /adapters and /models/{model}/adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.djl.adapter_failures import failed
from inference.dialects.djl.errors import DEPENDENCY, DjlError, bad_request, conflict, not_ready
from inference.dialects.djl.models import actor_of, running, startup_model, target_of
from inference.dialects.djl.parameters import read_parameters
from inference.dialects.djl.sources import path_of
from inference.errors import AdapterExists, AdapterNotFound, ModelNotFound, ServingError, Unavailable
from inference.http.exchange import Response
from inference.vendors.model_server import NO_METHOD, pretty

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure
    from inference.dialects.djl.parameters import Parameters
    from inference.http.exchange import Exchange
    from inference.services import Services
    from management.snapshot import AdapterEntry, DeploymentEntry

ALIAS = "x-amzn-sagemaker-adapter-alias"
MAX_SHOWN = 256
"""Characters of a client's alias that a message repeats."""
NO_MODEL = "The adapter must be prefixed with a model unless there is only a single startup model used."
_OWN = frozenset({"name", "src", "preload", "load", "pin"})
"""Parameters that are not stored among an adapter's options as they are given."""


async def list_adapters(exchange: Exchange, services: Services) -> None:
    """GET: a page of the adapters, in the order of their registration."""
    entry = await _deployment(exchange, services)
    parameters = await read_parameters(exchange)
    first, end = parameters.page(len(entry.adapters))
    token = {"nextPageToken": str(end)} if end < len(entry.adapters) else {}
    failures = _failures(services, entry)
    page = [_described(adapter, failures) for adapter in entry.adapters[first:end]]
    await exchange.respond(pretty({**token, "adapters": page}))


async def register(exchange: Exchange, services: Services) -> None:
    """POST: register an adapter, loaded by every worker unless `preload` is false."""
    entry = await _deployment(exchange, services)
    parameters = await read_parameters(exchange)
    name, source = parameters.required("name"), parameters.required("src")
    path = path_of(source)
    if path is None:
        raise conflict("URL adapters are not currently supported")
    alias = _alias(exchange, name)
    if entry.adapter(name) is not None:
        raise failed(AdapterExists(name), alias, source)
    preload, pin = _preload(parameters), parameters.flag("pin")
    options = _options(parameters, source if path != source else None)
    try:
        if preload is False and pin:
            await services.registry.read_adapter(name, path, options)
            raise bad_request("Can not set preload to false and pin to true", DEPENDENCY)
        await services.adapters.load(
            name,
            path,
            entry.name,
            False,
            actor_of(exchange),
            preload=preload is not False,
            pinned=bool(pin),
            options=options,
        )
    except ServingError as error:
        raise failed(error, alias, source) from error
    await _say(exchange, f"Adapter {alias} registered")


async def describe(exchange: Exchange, services: Services) -> None:
    """GET with a name: one adapter."""
    entry = await _deployment(exchange, services)
    await exchange.respond(
        pretty(_described(_adapter(exchange, entry, exchange.parameters["adapter"]), _failures(services, entry)))
    )


async def update(exchange: Exchange, services: Services) -> None:
    """POST .../update: change how an adapter is kept, and its options. What the call leaves out stays."""
    name, _, action = exchange.parameters["adapter"].rpartition("/")
    if not name or action.lower() != "update":
        raise DjlError(405, "MethodNotAllowedException", NO_METHOD)
    entry = await _deployment(exchange, services)
    adapter = _adapter(exchange, entry, name)
    parameters = await read_parameters(exchange)
    preload, pin = _preload(parameters), parameters.flag("pin")
    alias, source = _alias(exchange, adapter.name), parameters.text("src")
    merged = _wants_preload(adapter) if preload is None else preload
    if not merged and (adapter.pinned if pin is None else pin):
        raise bad_request("Can not set load to false and pin to true", DEPENDENCY)
    if source is not None and source != _source(adapter):
        raise bad_request("Updating adapter path is not supported.", DEPENDENCY)
    if adapter.pinned and pin is False:
        raise bad_request(
            f"Unpinning adapter is not supported. To unpin adapter '{alias}', please delete the adapter and re-register "
            "it without pinning.",
            DEPENDENCY,
        )
    try:
        await services.adapters.update(
            adapter.name,
            entry.name,
            actor_of(exchange),
            preload=preload,
            pinned=pin,
            options=_options(parameters) or None,
        )
    except AdapterNotFound as error:  # it was unregistered meanwhile
        raise _unknown(alias) from error
    except ServingError as error:
        raise failed(error, alias, _source(adapter)) from error
    await _say(exchange, f"Adapter {alias} updated")


async def unregister(exchange: Exchange, services: Services) -> None:
    """DELETE: new requests no longer find the adapter; running ones finish."""
    entry = await _deployment(exchange, services)
    adapter = _adapter(exchange, entry, exchange.parameters["adapter"])
    try:
        await services.adapters.unload(adapter.name, actor_of(exchange), entry.name)
    except AdapterNotFound as error:
        raise _unknown(_alias(exchange, adapter.name)) from error
    await _say(exchange, f"Adapter {_alias(exchange, adapter.name)} unregistered")


async def _deployment(exchange: Exchange, services: Services) -> DeploymentEntry:
    """The deployment of the path, or the startup model's. These checks come before all others."""
    name = exchange.parameters.get("model") or startup_model(services)
    if name is None:
        raise bad_request(NO_MODEL)
    try:
        entry = await running(services, name)
    except ModelNotFound as error:
        raise bad_request(f"The model {name} was not found", 404) from error
    if entry is None:
        raise not_ready(f"The model {name} has no workers. Scale it up before its adapters are used.")
    target = target_of(services, entry)
    if target is not None and not target.info.max_adapter_rank:
        raise bad_request("LoRA is not enabled.")
    return entry


def _adapter(exchange: Exchange, entry: DeploymentEntry, name: str) -> AdapterEntry:
    adapter = entry.adapter(name)
    if adapter is None:
        raise _unknown(_alias(exchange, name))
    return adapter


def _failures(services: Services, entry: DeploymentEntry) -> dict[str, AdapterFailure]:
    """Why workers could not load adapters; nothing while there are no workers."""
    try:
        return services.adapters.failures(entry.name)
    except Unavailable:
        return {}


def _described(adapter: AdapterEntry, failures: dict[str, AdapterFailure]) -> dict[str, Any]:
    shown = {
        "name": adapter.name,
        "src": _source(adapter),
        "preload": _is_preloaded(adapter),
        "pin": adapter.pinned,
    }
    failure = failures.get(adapter.digest)
    return shown if failure is None else {**shown, "status": "FAILED", "reason": failure.words}


def _is_preloaded(adapter: AdapterEntry) -> bool:
    return adapter.preload or adapter.pinned


def _wants_preload(adapter: AdapterEntry) -> bool:
    """Whether it may be pinned: unless its client said that it should not be preloaded."""
    return _is_preloaded(adapter) or dict(adapter.options).get("preload") != "false"


def _source(adapter: AdapterEntry) -> str:
    """`src` as the client gave it, which for a file: URL is not what was loaded."""
    return dict(adapter.options).get("src") or adapter.source or adapter.directory


def _preload(parameters: Parameters) -> bool | None:
    """`preload`, or its former name `load`."""
    preload = parameters.flag("preload")
    return parameters.flag("load") if preload is None else preload


def _options(parameters: Parameters, source: str | None = None) -> dict[str, str]:
    options = {name: value for name, value in parameters.singles().items() if name not in _OWN}
    preload = _preload(parameters)
    if preload is not None:
        options["preload"] = str(preload).lower()
    return options if source is None else {**options, "src": source}


def _alias(exchange: Exchange, name: str) -> str:
    """The name in messages."""
    alias = exchange.header(ALIAS) or name
    return alias if len(alias) <= MAX_SHOWN else alias[:MAX_SHOWN]


def _unknown(alias: str) -> DjlError:
    return bad_request(f"The adapter {alias} was not found", 404)


async def _say(exchange: Exchange, text: str) -> None:
    """The status of a change: JSON, or plain text for a client that accepts only that, as in SageMaker's variant."""
    accepted = exchange.header("accept") or ""
    if "text/plain" in accepted and "json" not in accepted and "*/*" not in accepted:
        await exchange.respond(Response(200, text.encode(), b"text/plain; charset=utf-8"))
        return
    await exchange.respond(pretty({"status": text}))
