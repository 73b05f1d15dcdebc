"""The names of earlier releases of the vendor's API, and the contradicting ones of its documentation."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACEHOLDER = "string"
"""The documentation's example value of a text."""
SECONDS_PER_MINUTE = 60


@dataclass(slots=True)
class Renamed:
    """The body in the newest release's names. `legacy`: it has the shape of releases without the switch `scale_to_zero`."""

    body: dict[str, Any]
    legacy: bool = False
    warnings: list[str] = field(default_factory=list)


def rename_aliases(body: Mapping[str, Any]) -> Renamed:
    """Unwrap `config`, rename aliases where the canonical name is absent or null, and drop placeholders."""
    top = dict(body)
    config = top.get("config")
    if isinstance(config, dict) and top.get("model") is None:
        top = {"name": top.get("name"), **config}
        if top["name"] is None:
            top["name"] = body.get("name")
    for name in ("initial_worker_config", "autoscaling_config"):
        if isinstance(top.get(name), dict):
            top[name] = dict(top[name])
    renamed = Renamed(top)
    _rename(top, "max_throughput_rate", "min_throughput_rate")
    _rename(top, "logs_bucket_s3", "logs_store")
    _rename_gateway(renamed)
    if isinstance(top.get("autoscaling_config"), dict):
        _rename_scaling(renamed, top["autoscaling_config"])
    if isinstance(top.get("initial_worker_config"), dict):
        _rename_workers(top["initial_worker_config"])
    for name in ("base_model", "logs_store", "hf_token"):
        if top.get(name) == PLACEHOLDER:
            del top[name]
    return renamed


def _rename(values: dict[str, Any], alias: str, *names: str, factor: int = 1) -> bool:
    """Move an alias to its canonical names. Whether it was there."""
    value = values.pop(alias, None)
    if value is None:
        return False
    if factor != 1 and isinstance(value, str):
        with suppress(ValueError):  # what is no number is refused by its canonical name
            value = float(value)
    if factor != 1 and isinstance(value, int | float) and not isinstance(value, bool):
        value *= factor
    for name in names:
        if values.get(name) is None:
            values[name] = value
    return True


def _rename_gateway(renamed: Renamed) -> None:
    gateway = renamed.body.pop("gateway_config", None)
    if gateway is None:
        return
    renamed.legacy = True
    if renamed.body.get("controller_cloud_config") or renamed.body.get("controller_on_prem_config"):
        renamed.warnings.append("gateway_config: the controller's configuration was used instead")
    elif isinstance(gateway, dict):
        rest = {name: value for name, value in gateway.items() if name not in ("name", "region")}
        cloud = {"cloud_provider": gateway.get("name"), "region": gateway.get("region") or "us-east-1", **rest}
        renamed.body["controller_cloud_config"] = cloud
    else:
        renamed.body["controller_cloud_config"] = gateway  # refused there


def _rename_scaling(renamed: Renamed, scaling: dict[str, Any]) -> None:
    windows = ("scale_up_time_window_sec", "scale_down_time_window_sec")
    seconds = _rename(scaling, "time_window_sec", *windows)
    minutes = _rename(scaling, "time_window_minutes", *windows, factor=SECONDS_PER_MINUTE)
    renamed.legacy |= seconds or minutes
    _rename(scaling, "scale_to_zero_timeout_min", "scale_to_zero_timeout_sec", factor=SECONDS_PER_MINUTE)
    _rename(
        scaling,
        "scaling_timeout_min",
        "scaling_up_timeout_sec",
        "scaling_down_timeout_sec",
        factor=SECONDS_PER_MINUTE,
    )


def _rename_workers(workers: dict[str, Any]) -> None:
    same = workers.pop("use_same_gpus_when_scaling", None)
    if same is not None and workers.get("use_other_gpus") is None:
        workers["use_other_gpus"] = not same if isinstance(same, bool) else same
    for name in ("instance_types", "on_prem_node_ids"):
        if isinstance(workers.get(name), list):
            workers[name] = [each for each in workers[name] if each != PLACEHOLDER]
