"""Changes, scales and deletes deployments."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django.db import transaction
from pydantic import ValidationError

from engine.config import OPTIONS
from management.api.scalegenai.aliases import rename_aliases
from management.api.scalegenai.answers import body_of, served_sources
from management.api.scalegenai.creation import find_adapters, refused_fields
from management.api.scalegenai.errors import ApiError, FieldError, InvalidFields, not_found
from management.api.scalegenai.normaliser import ANSWER_ONLY, SECTIONS, normalise
from management.api.scalegenai.schema import LATENCIES, DeploymentIn, ScaleUpIn, UpdateIn
from management.api.scalegenai.secrecy import HIDDEN
from management.models import Deployment
from management.services import deployments
from management.services.errors import RegistryConflict, RegistryError
from management.services.secrets import HUB_TOKEN, read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from management.api.scalegenai.normaliser import Wanted
    from management.api.scalegenai.sources import FoundAdapter

FIXED = frozenset(DeploymentIn.model_fields) - frozenset(UpdateIn.model_fields)
"""Fields of a create that an update may repeat, not change."""
SCALE_DOWN_AT_ONCE = "imidiate_scale_down"
"""The vendor's spelling."""
CHANGING_VENDOR_FIELDS = (
    "wait_for_preprov_nodes", "upper_allowed_latency_sec", "lower_allowed_latency_sec", "llm_loras", "warnings", "extra",
)  # fmt: skip
TRUE, FALSE = frozenset({"true", "1", "yes"}), frozenset({"false", "0", "no", ""})
_PUBLIC_ID = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)


def find(public_id: str) -> Deployment:
    """The deployment of this id, deleted ones as well until they are purged. Raises ApiError (404)."""
    row = Deployment.objects.select_related("version__model").filter(public_id=checked_id(public_id)).first()
    if row is None:
        raise not_found(public_id)
    return row


def checked_id(public_id: str) -> str:
    """The id, or "" for a text that the database need not be asked about."""
    return public_id if _PUBLIC_ID.fullmatch(public_id) else ""


def update(public_id: str, body: Mapping[str, Any], actor: str) -> None:
    """Change the fields that the body gives; the merged configuration must be valid. Adapters that are new are attached.
    Raises ApiError.
    """
    row = find(public_id)
    # Checked before the downloads, and again with the row that no other change can touch.
    before, wanted = _merged(row, body)
    known = frozenset(lora.name for lora in before.loras)
    adapters = find_adapters(wanted, known, _serviced(lambda: read_secret(row, HUB_TOKEN)))
    _check_ranks(row, wanted, adapters)
    with transaction.atomic():
        # The deployment alone: who removes a model locks that before deployments of it.
        rows = Deployment.objects.select_for_update(of=("self",)).select_related("version__model")
        row = rows.get(pk=row.pk)
        before, wanted = _merged(row, body)
        _change(row, before, wanted, adapters, body.get(SCALE_DOWN_AT_ONCE) is True, actor)


def scale_up(public_id: str, body: Mapping[str, Any], actor: str) -> str:
    """Ask for `vm_num` more workers, or wake a deployment without any. Returns what happens. Raises ApiError."""
    try:
        workers = ScaleUpIn.model_validate(body).vm_num
    except ValidationError as error:
        raise InvalidFields(
            FieldError(tuple(each["loc"]), each["msg"], each["type"]) for each in error.errors()
        ) from error
    row = find(public_id)
    changed = _serviced(lambda: deployments.scale_up(row, actor, workers))
    return "scaling up" if changed else "already scaling up"


def scale_to_zero(public_id: str, force: str, actor: str) -> str:
    """Remove all workers. Returns what happens. Raises ApiError."""
    row, at_once = find(public_id), _flag("force", force)
    changed = _serviced(lambda: deployments.stop_deployment(row, actor, at_once))
    return "scaling to zero" if changed else "already scaled to zero"


def delete(public_id: str, force: str, actor: str) -> str:
    """Delete; the row stays as a record. Returns what happens. Raises ApiError."""
    row, at_once = find(public_id), _flag("force", force)
    changed = _serviced(lambda: deployments.delete_deployment(row, actor, at_once))
    return "deleting" if changed else "already deleted"


def _serviced(call: Any) -> Any:
    try:
        return call()
    except RegistryConflict as error:
        raise ApiError(409, str(error)) from error
    except RegistryError as error:
        raise refused_fields(error) from error


