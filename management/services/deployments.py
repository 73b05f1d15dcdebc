"""Writes the desired state of deployments: create, start, stop, scale, change, delete. The reconciler acts on it.

Each change locks the deployment's row, so of two changes at once the second sees what the first did. Changes that concern
several rows, such as which one is the default, come one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import Q

from engine.config import OPTIONS, RESERVED, EngineConfig
from management import adapter_store
from management.model_files import longest_sequence
from management.models import Adapter, AdapterVersion, Deployment
from management.models.deployment import MAX_WORKERS
from management.services import audit
from management.services.errors import RegistryConflict, RegistryError, did_you_mean, refused

if TYPE_CHECKING:
    from management.models import ModelVersion

RESERVED_NAMES = {"tgi", "dummy"}
CHANGES_OF_SEVERAL = 0x64726167
"""PostgreSQL's advisory lock of changes that concern several deployments (pg_advisory_xact_lock)."""

CHANGEABLE = frozenset(
    {
        "version", "engine_options", "chat_template", "min_workers", "max_workers", "prefill_workers", "strategy", "upper_threshold",
        "lower_threshold", "up_window_s", "down_window_s", "start_timeout_s", "drain_timeout_s", "scale_to_zero",
        "idle_timeout_s", "fast_autoscaling", "share_while_starting", "immediate_scale_down", "max_price_per_hour",
        "min_throughput_rate", "gpu_type", "gpus_per_worker", "use_other_gpus", "expand_gpu_types", "spot",
        "cloud_providers", "instance_types", "use_on_prem", "on_prem_node_ids", "use_cloudburst", "vendor_fields",
    }
)  # fmt: skip
"""The fields that `change_deployment` sets."""


@transaction.atomic
def create_deployment(
    name: str,
    version: ModelVersion,
    actor: str,
    engine_options: dict[str, Any] | None = None,
    **fields: Any,
) -> Deployment:
    """Create a stopped deployment; the first one becomes the default. `fields` are columns of `Deployment`.

    Raises RegistryError.
    """
    if name in RESERVED_NAMES:
        raise RegistryError(f"name: {name} always means the default deployment", fields={"name": ["is reserved"]})
    one_after_the_other()
    for each in {name, str(fields.get("served_name") or name)}:
        _refuse_adapters_name(each)
    first = not Deployment.objects.filter(is_default=True).exists()
    others = versions_of(str(fields.get("served_name") or name))
    fields.setdefault("is_default_version", not any(other.is_default_version for other in others))
    fields.setdefault("title", name)
    deployment = Deployment(
        name=name,
        version=version,
        engine_options=engine_options or {},
        is_default=first,
        owner=actor,
        **fields,
    )
    _save(deployment)
    audit.record(actor, "deployment.create", name, version=str(version), **_shown(deployment))
    return deployment


@transaction.atomic
def start_deployment(deployment: Deployment, actor: str, replicas: int | None = None) -> None:
    """Ask for this many workers (None: the minimum, at least 1), and raise the generation, which resets a failed deployment.

    A number beyond the limits moves the limit, as a person's word is newer than the configuration.
    """
    current = _locked(deployment)
    if replicas is None:
        replicas = max(1, current.min_workers)
    if not 1 <= replicas <= MAX_WORKERS:
        raise RegistryError(
            f"replicas: must be between 1 and {MAX_WORKERS}, got {replicas}",
            fields={"replicas": [f"must be between 1 and {MAX_WORKERS}"]},
        )
    limits = current.min_workers, current.max_workers
    if current.min_workers == current.max_workers:  # a fixed number of workers
        current.min_workers = current.max_workers = replicas
    current.max_workers = max(current.max_workers, replicas)
    if limits != (current.min_workers, current.max_workers):
        _save(current)
    _ask(current, replicas)
    audit.record(actor, "deployment.start", deployment.name, replicas=replicas)


@transaction.atomic
def stop_deployment(deployment: Deployment, actor: str, force: bool = False) -> bool:
    """Ask for no workers; running workers finish their requests first, unless `force`. A deployment that may sleep is
    woken by its next request. False if it is stopped already.
    """
    current = _locked(deployment)
    if current.stopped and (current.force or not force):
        return False
    current.force = force
    _ask(current, 0, force)
    audit.record(actor, "deployment.stop", deployment.name, force=force)
    return True


