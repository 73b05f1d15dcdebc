"""Read a LoRA adapter in PEFT's format: safetensors alone, every tensor checked before it is read.

The tensors' own names say which modules are adapted (`target_modules` may list some that do not exist). What would
change more than the products of linear layers is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 1 << 18
PREFIX = "base_model.model."
REFUSED = (
    "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip
"""Fields of PEFT that must be absent, null or false."""
REFUSED_INITS = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise an adapter that rewrite the base model's weights."""


class AdapterError(Exception):
    """The adapter cannot be served; the text says why."""


@dataclass(slots=True)
class LoraWeights:
    """One module's adapter: y += B A x, scaling folded into B. a: [r, in], b: [out, r], magnitude [out], all float32.

    With a magnitude (DoRA, arXiv 2402.09353) each output column is scaled to it.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None


@dataclass(slots=True)
class Adapter:
    """All adapted modules, by their path in the model."""

    modules: dict[str, LoraWeights]


def never() -> None:
    """Do not pause."""


def content_digest(directory: Path, pause: Callable[[], None] = never) -> str:
    """SHA-256 over the two files' own SHA-256; raises AdapterError when one is missing. `pause` is called now and then."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise AdapterError(f"{name} is missing")
        own = hashlib.sha256()
        with (directory / name).open("rb") as file:
            while part := file.read(PART_BYTES):
                own.update(part)
                pause()
        digest.update(own.digest())
    return digest.hexdigest()


def read_adapter(
    directory: Path, shapes: dict[str, tuple[int, int]], max_rank: int, pause: Callable[[], None] = never
) -> Adapter:
    """The adapter in `directory` for a model whose linear layers are `shapes` (path -> (out, in)); raises AdapterError."""
    config = _read_config(directory)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                path, part = _parse(key)
                if path not in shapes:
                    raise AdapterError(f"{key}: the model has no linear layer {path} that takes adapters")
                shape = tuple(file.get_slice(key).get_shape())
                _check_shape(key, part, shape, shapes[path], max_rank)
                parts.setdefault(path, {})[part] = file.get_tensor(key).float()
                pause()
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS} cannot be read: {error}") from error
    if not parts:
        raise AdapterError(f"{WEIGHTS} holds no adapted layer")
    modules = {}
    for path, tensors in parts.items():
        modules[path] = _weights(path, tensors, config)
        pause()
    return Adapter(modules)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type must be LORA")
    if config.get("bias", "none") != "none":
        raise AdapterError(f'{CONFIG}: bias must be "none", got {config["bias"]!r}')
    for name in REFUSED:
        if config.get(name):
            raise AdapterError(f"{CONFIG}: {name} is not supported")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(REFUSED_INITS):
        raise AdapterError(f"{CONFIG}: init_lora_weights {init!r} rewrites the base model's weights")
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), (int, float)) or not config[name] > 0:
            raise AdapterError(f"{CONFIG}: {name} must be a positive number")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(isinstance(v, (int, float)) and v > 0 for v in pattern.values()):
            raise AdapterError(f"{CONFIG}: {name} must map module names to positive numbers")
    return config


def _parse(key: str) -> tuple[str, str]:
    """A tensor's module path and which of its parts it is: "a", "b" or "magnitude"."""
    match = re.fullmatch(r"(.+)\.(?:lora_(A|B)\.weight|lora_magnitude_vector(?:\.weight)?)", key)
    if match is None or not key.startswith(PREFIX):
        raise AdapterError(f"{key}: only LoRA on linear layers is supported")
    return match[1].removeprefix(PREFIX), (match[2] or "magnitude").lower()


def _check_shape(key: str, part: str, shape: tuple[int, ...], layer: tuple[int, int], max_rank: int) -> None:
    out_features, in_features = layer
    rank = shape[0] if part == "a" else shape[-1]
    wanted = {"a": (rank, in_features), "b": (out_features, rank), "magnitude": (out_features,)}[part]
    if shape != wanted:
        raise AdapterError(f"{key}: its shape is {list(shape)}, the layer takes {list(wanted)}")
    if part != "magnitude" and not 1 <= rank <= max_rank:
        raise AdapterError(f"{key}: the rank must be between 1 and {max_rank}, got {rank}")


def _weights(path: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> LoraWeights:
    if "a" not in tensors or "b" not in tensors:
        raise AdapterError(f"{path}: lora_A or lora_B is missing")
    if bool(config.get("use_dora")) != ("magnitude" in tensors):
        raise AdapterError(f"{path}: use_dora and the magnitude vectors do not fit together")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise AdapterError(f"{path}: a weight is not a finite number")
    rank = int(_pattern(path, config.get("rank_pattern"), config["r"]))
    if tensors["a"].shape[0] != rank or tensors["b"].shape[1] != rank:
        raise AdapterError(f"{path}: the rank is {tensors['a'].shape[0]}, {CONFIG} says {rank}")
    alpha = float(_pattern(path, config.get("alpha_pattern"), config["lora_alpha"]))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraWeights(tensors["a"], tensors["b"] * scaling, tensors.get("magnitude"))


def _pattern(path: str, patterns: dict[str, Any] | None, default: Any) -> Any:
    """The first pattern that ends the path, as peft matches them (peft.utils.get_pattern_key)."""
    for pattern, value in (patterns or {}).items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", path)
        except re.error as error:
            raise AdapterError(f"{CONFIG}: {pattern!r} is no pattern: {error}") from error
        if found:
            return value
    return default
