"""Refuses fields that are right alone and contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from management.api.scalegenai.errors import FieldError
from management.api.scalegenai.schema import SERVED_TYPES, STRATEGIES

if TYPE_CHECKING:
    from management.api.scalegenai.schema import DeploymentIn

MIN_WORKERS = ("initial_worker_config", "min_workers")


def contradictions(parsed: DeploymentIn) -> list[FieldError]:
    """An error for each contradiction, at the field that a client would change."""
    return [*_kinds(parsed), *_scaling(parsed), *_throughput(parsed), *_controllers(parsed), *_loras(parsed)]


def _kinds(parsed: DeploymentIn) -> list[FieldError]:
    kind, scaling = parsed.inf_type, parsed.autoscaling_config
    if kind not in SERVED_TYPES:
        text = f"must be one of {', '.join(SERVED_TYPES)}; {kind} is not supported by this server"
        return [FieldError(("inf_type",), text, "not_supported")]
    engines = STRATEGIES[kind]
    engine: str = parsed.engine or next(iter(engines))
    if engine not in engines:
        text = f"must be one of {', '.join(engines)} for {kind}, got {engine}"
        return [FieldError(("engine",), text, "not_supported", against=(("inf_type",),))]
    if scaling.autoscaling_strategy not in engines[engine]:
        text = (
            f"must be one of {', '.join(engines[engine])} for {kind} and {engine}, got {scaling.autoscaling_strategy}"
        )
        against = (("inf_type",), ("engine",))
        return [FieldError(("autoscaling_config", "autoscaling_strategy"), text, "not_supported", against=against)]
    return []


def _scaling(parsed: DeploymentIn) -> list[FieldError]:
    workers, scaling = parsed.initial_worker_config, parsed.autoscaling_config
    found = []
    if workers.min_workers > workers.max_workers:
        text = f"must be at least min_workers, which is {workers.min_workers}, got {workers.max_workers}"
        found.append(FieldError(("initial_worker_config", "max_workers"), text, against=(MIN_WORKERS,)))
    upper, lower = scaling.upper_allowed_threshold, scaling.lower_allowed_threshold
    if lower >= upper:
        text = f"must be below upper_allowed_threshold, which is {upper:g}, got {lower:g}"
        against = (
            ("autoscaling_config", "upper_allowed_threshold"),
            ("autoscaling_config", "upper_allowed_latency_sec"),
        )
        found.append(FieldError(("autoscaling_config", "lower_allowed_threshold"), text, against=against))
    if scaling.scale_to_zero and workers.min_workers:
        text = f"conflicts with min_workers {workers.min_workers}; to scale to zero, min_workers must be 0"
        found.append(FieldError(("autoscaling_config", "scale_to_zero"), text, "conflict"))
    return found


def _throughput(parsed: DeploymentIn) -> list[FieldError]:
    if not parsed.min_throughput_rate:
        return []
    workers = parsed.initial_worker_config
    names = ("min_workers", "initial_workers_gpu", "initial_workers_gpu_num", "instance_types")
    text = "conflicts with min_throughput_rate; one of them must be absent or 0"
    return [FieldError(("initial_worker_config", name), text, "conflict") for name in names if getattr(workers, name)]


def _controllers(parsed: DeploymentIn) -> list[FieldError]:
    if parsed.controller_cloud_config is None or parsed.controller_on_prem_config is None:
        return []
    text = "conflicts with controller_cloud_config; one of them must be null"
    return [FieldError(("controller_on_prem_config",), text, "conflict")]


def _loras(parsed: DeploymentIn) -> list[FieldError]:
    if parsed.llm_loras and parsed.inf_type == "embedding":
        text = "embedding models take no adapters; must be empty"
        return [FieldError(("llm_loras",), text, "conflict", against=(("inf_type",),))]
    found, seen = [], set()
    for index, lora in enumerate(parsed.llm_loras):
        if lora.name in seen:
            found.append(FieldError(("llm_loras", index, "name"), "must differ from the names before it"))
        seen.add(lora.name)
    return found