@transaction.atomic
def scale_up(deployment: Deployment, actor: str, workers: int = 1) -> bool:
    """Ask for `workers` more, or wake or restart a deployment without workers. False if it is starting already, so that
    nothing changes. Raises RegistryConflict at the maximum or in deletion.
    """
    current = _locked(deployment)
    if current.current_state == str(Deployment.State.PROVISIONING):
        return False
    if current.current_state == str(Deployment.State.ACTIVE):
        wanted = current.wanted_workers + workers
        if wanted > current.max_workers:
            raise RegistryConflict(
                f"max_workers: {current.name} has {current.wanted_workers} of at most {current.max_workers} workers",
                fields={"max_workers": [f"is {current.max_workers}"]},
            )
    else:
        wanted = max(1, current.min_workers)
    _ask(current, wanted)
    audit.record(actor, "deployment.scale_up", deployment.name, workers=wanted)
    return True


@transaction.atomic
def delete_deployment(deployment: Deployment, actor: str, force: bool = False) -> bool:
    """Delete, with its adapters: workers finish their requests, unless `force`; the row stays as a record until it is
    purged. False if it is being deleted already, and `force` says nothing new.
    """
    one_after_the_other()
    current = Deployment.objects.select_for_update().get(pk=deployment.pk)
    if current.deleted and (current.force or not force):
        return False
    repeated = current.deleted
    current.deleted, current.force, current.is_default = True, force, False
    _ask(current, 0, force)
    heirs = versions_of(current.served_as)
    if heirs and not any(heir.is_default_version for heir in heirs):
        Deployment.objects.filter(pk=heirs[0].pk).update(is_default_version=True)
    current.keys.update(revoked=True)
    adapter_store.release(
        AdapterVersion.objects.filter(adapter__deployment=current).values_list("directory", flat=True)
    )
    current.adapters.all().delete()
    if not repeated:
        audit.record(actor, "deployment.delete", deployment.name, force=force)
    return True


@transaction.atomic
def set_workers(deployment: Deployment, actor: str, minimum: int, maximum: int) -> None:
    """Set the limits of the number of workers, and ask for the number within them that is nearest to the present one; a maximum
    of 0 stops the deployment. Raises RegistryError.
    """
    current = _locked(deployment)
    for name, value in (("min_workers", minimum), ("max_workers", maximum)):
        if not 0 <= value <= MAX_WORKERS:
            text = f"must be between 0 and {MAX_WORKERS}"
            raise RegistryError(f"{name}: {text}, got {value}", fields={name: [text]})
    if minimum > maximum:
        text = f"must be at least min_workers, which is {minimum}"
        raise RegistryError(f"max_workers: {text}, got {maximum}", fields={"max_workers": [text]})
    now = current.wanted_workers or current.replicas  # the number that it sleeps or has failed with
    current.min_workers, current.max_workers = minimum, max(1, maximum)
    current.scale_to_zero = current.scale_to_zero and not minimum
    _save(current)
    _ask(current, min(max(now, minimum), maximum))
    audit.record(actor, "deployment.scale", deployment.name, min_workers=minimum, max_workers=maximum)


def versions_of(served_name: str) -> list[Deployment]:
    """The deployments that are versions of a served name, oldest first; within a transaction they are locked."""
    rows = Deployment.objects.all()
    if connection.in_atomic_block:
        one_after_the_other()
        rows = rows.select_for_update()
    own = Q(served_name=served_name) | Q(served_name="", name=served_name)
    return list(rows.filter(own, deleted=False).order_by("created_at", "pk"))


@transaction.atomic
def make_default_version(deployment: Deployment, actor: str) -> None:
    """Let this deployment answer the requests for its served name that give no version."""
    one_after_the_other()
    current = _locked(deployment)
    others = [other.pk for other in versions_of(current.served_as)]
    Deployment.objects.filter(pk__in=others).update(is_default_version=False)
    Deployment.objects.filter(pk=current.pk).update(is_default_version=True)
    audit.record(actor, "deployment.make_default_version", deployment.name, served_name=current.served_as)


@transaction.atomic
def make_default(deployment: Deployment, actor: str) -> None:
    """Make this deployment the one that answers requests without a model name."""
    one_after_the_other()
    _locked(deployment)
    Deployment.objects.filter(is_default=True).update(is_default=False)
    Deployment.objects.filter(pk=deployment.pk).update(is_default=True)
    audit.record(actor, "deployment.make_default", deployment.name)


@transaction.atomic
def change_deployment(deployment: Deployment, actor: str, **fields: Any) -> None:
    """Set fields of `CHANGEABLE`. Raises RegistryError, and then changes nothing.

    Scaling rules act at once. A running deployment replaces its workers one after another for another version or other
    engine options.
    """
    unknown = sorted(set(fields) - CHANGEABLE)
    if unknown:
        raise RegistryError(f"{unknown[0]}: cannot be changed", fields={unknown[0]: ["cannot be changed"]})
    current = _locked(deployment)
    before, model = _shown(current) | {"version": str(current.version)}, current.version.model_id
    for name, value in fields.items():
        setattr(current, name, value)
    current.generation += 1
    if current.version.model_id != model:
        _refuse_adapters(current)
    _save(current)
    after = _shown(current) | {"version": str(current.version)}
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    audit.record(actor, "deployment.change", deployment.name, **changed)


