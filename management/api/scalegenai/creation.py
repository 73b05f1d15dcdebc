"""Creates a deployment from a body: checks everything, fetches adapters, then writes in one transaction."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import IntegrityError, transaction

from engine.config import OPTIONS
from management import chat_template
from management.api.scalegenai.errors import ApiError, FieldError, InvalidFields
from management.api.scalegenai.normaliser import normalise
from management.api.scalegenai.sources import FoundAdapter, find_adapter, find_model
from management.model_files import longest_sequence
from management.models import Adapter, Deployment, Model, Price
from management.models.deployment import new_public_id
from management.places import least_price, place_of
from management.services.deployments import (
    RESERVED_NAMES,
    create_deployment,
    one_after_the_other,
    start_deployment,
    versions_of,
)
from management.services.discovery import register_beside
from management.services.errors import RegistryError
from management.services.keys import create_key
from management.services.secrets import ENDPOINT_KEY, HUB_TOKEN, store_secret
from management.services.sources import FoundModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from management.api.scalegenai.normaliser import Wanted

MACHINE_OPTIONS = ("device", "threads", "kv_cache_bytes")
"""The server's engine options that describe its machine, not its model; every deployment here has them."""
MACHINE_FIELDS = ("instance_types", "on_prem_node_ids")
"""Fields of a placement that only a launcher of several machines reads."""
MAX_NAME = 100
ATTEMPTS = 3
"""Transactions until one finds its names free: others may take them in between."""
COLUMN_FIELDS = {
    "name": ("name",), "title": ("name",), "source": ("model",), "chat_template": ("custom_chat_template",),
    "replicas": ("initial_worker_config", "min_workers"),
}  # fmt: skip
"""The vendor's fields for columns that a service refuses."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the transaction needs, checked."""

    wanted: Wanted
    model: FoundModel
    adapters: tuple[FoundAdapter, ...]
    engine_options: dict[str, Any]


def create(body: Mapping[str, Any], actor: str) -> Deployment:
    """Create and start the deployment. Raises InvalidFields with all wrong fields, or ApiError; nothing is created then."""
    plan = _plan(normalise(body))
    for _ in range(ATTEMPTS):
        with suppress(IntegrityError):  # another create took a name
            deployment = _write(plan, actor)
            register_beside(deployment, actor)
            return deployment
    raise ApiError(409, "other calls took the names of the deployment, its model or its adapters; try again")


def find_adapters(
    wanted: Wanted, skip: frozenset[str] = frozenset(), token: str | None = None
) -> tuple[FoundAdapter, ...]:
    """The files of the adapters that `skip` does not name; `token` opens the hub where an adapter has none of its own.
    Raises InvalidFields for all that cannot be had.
    """
    found: list[FoundAdapter] = []
    errors: list[FieldError] = []
    for index, lora in enumerate(wanted.loras):
        if lora.name in skip:
            continue
        try:
            found.append(find_adapter(replace(lora, token=lora.token or token), ("llm_loras", index)))
        except InvalidFields as error:
            errors += error.errors
    if errors:
        raise InvalidFields(errors)
    return tuple(found)


def _plan(wanted: Wanted) -> Plan:
    errors: list[FieldError] = []
    options = {name: settings.ENGINE_OPTIONS[name] for name in MACHINE_OPTIONS} | wanted.engine_options
    if wanted.columns["inference_kind"] == Model.Kind.LLM:
        options["task"] = (
            "generate"  # a model that only makes embeddings is not served as something else than was asked for
        )
    model = FoundModel("", "")
    try:
        model = find_model(wanted.model)
    except InvalidFields as error:
        errors += error.errors
    if wrong := chat_template.problem(wanted.columns["chat_template"]):
        errors.append(FieldError(("custom_chat_template",), f"cannot be used: {wrong}", "template"))
    limit = longest_sequence(model.source) if model.source else None
    length = options.get("max_model_len", 0)
    if limit is not None and length > limit:
        text = f"must be at most {limit}, the model's own limit, got {length}"
        errors.append(FieldError((wanted.length_field,), text, "less_than_equal"))
    adapters: tuple[FoundAdapter, ...] = ()
    try:
        adapters = find_adapters(wanted)
    except InvalidFields as error:
        errors += error.errors
    if errors:
        raise InvalidFields(errors)
    rank = max((adapter.stored.rank for adapter in adapters), default=0)
    if rank > OPTIONS["max_adapter_rank"].default:
        options["max_adapter_rank"] = rank
    return Plan(wanted, model, adapters, options)


