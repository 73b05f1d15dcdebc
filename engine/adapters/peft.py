"""Reads a LoRA adapter in PEFT's format: safetensors only, every tensor checked before it is allocated.

The names of the tensors say which modules are adapted. `target_modules` must agree with them, as far as the model has the
modules that it names (it may list others). Features that change more than the products of linear layers are refused by name.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import CONFIG, MAX_RANK, WEIGHTS, Tensor, is_rank, never, read_files, read_header
from engine.adapters.patterns import match

PREFIX = "base_model.model."
REFUSED = (
    "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip
"""Fields of PEFT that must be absent, null or false."""
REFUSED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise an adapter that rewrite the base model's weights."""

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
EVERY_LINEAR = "all-linear"
"""`target_modules` of an adapter of every linear layer."""
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields by which an adapter may have no weights for a layer that `target_modules` names."""
DECODER = re.compile(r"\b(language_model|text_model)\.")
"""What stands for a decoder in the path of a layer, where a model reads images too."""
TENSORS = 3
"""The most tensors of one module: A, B and a magnitude."""


@dataclass(slots=True)
class LoraWeights:
    """One module's adapter: y += B A x, scaling folded into B. a: [r, in], b: [out, r], magnitude [out], all float32.

    With a magnitude (DoRA, arXiv 2402.09353) each output column is scaled to it.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None

    def narrowed(self, path: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in the type of the layer at `path`. Raises AdapterError if one is not finite there: float16 has less room."""
        a, b = self.a.to(dtype), self.b.to(dtype)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (a, b)):
            raise AdapterError(AdapterCode.NOT_FINITE, layer=path)
        return a, b


@dataclass(slots=True)
class Adapter:
    """The weights of all adapted modules, by their path in the model."""

    modules: dict[str, LoraWeights]


def dora_factors(path: str, magnitude: torch.Tensor, combined: torch.Tensor) -> torch.Tensor:
    """DoRA's factor of each output of the layer at `path`: magnitude [out] / norm of each row of `combined`, W + B A [out, in]. Raises
    AdapterError if one is not finite, such as that of a row of zeros.
    """
    factors = magnitude / combined.norm(dim=1)
    if not bool(torch.isfinite(factors).all()):
        raise AdapterError(AdapterCode.NOT_FINITE, layer=path)
    return factors


def max_header_bytes(shapes: dict[str, tuple[int, int]]) -> int:
    """Header bytes that suffice for every module's tensors and some metadata."""
    return (1 << 20) + 512 * TENSORS * len(shapes)


def max_weights_bytes(shapes: dict[str, tuple[int, int]], max_rank: int) -> int:
    """The length in bytes of the largest weights file that is accepted: every module adapted with `max_rank` in
    float32.
    """
    numbers = sum(max_rank * (out + inputs) + out for out, inputs in shapes.values())
    return 4 * numbers + max_header_bytes(shapes)


def read_adapter(
    directory: Path,
    shapes: dict[str, tuple[int, int]],
    max_rank: int,
    pause: Callable[[], None] = never,
    digest: str | None = None,
) -> Adapter:
    """Read the adapter in `directory` for a model with the linear layers `shapes` (path -> (out, in)). Its tensors may
    name them with a DECODER elsewhere. Raises AdapterError, also if its content does not have the digest `digest`.
    """
    files = read_files(directory, max_weights_bytes(shapes, max_rank), pause)
    if digest is not None and files.digest != digest:
        raise AdapterError(AdapterCode.CHANGED)
    _check_config(files.config)
    tensors, data = read_header(files.weights, max_header_bytes(shapes))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    known = {_bare(path): path for path in shapes}
    layers: dict[str, str] = {}
    """The model's layer of each path of the file."""
    for key, tensor in tensors.items():
        path, part = _parse(key)
        layer = path if path in shapes else known.get(_bare(path))
        if layer is None:
            raise AdapterError(AdapterCode.NO_LAYER, tensor=key, layer=path)
        layers[path] = layer
        _check_shape(key, part, tensor.shape, shapes[layer], max_rank)
        parts.setdefault(path, {})[part] = _tensor(tensor, data)
        pause()
    if not parts:
        raise AdapterError(AdapterCode.NO_WEIGHTS, file=WEIGHTS)
    if twice := next((layer for layer, count in Counter(layers.values()).items() if count > 1), None):
        raise AdapterError(AdapterCode.TWICE, file=WEIGHTS, layer=twice)
    _check_targets(files.config, parts, shapes)
    ranks, alphas = (match(name, files.config.get(name) or {}, parts) for name in ("rank_pattern", "alpha_pattern"))
    modules = {}
    for path, weights in parts.items():
        rank, alpha = ranks.get(path, files.config["r"]), alphas.get(path, files.config["lora_alpha"])
        modules[layers[path]] = _weights(path, weights, files.config, rank, alpha)
        pause()
    return Adapter(modules)


def _tensor(tensor: Tensor, data: memoryview) -> torch.Tensor:
    begin, end = tensor.data_offsets
    own = bytearray(data[begin:end])  # a copy, because a view would keep the whole file in memory
    return torch.frombuffer(own, dtype=TYPES[tensor.dtype]).view(tensor.shape).float()


def _check_config(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(AdapterCode.PEFT_TYPE, file=CONFIG)
    if config.get("bias", "none") != "none":
        raise AdapterError(AdapterCode.BIAS, file=CONFIG, bias=repr(str(config["bias"])[:50]))
    for name in REFUSED:
        if config.get(name):
            raise AdapterError(AdapterCode.FIELD_NOT_SUPPORTED, file=CONFIG, field=name)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(REFUSED_INITS):
        raise AdapterError(AdapterCode.REWRITES_BASE, file=CONFIG, init=repr(init[:50]))
    rank = config.get("r")
    if type(rank) is int and not is_rank(rank):
        raise AdapterError(AdapterCode.RANK, tensor=CONFIG, limit=MAX_RANK, rank=rank)
    if not is_rank(rank):
        raise AdapterError(AdapterCode.RANK_FIELD, file=CONFIG, limit=MAX_RANK)
    if not _is_alpha(config.get("lora_alpha")):
        raise AdapterError(AdapterCode.ALPHA_FIELD, file=CONFIG)
    if not _is_pattern(config.get("rank_pattern"), is_rank):
        raise AdapterError(AdapterCode.RANK_PATTERN, file=CONFIG, limit=MAX_RANK)
    if not _is_pattern(config.get("alpha_pattern"), _is_alpha):
        raise AdapterError(AdapterCode.ALPHA_PATTERN, file=CONFIG)


def _check_targets(config: dict[str, Any], adapted: Collection[str], layers: Collection[str]) -> None:
    """Hold `target_modules` against the `adapted` layers among the model's `layers`. Raises AdapterError."""
    targets = config.get("target_modules")
    if targets is None or targets == EVERY_LINEAR:
        return
    if isinstance(targets, str):
        fitting: Collection[str] = match("target_modules", {targets: True}, adapted, whole=True)
    elif isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        names = frozenset(targets)
        fitting = {path for path in adapted if not names.isdisjoint(_endings(path))}
    else:
        raise AdapterError(AdapterCode.TARGETS_FIELD, file=CONFIG)
    strange = next((path for path in adapted if path not in fitting), None)
    if strange is not None:
        raise AdapterError(AdapterCode.NOT_A_TARGET, layer=strange, file=CONFIG)
    if isinstance(targets, str) or any(config.get(name) not in (None, [], "") for name in NARROWING):
        return
    known, found = ({end for path in paths for end in _endings(path)} for paths in (layers, adapted))
    absent = next((target for target in targets if target in known and target not in found), None)
    if absent is not None:
        raise AdapterError(AdapterCode.TARGET_WITHOUT_WEIGHTS, file=CONFIG, target=repr(absent[:200]))


def _endings(path: str) -> list[str]:
    """The names by which `target_modules` may mean a module: its path, and what follows each dot."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _bare(path: str) -> str:
    """A path without the name of the decoder in a model that reads images too: releases of transformers differ in where
    it stands, and such a decoder may be served by itself.
    """
    return DECODER.sub("", path)


def _is_pattern(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether `value` maps names to values that fit; absent, null and empty are accepted."""
    return not value or (isinstance(value, dict) and all(map(fits, value.values())))


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _parse(key: str) -> tuple[str, str]:
    """The module path of a tensor, and its part: "a", "b" or "magnitude"."""
    found = re.fullmatch(r"(.+)\.(?:lora_(A|B)\.weight|lora_magnitude_vector(?:\.weight)?)", key)
    if found is None or not key.startswith(PREFIX):
        raise AdapterError(AdapterCode.NOT_LINEAR, tensor=key)
    return found[1].removeprefix(PREFIX), (found[2] or "magnitude").lower()


def _check_shape(key: str, part: str, shape: tuple[int, ...], layer: tuple[int, int], max_rank: int) -> None:
    out_features, in_features = layer
    rank = (shape or (0,))[0 if part == "a" else -1]
    wanted = {"a": (rank, in_features), "b": (out_features, rank), "magnitude": (out_features,)}[part]
    if shape != wanted:
        raise AdapterError(AdapterCode.SHAPE, tensor=key, shape=str(list(shape)), wanted=str(list(wanted)))
    if part != "magnitude" and not 1 <= rank <= max_rank:
        raise AdapterError(AdapterCode.RANK, tensor=key, limit=max_rank, rank=rank)


def _weights(
    path: str, tensors: dict[str, torch.Tensor], config: dict[str, Any], rank: int, alpha: float
) -> LoraWeights:
    if "a" not in tensors or "b" not in tensors:
        raise AdapterError(AdapterCode.HALF, layer=path)
    if bool(config.get("use_dora")) != ("magnitude" in tensors):
        raise AdapterError(AdapterCode.DORA, layer=path)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise AdapterError(AdapterCode.NOT_FINITE, layer=path)
    found = tensors["a"].shape[0]
    if found != rank or tensors["b"].shape[1] != rank:
        raise AdapterError(AdapterCode.RANK_MISMATCH, layer=path, rank=found, file=CONFIG, declared=rank)
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    scaled = tensors["b"] * scaling
    if not bool(torch.isfinite(scaled).all()):
        raise AdapterError(AdapterCode.NOT_FINITE, layer=path)
    return LoraWeights(tensors["a"], scaled, tensors.get("magnitude"))
