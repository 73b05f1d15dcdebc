"""A LoRA adapter in PEFT's format: safetensors alone, every tensor checked before it is made.

The tensors' own names say which modules are adapted (`target_modules` may list some that do not exist). What would
change more than the products of linear layers is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.adapters.files import CONFIG, WEIGHTS, AdapterError, Tensor, never, read_files, read_header
from engine.adapters.patterns import match

PREFIX = "base_model.model."
REFUSED = (
    "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip
"""Fields of PEFT that must be absent, null or false."""
REFUSED_INITS = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise an adapter that rewrite the base model's weights."""


MAX_RANK = 256
"""Of any engine; see `engine.config`."""
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
TENSORS = 3
"""Of one module: A, B and a magnitude."""


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


def most_header_bytes(shapes: dict[str, tuple[int, int]]) -> int:
    """Enough for every module's tensors and some metadata."""
    return (1 << 20) + 512 * TENSORS * len(shapes)


def most_weights_bytes(shapes: dict[str, tuple[int, int]], max_rank: int) -> int:
    """The length of the longest file that could be served: every module adapted with `max_rank` in float32."""
    numbers = sum(max_rank * (out + inputs) + out for out, inputs in shapes.values())
    return 4 * numbers + most_header_bytes(shapes)


def read_adapter(
    directory: Path,
    shapes: dict[str, tuple[int, int]],
    max_rank: int,
    pause: Callable[[], None] = never,
    digest: str | None = None,
) -> Adapter:
    """The adapter in `directory` for a model whose linear layers are `shapes` (path -> (out, in)); raises AdapterError, also
    when its content is not what `digest` stands for.
    """
    files = read_files(directory, most_weights_bytes(shapes, max_rank), pause)
    if digest is not None and files.digest != digest:
        raise AdapterError("its files have changed since it was registered")
    _check_config(files.config)
    tensors, data = read_header(files.weights, most_header_bytes(shapes))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        path, part = _parse(key)
        if path not in shapes:
            raise AdapterError(f"{key}: the model has no linear layer {path} that takes adapters")
        _check_shape(key, part, tensor.shape, shapes[path], max_rank)
        parts.setdefault(path, {})[part] = _tensor(tensor, data)
        pause()
    if not parts:
        raise AdapterError(f"{WEIGHTS} holds no adapted layer")
    ranks, alphas = (match(name, files.config.get(name) or {}, parts) for name in ("rank_pattern", "alpha_pattern"))
    modules = {}
    for path, weights in parts.items():
        rank, alpha = ranks.get(path, files.config["r"]), alphas.get(path, files.config["lora_alpha"])
        modules[path] = _weights(path, weights, files.config, rank, alpha)
        pause()
    return Adapter(modules)


def _tensor(tensor: Tensor, data: memoryview) -> torch.Tensor:
    begin, end = tensor.data_offsets
    own = bytearray(data[begin:end])  # a view would keep the whole file in memory
    return torch.frombuffer(own, dtype=TYPES[tensor.dtype]).view(tensor.shape).float()


def _check_config(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type must be LORA")
    if config.get("bias", "none") != "none":
        raise AdapterError(f'{CONFIG}: bias must be "none", got {str(config["bias"])[:50]!r}')
    for name in REFUSED:
        if config.get(name):
            raise AdapterError(f"{CONFIG}: {name} is not supported")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(REFUSED_INITS):
        raise AdapterError(f"{CONFIG}: init_lora_weights {init[:50]!r} rewrites the base model's weights")
    if not _is_rank(config.get("r")):
        raise AdapterError(f"{CONFIG}: r must be an integer between 1 and {MAX_RANK}")
    if not _is_alpha(config.get("lora_alpha")):
        raise AdapterError(f"{CONFIG}: lora_alpha must be a positive number")
    for name, fits, kind in (
        ("rank_pattern", _is_rank, f"integers between 1 and {MAX_RANK}"),
        ("alpha_pattern", _is_alpha, "positive numbers"),
    ):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(fits, pattern.values())):
            raise AdapterError(f"{CONFIG}: {name} must map module names to {kind}")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _parse(key: str) -> tuple[str, str]:
    """A tensor's module path and which of its parts it is: "a", "b" or "magnitude"."""
    found = re.fullmatch(r"(.+)\.(?:lora_(A|B)\.weight|lora_magnitude_vector(?:\.weight)?)", key)
    if found is None or not key.startswith(PREFIX):
        raise AdapterError(f"{key}: only LoRA on linear layers is supported")
    return found[1].removeprefix(PREFIX), (found[2] or "magnitude").lower()


def _check_shape(key: str, part: str, shape: tuple[int, ...], layer: tuple[int, int], max_rank: int) -> None:
    out_features, in_features = layer
    rank = shape[0] if part == "a" else shape[-1]
    wanted = {"a": (rank, in_features), "b": (out_features, rank), "magnitude": (out_features,)}[part]
    if shape != wanted:
        raise AdapterError(f"{key}: its shape is {list(shape)}, the layer takes {list(wanted)}")
    if part != "magnitude" and not 1 <= rank <= max_rank:
        raise AdapterError(f"{key}: the rank must be between 1 and {max_rank}, got {rank}")


def _weights(
    path: str, tensors: dict[str, torch.Tensor], config: dict[str, Any], rank: int, alpha: float
) -> LoraWeights:
    if "a" not in tensors or "b" not in tensors:
        raise AdapterError(f"{path}: lora_A or lora_B is missing")
    if bool(config.get("use_dora")) != ("magnitude" in tensors):
        raise AdapterError(f"{path}: use_dora and the magnitude vectors do not fit together")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise AdapterError(f"{path}: a weight is not a finite number")
    if tensors["a"].shape[0] != rank or tensors["b"].shape[1] != rank:
        raise AdapterError(f"{path}: the rank is {tensors['a'].shape[0]}, {CONFIG} says {rank}")
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraWeights(tensors["a"], tensors["b"] * scaling, tensors.get("magnitude"))