@transaction.atomic
def _write(plan: Plan, actor: str) -> Deployment:
    """Register what is new, and create and start the deployment with its secrets and its key. Raises InvalidFields."""
    one_after_the_other()  # before the model's row is locked
    wanted, public_id = plan.wanted, new_public_id()
    try:
        version = plan.model.registered(wanted.columns["inference_kind"], actor)
    except RegistryError as error:
        raise InvalidFields([FieldError(("model",), str(error))]) from error
    columns = {**wanted.columns, "public_id": public_id}
    unsaved = Deployment(version=version, engine_options=plan.engine_options, **columns)
    warnings = [*wanted.vendor_fields["warnings"], *_price_warnings(unsaved), *_place_warnings(unsaved)]
    columns["vendor_fields"] = {**wanted.vendor_fields, "warnings": warnings}
    name = _free_name(wanted.columns["title"], public_id)
    try:
        deployment = create_deployment(name, version, actor, plan.engine_options, **columns)
        start_deployment(deployment, actor, max(1, deployment.min_workers))
    except RegistryError as error:
        raise refused_fields(error) from error
    for index, adapter in enumerate(plan.adapters):
        adapter.register(deployment, ("llm_loras", index), actor)
    _, key = create_key(f"endpoint {public_id}", ["infer"], actor, deployment=deployment)
    store_secret(deployment, ENDPOINT_KEY, key)
    store_secret(deployment, HUB_TOKEN, wanted.hub_token or "")
    return deployment


def refused_fields(error: RegistryError) -> ApiError:
    """A service's refusal, with the vendor's names of the fields."""
    if not error.fields:
        return InvalidFields([FieldError((), str(error))])
    return InvalidFields(
        FieldError(COLUMN_FIELDS.get(name, (name,)), "; ".join(texts)) for name, texts in error.fields.items()
    )


def _price_warnings(deployment: Deployment) -> list[str]:
    most, price = deployment.max_price_per_hour, least_price(deployment, Price.objects.all())
    if not most or (price is not None and price <= most):
        return []
    known = "no machine for it has a known price" if price is None else f"the cheapest machine for it costs {price:g}"
    return [f"max_price_per_hour: no worker can be started: {known}"]


def _place_warnings(deployment: Deployment) -> list[str]:
    """Placements that no machine can meet, or that have no effect where there is one machine."""
    if settings.LAUNCHER == "local":
        unread = [name for name in MACHINE_FIELDS if getattr(deployment, name)]
        return [f"initial_worker_config.{name}: has no effect: workers run on this server's machine" for name in unread]
    if place_of(deployment, (), None).choices:
        return []
    return ["initial_worker_config: no worker can be started: no machine can have such labels"]


def _free_name(title: str, public_id: str) -> str:
    """A unique name that clients can use as `model`: the vendor's name if it is free and allowed, else with a suffix."""
    name = re.sub(r"[^A-Za-z0-9._/-]+", "-", title).lstrip("._/-")[:MAX_NAME] or "deployment"
    taken = (
        name in RESERVED_NAMES
        or Deployment.objects.filter(name=name, deleted=False).exists()
        or bool(versions_of(name))
        or Adapter.objects.filter(name=name).exists()
    )
    return f"{name}-{public_id[:8]}" if taken else name