def _flag(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in TRUE | FALSE:
        raise InvalidFields([FieldError((name,), "must be True or False", "bool_parsing", "query")])
    return value in TRUE


def _merged(row: Deployment, body: Mapping[str, Any]) -> tuple[Wanted, Wanted]:
    """The deployment as it is, and as the update wants it. Raises InvalidFields, or ApiError (409) for a deleted one."""
    if row.deleted:
        raise ApiError(409, f"{row.title or row.name} is deleted")
    current = body_of(row)
    patch = {
        name: value
        for name, value in rename_aliases(body).body.items()
        if value is not None and (name not in ANSWER_ONLY) and not (name == "hf_token" and value == HIDDEN)
    }
    errors = [
        FieldError((name,), "cannot be changed after the create", "frozen_field")
        for name in patch
        if name in FIXED and patch[name] != current[name]
    ]
    at_once = body.get(SCALE_DOWN_AT_ONCE)
    if at_once is not None and not isinstance(at_once, bool):
        errors.append(FieldError((SCALE_DOWN_AT_ONCE,), "must be a boolean", "bool_type"))
    merged = {**current, **{name: value for name, value in patch.items() if name not in FIXED}}
    for name in SECTIONS:
        section = patch.get(name)
        if isinstance(section, dict):
            given = {field: value for field, value in section.items() if value is not None}
            kept = dict(current[name])
            if given.get("autoscaling_strategy", kept.get("autoscaling_strategy")) in LATENCIES:
                _yield_thresholds(kept, given)
            merged[name] = {**kept, **given}
    if isinstance(patch.get("llm_loras"), list):
        loras = _without_repeats(patch["llm_loras"], current["llm_loras"], served_sources(row))
        names = [each.get("name") for each in loras if isinstance(each, dict)]
        merged["llm_loras"] = [each for each in current["llm_loras"] if each["name"] not in names] + loras
    try:
        wanted = normalise(merged)
    except InvalidFields as error:
        raise InvalidFields([*errors, *error.errors]) from error
    before = normalise(current)
    known_warnings = before.vendor_fields["warnings"]  # of defaults that nobody gave
    new = [each for each in wanted.vendor_fields["warnings"] if each not in known_warnings]
    wanted.vendor_fields["warnings"] = new
    sources = {lora.name: lora.source for lora in before.loras}
    errors += [
        FieldError(("llm_loras",), f"{lora.name} is attached with another source", "frozen_field")
        for lora in wanted.loras
        if sources.get(lora.name, lora.source) != lora.source
    ]
    if errors:
        raise InvalidFields(errors)
    return before, wanted


def _without_repeats(given: list[Any], attached: list[dict[str, Any]], served: Mapping[str, str]) -> list[Any]:
    """The given adapters without those that an answer shows and no client attached here: they are served as they are."""
    own = [each["name"] for each in attached]
    shown = [(name, source) for name, source in served.items() if name not in own]
    return [
        each
        for each in given
        if not isinstance(each, dict) or (each.get("name"), each.get("hf_repo", each.get("src"))) not in shown
    ]


def _check_ranks(row: Deployment, wanted: Wanted, found: tuple[FoundAdapter, ...]) -> None:
    """Running workers have room for adapters of a limited rank."""
    limit = row.engine_options.get("max_adapter_rank", OPTIONS["max_adapter_rank"].default)
    too_large = {each.name for each in found if each.stored.rank > limit}
    if too_large:
        raise InvalidFields(
            FieldError(("llm_loras", index, "hf_repo"), f"must have a rank of at most {limit}", "less_than_equal")
            for index, lora in enumerate(wanted.loras)
            if lora.name in too_large
        )


def _yield_thresholds(kept: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Earlier releases know only the latencies: theirs replace the present thresholds."""
    for side in ("upper", "lower"):
        if f"{side}_allowed_latency_sec" in given and f"{side}_allowed_threshold" not in given:
            del kept[f"{side}_allowed_threshold"]


def _change(
    row: Deployment, before: Wanted, wanted: Wanted, found: tuple[FoundAdapter, ...], at_once: bool, actor: str
) -> None:
    """Write what differs, so that a change of other fields in between stays."""
    fields = {name: value for name, value in wanted.columns.items() if value != before.columns[name]}
    fields["immediate_scale_down"] = at_once
    changed = {name: wanted.vendor_fields[name] for name in CHANGING_VENDOR_FIELDS if name not in ("extra", "warnings")}
    changed["extra"] = {**row.vendor_fields.get("extra", {}), **wanted.vendor_fields["extra"]}
    warnings = row.vendor_fields.get("warnings", [])
    changed["warnings"] = [*warnings, *(each for each in wanted.vendor_fields["warnings"] if each not in warnings)]
    fields["vendor_fields"] = {**row.vendor_fields, **changed}
    places = {lora.name: index for index, lora in enumerate(wanted.loras)}
    wanted_still = [each for each in found if each.name in places]  # or it has come to be served meanwhile
    for each in wanted_still:
        each.register(row, ("llm_loras", places[each.name]), actor)
    _serviced(lambda: deployments.change_deployment(row, actor, **fields))