def _refuse_adapters(deployment: Deployment) -> None:
    """Refuse another model while there are adapters, whose weights are not that one's. Raises RegistryError."""
    names = ", ".join(adapter.name for adapter in deployment.adapters.all()[:10])
    if names:
        text = f"is another model's; remove the adapters first: {names}"
        raise RegistryError(f"version: {text}", fields={"version": [text]})


def _refuse_adapters_name(name: str) -> None:
    """Refuse a name by which clients know an adapter: they would get the new deployment instead. Raises RegistryError."""
    owner = Adapter.objects.filter(name=name).values_list("deployment__name", flat=True).first()
    if owner is not None:
        text = f"is the name of an adapter of {owner}"
        raise RegistryError(f"name: {name} {text}", fields={"name": [text]})


def one_after_the_other() -> None:
    """Wait for other changes that concern several deployments, before any of their rows or of their models' is locked: two that locked
    the same rows in different orders would wait for each other, and rows that are not there yet cannot be locked. SQLite has one
    writer anyway.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [CHANGES_OF_SEVERAL])


def _locked(deployment: Deployment) -> Deployment:
    """The row as it is now, locked until the end of the transaction. Raises RegistryConflict for a deleted one."""
    current = Deployment.objects.select_for_update().filter(pk=deployment.pk).first()
    if current is None or current.deleted:
        raise RegistryConflict(f"{deployment.name} is deleted")
    return current


def _ask(current: Deployment, replicas: int, force: bool = False) -> None:
    """Record the number of workers that a person asked for."""
    current.replicas, current.force = replicas, force
    current.generation += 1
    current.asked_generation = current.generation
    current.save(
        update_fields=[
            "asked_generation",
            "replicas",
            "force",
            "generation",
            "min_workers",
            "max_workers",
            "deleted",
            "is_default",
        ]
    )


def _save(deployment: Deployment) -> None:
    """Validate and save. Raises RegistryError with all refused fields."""
    check_engine_options(deployment.engine_options)
    try:
        deployment.full_clean()
    except ValidationError as error:
        raise refused(error) from error
    asked = deployment.engine_options.get("max_model_len") or 0
    limit = longest_sequence(deployment.version.source) if asked else None
    if limit is not None and asked > limit:
        text = f"must be at most {limit}, the model's own limit, got {asked}"
        raise RegistryError(f"engine_options.max_model_len: {text}", fields={"max_model_len": [text]})
    deployment.save()


def _shown(deployment: Deployment) -> dict[str, Any]:
    """The fields of `CHANGEABLE` that are not at their defaults, for audit events; secrets are not among them."""
    found = {}
    for name in sorted(CHANGEABLE - {"version", "vendor_fields", "chat_template"}):
        value = getattr(deployment, name)
        if value != Deployment._meta.get_field(name).get_default():
            found[name] = value
    return found


def check_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Validate engine options and return them. Raises RegistryError that names the field."""
    if not isinstance(options, dict):
        raise RegistryError("engine_options: must be an object", fields={"engine_options": ["must be an object"]})
    reserved = sorted(RESERVED & set(options))
    if reserved:
        raise RegistryError(f"engine_options.{reserved[0]}: is set by the launcher")
    wrong = {name: _option_error(name, value) for name, value in options.items()}
    fields = {name: [text] for name, text in wrong.items() if text}
    if fields:
        raise RegistryError(
            "; ".join(f"engine_options.{name}: {texts[0]}" for name, texts in fields.items()), fields=fields
        )
    try:
        msgspec.convert({**options, "model": "x"}, EngineConfig)
    except (msgspec.ValidationError, ValueError) as error:  # options that contradict each other
        raise RegistryError(f"engine_options: {error}", fields={"engine_options": [str(error)]}) from error
    return options


def _option_error(name: str, value: Any) -> str:
    """What is wrong with one engine option by itself; "" if nothing is."""
    if name not in OPTIONS:
        return f"is no engine option{did_you_mean(name, OPTIONS)}"
    option = OPTIONS[name]
    try:
        msgspec.convert(value, option.type)
    except msgspec.ValidationError as error:
        return str(error)
    lowest, highest = option.option.minimum, option.option.maximum
    if lowest is not None and highest is not None and not lowest <= value <= highest:
        return f"must be between {lowest} and {highest}, got {value}"
    return ""
