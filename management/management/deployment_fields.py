"""The fields of a deployment as arguments of commands."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from typing import TYPE_CHECKING, Any

from engine.config import OPTIONS
from management.autoscale.config import Strategy
from management.models import Deployment
from management.services.errors import RegistryError, did_you_mean

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

FIELDS = {
    "min_workers": int,
    "max_workers": int,
    "prefill_workers": int,
    "upper_threshold": float,
    "lower_threshold": float,
    "up_window_s": int,
    "down_window_s": int,
    "start_timeout_s": int,
    "drain_timeout_s": int,
    "idle_timeout_s": int,
    "max_price_per_hour": float,
    "min_throughput_rate": float,
    "gpu_type": str,
    "gpus_per_worker": int,
}
SWITCHES = ("scale_to_zero", "spot", "use_on_prem", "use_cloudburst", "use_other_gpus", "expand_gpu_types")
LISTS = ("on_prem_node_ids", "instance_types")


def add_fields(parser: CommandParser) -> None:
    """Add an argument for each field; those that are not given are None."""
    kinds: dict[str, dict[str, Any]] = {name: {"type": kind} for name, kind in FIELDS.items()}
    kinds |= {key: {"action": BooleanOptionalAction} for key in SWITCHES}
    kinds |= {key: {"nargs": "*", "metavar": "NAME"} for key in LISTS}
    for name, how in kinds.items():
        help_text = Deployment._meta.get_field(name).help_text or None
        parser.add_argument(f"--{name.replace('_', '-')}", help=help_text, **how)
    parser.add_argument("--strategy", choices=[each.value for each in Strategy])
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="An engine option; may be repeated."
    )


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """The given fields, by name."""
    return {name: options[name] for name in (*FIELDS, *SWITCHES, *LISTS, "strategy") if options[name] is not None}


def pair(text: str, name: str) -> tuple[str, str]:
    """The two sides of NAME=VALUE. Raises RegistryError."""
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise RegistryError(f"{name}: NAME=VALUE is expected, got {text!r}")
    return key, value


def option(text: str) -> tuple[str, Any]:
    """An engine option, converted to its type. Raises RegistryError."""
    name, value = pair(text, "option")
    if name not in OPTIONS:
        raise RegistryError(f"option: {name} is no engine option{did_you_mean(name, OPTIONS)}")
    kind = OPTIONS[name].type
    try:
        if kind is bool:
            return name, {"true": True, "false": False}[value.lower()]
        return name, kind(value) if kind in (int, float) else value
    except (ValueError, KeyError) as error:
        raise RegistryError(f"option: {name} must be of the type {kind.__name__}, got {value!r}") from error
