"""Which adapter a request asks for: header, query, body's `adapters`, OpenAI's `model`, in this order. An unknown adapter is an
error, never the base model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.djl.errors import LmiError, bad_request
from inference.dialects.djl.models import served_name
from inference.dialects.djl.parameters import query_of
from inference.errors import ModelNotFound
from inference.vendors.sagemaker import ADAPTER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inference.http.exchange import Exchange
    from management.snapshot import DeploymentEntry

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
"""A header whose `name=value` pairs, separated by semicolons, count as headers."""
STARTING_TOKEN = "x-starting-token"
SELECTING = (ADAPTER, ATTRIBUTES, "model_name", "model_version")
"""Headers that choose what answers."""
HANDLER = "handler"
PARSING_FAILED = "Input parsing failed: "
MAX_SHOWN = 200
MAX_LISTED = 50
"""Adapters that an error lists."""


def attribute(exchange: Exchange, name: str) -> str | None:
    """A header, or the pair of this name among SageMaker's custom attributes."""
    return _attribute(exchange.header, name)


def polls(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request with these headers asks for the result of an earlier one, and for nothing else."""

    def header(name: str) -> str | None:
        value = headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    return _attribute(header, STARTING_TOKEN) is not None


def _attribute(header: Callable[[str], str | None], name: str) -> str | None:
    value = header(name)
    if value is not None:
        return value
    pairs = [pair.partition("=") for pair in (header(ATTRIBUTES) or "").split(";")]
    return next((value.strip() for key, equals, value in pairs if equals and key.strip().lower() == name), None)


def refuse_handler(exchange: Exchange) -> None:
    """Raise BadRequestException for a request that names the handler."""
    if attribute(exchange, HANDLER) is not None:
        raise bad_request("The handler can't be overridden in a request")


def select(exchange: Exchange, entry: DeploymentEntry, body: dict[str, Any], inputs: int = 1) -> list[str]:
    """One name for each of `inputs`, "" for the base model; raises LmiError or ModelNotFound."""
    header, query = attribute(exchange, ADAPTER), query_of(exchange).get("adapter")
    if header is not None:
        _known(entry, header)
        return [header] * inputs
    if query is not None:
        if query[0] and entry.adapter(query[0]) is None:
            raise LmiError(f"The adapter {query[0][:MAX_SHOWN]} has not been registered")
        return [query[0]] * inputs
    given = body.get("adapters")
    if given is not None and given != []:
        return _of_body(entry, given, inputs)
    return [_of_model(entry, body.get("model"))] * inputs


def reference(entry: DeploymentEntry, adapter: str) -> str:
    """The name that the resolver finds this adapter of the deployment by; without one, the deployment's own."""
    return f"{entry.name}:{adapter}" if adapter else entry.name


def _of_body(entry: DeploymentEntry, given: Any, inputs: int) -> list[str]:
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) for name in names):
        raise LmiError(f"{PARSING_FAILED}adapters must be a text, or a list of one text for each input")
    if len(names) != inputs:
        if isinstance(given, list):
            raise LmiError(f"{PARSING_FAILED}Number of adapters is not equal to the number of inputs")
        names *= inputs
    for name in names:
        _known(entry, name)
    return names


def _of_model(entry: DeploymentEntry, model: Any) -> str:
    """The adapter that OpenAI's `model` names; "" if it names the model itself."""
    if model is None or model == "":
        return ""
    if not isinstance(model, str):
        raise LmiError(f"{PARSING_FAILED}model must be a text")
    if model in (served_name(entry), entry.name, entry.model):
        return ""
    base, _, rest = model.partition(":")
    for name in (model, rest if base in (served_name(entry), entry.name) else ""):
        if name and entry.adapter(name) is not None:
            return name
    raise ModelNotFound(model)


def _known(entry: DeploymentEntry, name: str) -> None:
    if name and entry.adapter(name) is None:
        known = [adapter.name for adapter in entry.adapters[:MAX_LISTED]]
        raise LmiError(
            f"{PARSING_FAILED}LoRA adapter {name[:MAX_SHOWN]} not found in registry. Available adapters: {known}"
        )
