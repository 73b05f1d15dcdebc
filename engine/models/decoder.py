"""Takes Llama-shaped decoders apart: the weights that a flat forward pass of a device needs, in the order of the computation.

Such a decoder's layers are `norm, q/k/v, rotary, attention, o, norm, gate/up, down` (Llama, Mistral, Qwen2, Qwen3, SmolLM and the
like). A model is one if it has exactly these parts, and if every name that its own code uses is known here; no model is one by its
name. It does not change the model.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from engine.shapes import AttentionSpec

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_fn"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MODEL_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_HEAD_NAMES = {
    "CausalLMOutputWithPast", "attentions", "config", "hidden_states", "last_hidden_state", "lm_head", "loss_function",
    "model", "past_key_values", "slice_logits_to_keep", "vocab_size",
}  # fmt: skip
_MODEL_NAMES = {
    "BaseModelOutputWithPast", "DynamicCache", "ValueError", "arange", "config", "create_causal_mask",
    "create_sliding_window_causal_mask", "device", "dict", "embed_tokens", "enumerate", "get_seq_length",
    "has_sliding_layers", "isinstance", "layer_types", "layers", "norm", "num_hidden_layers", "rotary_emb", "shape",
    "sliding_window", "torch", "unsqueeze",
}  # fmt: skip
_DROPOUT_NAMES = {"dropout", "functional", "nn", "residual_dropout", "training"}
_ATTENTION_NAMES = {
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout", "config",
    "contiguous", "eager_attention_forward", "get_interface", "getattr", "head_dim", "layer_idx", "reshape",
    "rotary_fn", "scaling", "shape", "sliding_window", "transpose", "update", "view", *ATTENTION_PARTS, *_DROPOUT_NAMES,
}  # fmt: skip
_NORM_NAMES = {"dtype", "float32", "mean", "pow", "rsqrt", "to", "torch", "variance_epsilon", "weight"}
_ROTARY_NAMES = {"apply_rotary_pos_emb": {"rotate_half", "unsqueeze"}, "rotate_half": {"cat", "shape", "torch"}}
_CONSTANTS = {None, ..., True, False, 2, -1}

Norm = tuple[torch.Tensor, float]
"""Weight [n] float32 and epsilon of an RMS norm."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer."""

    path: str
    """Where it stands in the model, such as model.layers.0."""
    input_norm: Norm
    post_norm: Norm
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    """All three with biases or all three without."""
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    """Neither has a bias."""
    down: nn.Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    """Weights of the norms of each query head and each key head, float32, and their epsilon."""
    scale: float | None
    """The scale that the layer's own code passed to the recorded attention call."""

    def paths(self, *names: str) -> list[tuple[str, int]]:
        """(path, outputs) of its linear layers q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj."""
        linears = {
            "q_proj": self.q, "k_proj": self.k, "v_proj": self.v, "o_proj": self.out,
            "gate_proj": self.gate, "up_proj": self.up, "down_proj": self.down,
        }  # fmt: skip
        part = {name: "mlp" if name in MLP_PARTS else "self_attn" for name in names}
        return [(f"{self.path}.{part[name]}.{name}", linears[name].out_features) for name in names]

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [q + k + v, in] and bias of the three layers as one."""
        linears = (self.q, self.k, self.v)
        biases = [linear.bias for linear in linears]
        return torch.cat([linear.weight for linear in linears]), None if biases[0] is None else torch.cat(biases)


class DecoderParts:
    """A decoder: embeddings, rotary embeddings, layers, norm, output layer."""

    def __init__(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> None:
        """Raises ValueError or AttributeError for other structures."""
        decoder: Any = model.model
        _require(decoder, MODEL_PARTS)
        _require(model, {"model", "lm_head"})
        _require_code(type(model).forward, _HEAD_NAMES)
        _require_code(type(decoder).forward, _MODEL_NAMES)
        if type(decoder.embed_tokens) is not nn.Embedding:
            raise ValueError("embeddings of another kind")
        self.embed: nn.Embedding = decoder.embed_tokens
        self.rotary: nn.Module = decoder.rotary_emb
        """Called with a tensor of the wanted type and with positions [1, T]: cosines and sines, each [1, T, head dim]."""
        self.norm = _norm(decoder.norm)
        self.head: nn.Linear = model.lm_head
        first = decoder.layers[0].self_attn
        self.head_dim = int(first.head_dim)
        self.heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self._layers, self._specs = list(decoder.layers), specs

    def layers(self) -> Iterator[LayerParts]:
        """The layers in order; raises ValueError or AttributeError for one of another structure."""
        for index, (layer, spec) in enumerate(zip(self._layers, self._specs, strict=True)):
            yield self._layer(layer, spec, index)

    def _layer(self, layer: Any, spec: AttentionSpec, index: int) -> LayerParts:
        if not spec.plain:
            raise ValueError("soft-cap or sinks")
        _require(layer, LAYER_PARTS)
        attention, mlp = layer.self_attn, layer.mlp
        _require(attention, ATTENTION_PARTS, optional=True)
        _require(mlp, MLP_PARTS)
        _require_code(type(layer).forward, LAYER_PARTS)
        _require_code(type(attention).forward, _ATTENTION_NAMES)
        _require_code(type(mlp).forward, MLP_PARTS | _DROPOUT_NAMES)
        functions = inspect.unwrap(type(attention).forward).__globals__
        for name, names in _ROTARY_NAMES.items():
            _require_code(functions.get(name), names)
        if attention.layer_idx != index or attention.head_dim != self.head_dim:
            raise ValueError("layers that are numbered otherwise, or heads of several widths")
        if type(mlp.act_fn).__name__ not in ("SiLUActivation", "SiLU"):
            raise ValueError("another activation")
        if mlp.gate_proj.bias is not None or mlp.up_proj.bias is not None:
            raise ValueError("biases in the gated layers")
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        if len({linear.bias is None for linear in (q, k, v)}) > 1:
            raise ValueError("biases on some of q, k and v")
        has_norms = getattr(attention, "q_norm", None) is not None
        return LayerParts(
            path=f"model.layers.{index}",
            input_norm=_norm(layer.input_layernorm),
            post_norm=_norm(layer.post_attention_layernorm),
            q=q,
            k=k,
            v=v,
            out=attention.o_proj,
            gate=mlp.gate_proj,
            up=mlp.up_proj,
            down=mlp.down_proj,
            qk_norms=(*_norm(attention.q_norm)[:1], *_norm(attention.k_norm)) if has_norms else None,
            scale=spec.scale,
        )


def _norm(module: Any) -> Norm:
    """Weight and epsilon of an RMS norm."""
    if not hasattr(module, "variance_epsilon"):
        raise ValueError("another norm")
    _require_code(type(module).forward, _NORM_NAMES)
    return module.weight.detach().float().contiguous(), float(module.variance_epsilon)


def _require(module: Any, parts: set[str], optional: bool = False) -> None:
    """Raise ValueError unless the module's children are exactly `parts`, or a subset of them if `optional`."""
    found = {name for name, _ in module.named_children()}
    if not (found <= parts if optional else found == parts):
        raise ValueError(f"unexpected parts: {sorted(found ^ parts)}")


def _require_code(function: Any, names: set[str]) -> None:
    """Raise ValueError if the function refers to other names than these, or to numbers that do not just count
    dimensions.

    Anything else (a multiplier, a scale by position, a clip) would be missing in the fused forward pass.
    """
    plain = inspect.unwrap(function) if callable(function) else None
    if not inspect.isfunction(plain):
        raise ValueError(f"no function of the model's own: {function}")
    codes = [plain.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        unknown = {*code.co_names, *code.co_freevars} - names - {"__class__"}
        unknown |= {
            repr(constant)
            for constant in code.co_consts
            if isinstance(constant, int | float | complex) and constant not in _CONSTANTS
        }
        if unknown:
            raise ValueError(f"{code.co_qualname} uses {', '.join(sorted(unknown))}")
