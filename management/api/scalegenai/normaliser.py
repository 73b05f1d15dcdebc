"""Turns a decoded body into columns of a deployment: aliases of earlier releases, defaults, coercions, all refusals.

Pure functions: they read no database and no files. `wanted` is what an update compares and a create stores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from management.api.scalegenai.aliases import Renamed, rename_aliases
from management.api.scalegenai.arguments import Arguments, parse_arguments
from management.api.scalegenai.contradictions import contradictions
from management.api.scalegenai.errors import FieldError, InvalidFields, Location
from management.api.scalegenai.schema import GPU_TYPES, LATENCIES, STRATEGIES, DeploymentIn, Section
from management.api.scalegenai.secrecy import HIDDEN, without_secrets
from management.autoscale.config import Strategy
from management.chat_template import syntax_error
from management.services.deployments import check_engine_options
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_ONLY = frozenset(
    {
        "success", "message", "id", "user_id", "status", "current_price_per_hour", "cost", "last_cost_updated_time",
        "timestamp", "link", "end_time", "metadata", "imidiate_scale_down",
    }
)  # fmt: skip
"""Fields of answers and updates that a create ignores, so that an answer can be sent back."""

SECTIONS = ("initial_worker_config", "autoscaling_config")
"""Objects whose fields all have defaults."""

THROUGHPUT_OPTIONS = {"max_num_seqs": 128, "max_num_batched_tokens": 4096}
"""`throughput_optimized`: twice the sequences, as more share each reading of the weights, and four times the tokens of a
step, so that the prefills of that many fit beside their decodes. Single requests wait longer for a step.
"""
MAX_EXTRA_CHARACTERS = 65_536
EMBEDDINGS_STRATEGY = (
    f"autoscaling_config.autoscaling_strategy: {Strategy.TTFT} has no meaning for embeddings, {Strategy.RPS} is used"
)


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter to attach: `source` is a directory or a hub id."""

    name: str
    source: str
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A validated body. `columns` are fields of `Deployment`, `vendor_fields` what is only kept and returned.

    `length_field` is the field that sets the engine option `max_model_len`, for a refusal by the model's limit.
    """

    model: str
    columns: dict[str, Any]
    vendor_fields: dict[str, Any]
    engine_options: dict[str, Any]
    loras: tuple[Lora, ...]
    hub_token: str | None = field(default=None, repr=False)
    length_field: str = "max_model_len"


def normalise(body: Mapping[str, Any]) -> Wanted:
    """The deployment that a create asks for. Raises InvalidFields with every wrong field."""
    renamed = rename_aliases(body)
    errors, parsed = _parse(renamed.body)
    given = parsed.autoscaling_config.model_fields_set
    scaling = parsed.autoscaling_config
    # The vendor's program sends its own default, which is an LLM's, whatever is created.
    warnings = []
    if (
        parsed.inf_type == "embedding"
        and scaling.autoscaling_strategy == Strategy.TTFT
        and "autoscaling_strategy" in given
    ):
        warnings.append(EMBEDDINGS_STRATEGY)
    if warnings or ("autoscaling_strategy" not in given and parsed.inf_type != "llm"):
        scaling.autoscaling_strategy = Strategy.RPS
    if scaling.autoscaling_strategy in LATENCIES:
        for side in ("upper", "lower"):  # thresholds win over their earlier names
            if f"{side}_allowed_threshold" not in given and f"{side}_allowed_latency_sec" in given:
                setattr(scaling, f"{side}_allowed_threshold", getattr(scaling, f"{side}_allowed_latency_sec"))
    if renamed.legacy and "scale_to_zero" not in given and not parsed.initial_worker_config.min_workers:
        scaling.scale_to_zero = True  # those releases had a timeout without a switch
    extra = without_secrets(_extra(parsed))
    arguments = parse_arguments(parsed.vllm_extra_args or "")
    options, found = _engine_options(parsed, arguments)
    found += contradictions(parsed)
    if len(str(extra)) > MAX_EXTRA_CHARACTERS:
        found.append(FieldError((), f"unknown fields must have at most {MAX_EXTRA_CHARACTERS} characters", "too_long"))
    wrong = syntax_error(parsed.custom_chat_template or "")
    if wrong:
        found.append(FieldError(("custom_chat_template",), f"must be a Jinja template; {wrong}", "template"))
    # Refused fields have their defaults here, which contradict nothing that the client said.
    refused = {error.location for error in errors}
    errors += [error for error in found if refused.isdisjoint((error.location, *error.against))]
    if errors:
        raise InvalidFields(errors)
    token = _given_token(parsed.hf_token)
    return Wanted(
        model=parsed.model,
        columns=_columns(parsed),
        vendor_fields=_vendor_fields(parsed, arguments, extra, warnings + _warnings(renamed, parsed, arguments)),
        engine_options=options,
        loras=tuple(Lora(each.name, each.hf_repo, _given_token(each.hf_token) or token) for each in parsed.llm_loras),
        hub_token=token,
        length_field="max_model_len" if parsed.max_model_len else "vllm_extra_args",
    )


def _given_token(text: str | None) -> str | None:
    """The token, unless the field is empty or repeats an answer."""
    return text if text and text != HIDDEN else None


def _parse(body: dict[str, Any]) -> tuple[list[FieldError], DeploymentIn]:
    """All errors of single fields, and the body with defaults in their places, so that the rest can be checked as well."""
    try:
        return [], DeploymentIn.model_validate(body)
    except ValidationError as error:
        found = [_field_error(each) for each in error.errors(include_input=False, include_url=False)]
    rest = {
        name: dict(value) if name in SECTIONS and isinstance(value, dict) else value for name, value in body.items()
    }
    for each in found:
        name, *inner = each.location
        if name in SECTIONS and inner:
            rest[name].pop(inner[0], None)
        else:
            rest.pop(str(name), None)
    return found, DeploymentIn.model_validate({"name": "-", "model": "-", **rest})


def _field_error(error: Mapping[str, Any]) -> FieldError:
    return FieldError(tuple(error["loc"]), str(error["msg"]).removeprefix("Value error, "), str(error["type"]))


def _extra(section: Section) -> dict[str, Any]:
    """The unknown fields of an object and of its objects, by the same names."""
    extra = {name: value for name, value in (section.model_extra or {}).items() if name not in ANSWER_ONLY}
    for name in type(section).model_fields:
        value = getattr(section, name)
        for place, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(each, Section) and (inner := _extra(each)):
                extra[name if place is None else f"{name}[{place}]"] = inner
    return extra


def _engine_options(parsed: DeploymentIn, arguments: Arguments) -> tuple[dict[str, Any], list[FieldError]]:
    """The engine options that the body sets, and what is wrong with them."""
    location: Location = ("vllm_extra_args",)
    options = {**(THROUGHPUT_OPTIONS if parsed.throughput_optimized else {}), **arguments.options}
    if parsed.max_model_len:
        options["max_model_len"] = parsed.max_model_len
    errors = [FieldError(location, text) for text in arguments.errors]
    try:
        check_engine_options(options)
    except RegistryError as error:
        texts = [f"{name} {'; '.join(text)}" for name, text in error.fields.items()]
        errors += [FieldError(location, text) for text in texts]
    if parsed.inf_type == "embedding":
        options["task"] = "embed"
    return options, errors


def _columns(parsed: DeploymentIn) -> dict[str, Any]:
    workers, scaling = parsed.initial_worker_config, parsed.autoscaling_config
    return {
        "title": parsed.name,
        "inference_kind": parsed.inf_type,
        "chat_template": parsed.custom_chat_template or "",
        "min_workers": workers.min_workers,
        "max_workers": workers.max_workers,
        "strategy": scaling.autoscaling_strategy.value,
        "upper_threshold": scaling.upper_allowed_threshold,
        "lower_threshold": scaling.lower_allowed_threshold,
        "up_window_s": scaling.scale_up_time_window_sec,
        "down_window_s": scaling.scale_down_time_window_sec,
        "start_timeout_s": scaling.scaling_up_timeout_sec,
        "drain_timeout_s": scaling.scaling_down_timeout_sec,
        "scale_to_zero": scaling.scale_to_zero,
        "idle_timeout_s": scaling.scale_to_zero_timeout_sec,
        "fast_autoscaling": scaling.enable_fast_autoscaling,
        "share_while_starting": scaling.enable_speedup_shared,
        "max_price_per_hour": parsed.max_price_per_hour or None,
        "min_throughput_rate": parsed.min_throughput_rate or None,
        "gpu_type": workers.initial_workers_gpu or "",
        "gpus_per_worker": workers.initial_workers_gpu_num or 0,
        "use_other_gpus": workers.use_other_gpus,
        "expand_gpu_types": workers.expand_gpu_types,
        "spot": parsed.allow_spot_instances,
        "cloud_providers": [{"name": each.name, "regions": each.regions} for each in parsed.cloud_providers],
        "instance_types": workers.instance_types,
        "use_on_prem": workers.use_on_prem,
        "on_prem_node_ids": workers.on_prem_node_ids,
        "use_cloudburst": workers.use_cloudburst,
    }


def _vendor_fields(
    parsed: DeploymentIn, arguments: Arguments, extra: dict[str, Any], warnings: list[str]
) -> dict[str, Any]:
    workers, scaling = parsed.initial_worker_config, parsed.autoscaling_config
    cloud, on_prem = parsed.controller_cloud_config, parsed.controller_on_prem_config
    return {
        "model": parsed.model,
        "base_model": parsed.base_model,
        "engine": parsed.engine or next(iter(STRATEGIES[parsed.inf_type])),
        "logs_store": parsed.logs_store,
        "wait_for_preprov_nodes": workers.wait_for_preprov_nodes,
        "upper_allowed_latency_sec": scaling.upper_allowed_latency_sec,
        "lower_allowed_latency_sec": scaling.lower_allowed_latency_sec,
        "controller_cloud_config": None if cloud is None else _known(cloud),
        "controller_on_prem_config": None if on_prem is None else _known(on_prem),
        "max_model_len": parsed.max_model_len or None,
        "throughput_optimized": parsed.throughput_optimized,
        "agentic_deployment": parsed.agentic_deployment,
        "vllm_extra_args": arguments.kept or None,
        "llm_loras": [{"name": each.name, "hf_repo": each.hf_repo} for each in parsed.llm_loras],
        "extra": extra,
        "warnings": warnings,
    }


def _known(section: Section) -> dict[str, Any]:
    """The fields of the schema alone."""
    found = {name: getattr(section, name) for name in type(section).model_fields}
    return {name: _known(value) if isinstance(value, Section) else value for name, value in found.items()}


def _warnings(renamed: Renamed, parsed: DeploymentIn, arguments: Arguments) -> list[str]:
    found = list(renamed.warnings)
    gpu = parsed.initial_worker_config.initial_workers_gpu
    if gpu and gpu not in GPU_TYPES:
        found.append(f"initial_worker_config.initial_workers_gpu: {gpu} is no known accelerator")
    if parsed.controller_cloud_config or parsed.controller_on_prem_config:
        found.append("no controller is provisioned: `link` says where requests are served, and whether with TLS")
    found += [f"vllm_extra_args: {flag} has no effect" for flag in arguments.unused]
    return found
