"""Pools hidden states into one embedding per text, as sentence-transformers' files describe it. No model and no queue
here.

`modules.json` lists the modules after the transformer: Pooling, Dense, Normalize. Without this file, an encoder is
pooled by the mean of its tokens and a decoder by its last token, and embeddings are normalised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.models.files import ModelError, read_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Pooling modes, by sentence-transformers' names. Several are concatenated in the order given (in older files: in this
order).
"""
OLDER_NAMES = {
    "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens", "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens", "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x, "Tanh": torch.tanh, "ReLU": torch.relu, "Sigmoid": torch.sigmoid,
    "GELU": torch.nn.functional.gelu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(x W^T + b): weight [out, in], bias [out] or None, float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Pooling:
    """The modules after the transformer, and the rules for its input texts.

    `prompt` is put before every text; `lower_case`: texts are lower-cased first; `max_tokens`: the longest input (None:
    the model's own limit).
    """

    modes: tuple[str, ...]
    dense: list[Dense] = field(default_factory=list)
    normalise: bool = False
    prompt: str = ""
    lower_case: bool = False
    max_tokens: int | None = None

    def dimensions(self, hidden: int) -> int:
        """The length of an embedding, for hidden states of width `hidden`."""
        return self.dense[-1].weight.shape[0] if self.dense else hidden * len(self.modes)

    def embed(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Pool hidden states [B, T, H] -> [B, dimensions] float32, not normalised. The first `lengths` [B] positions of
        each row are tokens, the others padding.
        """
        mask = (torch.arange(hidden.shape[1], device=hidden.device)[None] < lengths[:, None]).float()
        pooled = torch.cat([_pool(mode, hidden.float(), mask, lengths) for mode in self.modes], -1)
        for dense in self.dense:
            pooled = dense.activation(torch.nn.functional.linear(pooled, dense.weight, dense.bias))
        return pooled


def _pool(mode: str, hidden: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        return hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
    if mode == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1)
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device) if mode == "weightedmean" else mask
    total = weights.sum(1, keepdim=True)
    summed = torch.einsum("bth,bt->bh", hidden, weights)
    return summed / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


def read_pooling(directory: Path, causal: bool) -> Pooling:
    """Read the pooling from the directory's files; raises ModelError, which names the unsupported feature."""
    if not (directory / "modules.json").is_file():
        return Pooling(("lasttoken",) if causal else ("mean",), normalise=True)
    pooling: Pooling | None = None
    for module in read_json(directory / "modules.json", list):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, dict) else ""
        path = _inside(directory, str(module.get("path") or "")) if kind else directory
        if kind == "Transformer" and pooling is None:
            if path != directory:
                raise ModelError("modules.json: the transformer must lie in the model's own directory")
        elif kind == "Pooling" and pooling is None:
            pooling = _read_modes(path)
        elif kind == "Dense" and pooling is not None and not pooling.normalise:
            pooling.dense.append(_read_dense(path))
        elif kind == "Normalize" and pooling is not None:
            pooling.normalise = True
        else:
            raise ModelError(f"modules.json: the module {kind!r} cannot be served in this place")
    if pooling is None:
        raise ModelError("modules.json has no Pooling module")
    _read_text_rules(directory, pooling)
    return pooling


def _inside(directory: Path, name: str) -> Path:
    try:
        path = (directory / name).resolve()
    except ValueError as error:
        raise ModelError(f"modules.json: a path cannot be used: {error}") from error
    if path != directory and directory not in path.parents:
        raise ModelError("modules.json names files outside of the model's directory")
    return path


def _read_modes(path: Path) -> Pooling:
    config = read_json(path / "config.json")
    named: Any = config.get("pooling_mode")
    if named is None:
        modes = tuple(mode for mode in MODES if config.get(OLDER_NAMES[mode]))
    else:
        modes = tuple(named) if isinstance(named, list) else (named,)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ModelError(f"Pooling: the mode {str(unknown[0])[:40]!r} is not known" if unknown else "Pooling: no mode")
    if config.get("include_prompt") is False:
        raise ModelError("Pooling: include_prompt false is not supported")
    return Pooling(modes)


def _read_dense(path: Path) -> Dense:
    config = read_json(path / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if name not in ACTIVATIONS:
        raise ModelError(f"Dense: the activation {name[:60]!r} is not supported")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(f"Dense: {key} {str(config[key])[:60]!r} is not supported")
    if config.get("use_residual"):
        raise ModelError("Dense: use_residual is not supported")
    try:
        tensors = load_file(path / "model.safetensors")
        weight, bias = tensors["linear.weight"].float(), tensors.get("linear.bias")
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelError(f"Dense: its weights cannot be read from safetensors: {error}") from error
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelError("Dense: its weights are of another shape")
    return Dense(weight, None if bias is None else bias.float(), ACTIVATIONS[name])


def _read_text_rules(directory: Path, pooling: Pooling) -> None:
    transformer, model = directory / "sentence_bert_config.json", directory / "config_sentence_transformers.json"
    if transformer.is_file():
        config = read_json(transformer)
        modalities = config.get("modality_config") or {}
        if not isinstance(modalities, dict) or "message" in modalities:
            raise ModelError("sentence_bert_config.json: texts that go through a chat template are not supported")
        longest = config.get("max_seq_length")
        pooling.lower_case = bool(config.get("do_lower_case"))
        pooling.max_tokens = longest if isinstance(longest, int) and longest > 0 else None
    if model.is_file():
        config = read_json(model)
        default, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
        if default is not None:
            if not isinstance(prompts, dict) or not isinstance(default, str):
                raise ModelError("config_sentence_transformers.json: prompts or default_prompt_name is of another type")
            pooling.prompt = str(prompts.get(default) or "")
