"""Records how each layer calls attention in one forward pass, and refuses what the paged path cannot compute.

The pass uses a separate attention name, for which transformers builds masks; attention returns zeros, because the
result is not used.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from engine.models.masks import MaskError, MaskFunction, window_of_function, window_of_tensor
from engine.shapes import AttentionSpec

NAME = "paged-recorded"
ROWS = 24
"""Rows of the recorded pass; not a power of two, and not a usual number of heads or head size."""
NO_CHANGE = {
    "cache_position", "dropout", "output_attentions", "output_hidden_states", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache", "is_causal", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "logits_to_keep", "output_router_logits",
}  # fmt: skip
"""Keyword arguments of attention that do not change the result, or that are checked separately."""
MEANINGS = {
    "indices": "which keys each token sees, chosen by an indexer",
    "position_bias": "what is added to its scores by position",
    "sinks": "keys that every token sees",
}
STATE = (
    "mamba", "mixer", "delta", "conv", "recurrent", "rwkv", "ssm", "linearattention", "lightning", "lstm", "rglru", "cca",
)  # fmt: skip
"""Parts of the names of modules that keep state besides keys and values."""


class ProbeError(Exception):
    """The model cannot be served on the paged path; the text says why."""


class Recorder:
    """The layers' attention calls in one forward pass of `ROWS` rows, and the masks that were built for it."""

    def __init__(self, num_layers: int, longest: int) -> None:
        self.specs: dict[int, AttentionSpec] = {}
        self._layers, self._longest = num_layers, longest
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []
        self._windows: dict[int, int | None] = {}

    def make_mask(self, **options: Any) -> torch.Tensor:
        """The interface of transformers' mask functions; records from which function of indices the mask is built."""
        mask: torch.Tensor = eager_mask(**options)
        self._masks.append((mask, options["mask_function"]))
        return mask

    def note(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """Record one layer's call: query [1, H, T, D], key and value [1, HK, T, D]; raises ProbeError if it is
        unsupported.
        """
        layer = getattr(module, "layer_idx", None)
        if type(layer) is not int or not 0 <= layer < self._layers:
            raise ProbeError(
                f"its {type(module).__name__} is layer {layer} of {self._layers}, so it has no place in the cache"
            )
        if layer in self.specs:
            raise ProbeError(f"layer {layer} calls attention twice, and the cache keeps one set of keys for each layer")
        batch, heads, rows, dim = query.shape
        if batch != 1 or rows != ROWS:
            raise ProbeError(f"layer {layer} calls attention for {batch} x {rows} rows in a step of {ROWS}")
        if key.shape[2] != rows or value.shape[2] != rows:
            raise ProbeError(
                f"layer {layer} attends to {key.shape[2]} keys for {rows} tokens: to compressed or further ones beside "
                "the sequence's own, which the cache does not keep"
            )
        if key.shape != (1, key.shape[1], rows, dim) or value.shape[:3] != key.shape[:3] or heads % key.shape[1]:
            raise ProbeError(f"layer {layer} attends with {heads} heads of {dim} to {key.shape[1]} of {key.shape[3]}")
        unknown = sorted(
            name
            for name, given in options.items()
            if name not in NO_CHANGE | {"scaling", "softcap", "s_aux"} and given is not None
        )
        if unknown:
            meant = [f"{name} ({MEANINGS[name]})" if name in MEANINGS else name for name in unknown]
            raise ProbeError(f"layer {layer} tells its attention of {', '.join(meant)}, which the kernels do not know")
        try:
            window = self._window(module, mask, options)
        except MaskError as error:
            raise ProbeError(f"layer {layer} {error}") from error
        plain = options.get("softcap") is None and options.get("s_aux") is None
        self.specs[layer] = AttentionSpec(
            heads, key.shape[1], dim, value.shape[3], options.get("scaling"), window, plain
        )

    def _window(self, module: torch.nn.Module, mask: torch.Tensor | None, options: dict[str, Any]) -> int | None:
        """The window of the layer's mask; without a mask, the window argument of its attention call."""
        if mask is None:
            causal = options.get("is_causal")
            if not (getattr(module, "is_causal", True) if causal is None else causal):
                raise MaskError("sees tokens that come later (bidirectional attention)")
            window: int | None = options.get("sliding_window")
            return window
        for made, function in self._masks:
            if mask is made or (mask.data_ptr() == made.data_ptr() and mask.shape == made.shape):
                if id(made) not in self._windows:
                    try:
                        self._windows[id(made)] = window_of_function(function, self._longest)
                    except (TypeError, IndexError, RuntimeError):  # depends on more than indices: use the mask tensor
                        return _window_of(mask, options)
                return self._windows[id(made)]
        return _window_of(mask, options)


def _window_of(mask: torch.Tensor, options: dict[str, Any]) -> int | None:
    """The mask's window; one that is longer than the recorded pass is known from the attention call alone."""
    within = window_of_tensor(mask)
    if within is not None:
        return within
    window: int | None = options.get("sliding_window")
    return window if window is not None and window >= ROWS else None


_recorder: Recorder | None = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of transformers."""
    if _recorder is None:
        raise RuntimeError("an attention layer was called outside of a recording")
    _recorder.note(module, query, key, value, attention_mask, options)
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _mask(**options: Any) -> torch.Tensor:
    if _recorder is None:
        raise RuntimeError("a mask was asked for outside of a recording")
    return _recorder.make_mask(**options)


def install() -> None:
    """Make NAME a known attention implementation. May be called twice."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


@torch.inference_mode()
def record_layers(model: PreTrainedModel, num_layers: int, longest: int) -> list[AttentionSpec]:
    """Record one forward pass; the model's attention must be NAME. Raises ProbeError unless every decoder layer calls
    attention exactly once, as layer 0..n-1, in a way that the kernels support for sequences of up to `longest` tokens.
    """
    global _recorder
    _recorder = recorder = Recorder(num_layers, longest)
    ids = torch.zeros(1, ROWS, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=ids, position_ids=torch.arange(ROWS, device=model.device)[None], use_cache=False)
    except ProbeError as error:
        state = stateful_modules(model)
        if state:
            raise ProbeError(
                f"it keeps state beside keys and values ({', '.join(state)}), which is not supported; {error}"
            ) from error
        raise
    except Exception as error:  # any family may fail in its own way; the reason goes to the operator
        raise ProbeError(_failure(model, error)) from error
    finally:
        _recorder = None
    missing = [layer for layer in range(num_layers) if layer not in recorder.specs]
    if missing:
        raise ProbeError(_missing(model, missing, num_layers))
    for layer, kept in enumerate(_kept_tokens(model, num_layers)):
        window = recorder.specs[layer].window
        if kept is not None and kept < longest and (window is None or window > kept):
            raise ProbeError(
                f"layer {layer} sees {'all' if window is None else f'{window} tokens'} of a prompt, but {kept} tokens while it "
                "generates: transformers keeps no more of them, and the mask does not say so"
            )
    return [recorder.specs[layer] for layer in range(num_layers)]


def _kept_tokens(model: PreTrainedModel, num_layers: int) -> list[int | None]:
    """The number of tokens that transformers' cache keeps in each layer; None: all."""
    layers = DynamicCache(config=model.config).layers[:num_layers]
    return [int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None for layer in layers]


def stateful_modules(model: PreTrainedModel) -> list[str]:
    """Modules that keep state besides keys and values, recognised by their names."""
    family = re.split("For|LMHead|Model", type(model).__name__)[0]
    names = {
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, PreTrainedModel)
        and not type(module).__module__.startswith(("torch", "transformers.pytorch"))
    }
    names = {name for name in names if not name.lower().endswith(("norm", "gated", "mlp", "embedding", "decoderlayer"))}
    found = {name for name in names if any(part in name.removeprefix(family).lower() for part in STATE)}
    if not found and any(part in family.lower() for part in STATE):
        found = {name for name in names if name.startswith(family) and name.endswith(("Block", "Attention"))}
    return sorted(found)


def _failure(model: PreTrainedModel, error: Exception) -> str:
    state = stateful_modules(model)
    if state:
        return f"it keeps state beside keys and values ({', '.join(state)}), which is not supported"
    if isinstance(error, TypeError) and "position_ids" in str(error):
        return "it takes no positions, so sequences cannot share a step"
    return f"it does not run with positions given and without a cache ({type(error).__name__}: {error})"


def _missing(model: PreTrainedModel, missing: list[int], num_layers: int) -> str:
    which = "no layer calls" if len(missing) == num_layers else f"layers {', '.join(map(str, missing))} do not call"
    state = stateful_modules(model)
    if state:
        return (
            f"{which} attention as transformers' interface has it: the model keeps state beside keys and values "
            f"({', '.join(state)}), which is not supported"
        )
    return (
        f"{which} attention through transformers' interface, but compute it themselves"
        if len(missing) < num_layers
        else ("its layers compute attention themselves and not through transformers' interface")
    )
