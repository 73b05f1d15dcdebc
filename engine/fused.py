"""The forward pass of Llama-shaped decoders as one flat function over packed weights.

transformers' layers cost several milliseconds a step in plumbing and small operations. Decoders whose layers are
`norm, q/k/v, rotary, attention, o, norm, gate/up, down` (Llama, Mistral, Qwen2, Qwen3, SmolLM and the like) run here
with one product for q, k and v, one for gate and up, and fused norms. Everything else runs transformers' own forward.
Whether a model may run here is decided by its structure, and then by the probe, which compares the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.attention import Options, attend
from engine.kernels import ops
from engine.layers import Linear, make_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.kv_cache import AttentionSpec

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_fn"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MODEL_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights, norms as (weight, epsilon)."""

    input_norm: tuple[torch.Tensor, float]
    post_norm: tuple[torch.Tensor, float]
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    options: Options


class FusedDecoder:
    """embed → layers → norm → lm_head. Make it from a model before its linears are packed."""

    def __init__(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> None:
        """Take the weights over; raises ValueError when the model has another structure.

        Scale and window of each layer are those that its own code passed to the recorded attention call.
        """
        decoder: Any = model.model
        _require(decoder, MODEL_PARTS)
        _require(model, {"model", "lm_head"})
        self.rotary = decoder.rotary_emb
        self.norm = _norm(decoder.norm)
        first = decoder.layers[0].self_attn
        self.head_dim = int(first.head_dim)
        self.heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self.layers = [self._layer(layer, spec) for layer, spec in zip(decoder.layers, specs, strict=True)]
        self.embed = decoder.embed_tokens
        self.head = make_linear(model.lm_head.weight, model.lm_head.bias)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Ids and positions [1, T] int64, rows [L] int64 -> logits [L, V]. Attention goes to the current context."""
        embedded = self.embed(input_ids)[0]
        residual = embedded.float() if embedded.dtype != torch.float32 else embedded.clone()
        cosines, sines = (part[0].float().contiguous() for part in self.rotary(residual[None], position_ids=positions))
        normed = torch.empty_like(embedded)
        delta: torch.Tensor | None = None
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        for index, layer in enumerate(self.layers):
            ops.add_norm(residual, delta, *layer.input_norm, normed)
            qkv = layer.qkv.rows(normed)
            ops.rotate(qkv, (heads, kv_heads), cosines, sines, layer.qk_norms)
            split = qkv.view(-1, heads + 2 * kv_heads, dim).transpose(0, 1)
            attended = attend(
                index, split[:heads], split[heads : heads + kv_heads], split[heads + kv_heads :], layer.options
            )
            ops.add_norm(residual, layer.out.rows(attended.view(-1, heads * dim)), *layer.post_norm, normed)
            delta = layer.down.rows(ops.silu_mul(layer.gate_up.rows(normed)))
        residual, delta = residual[logits_rows], None if delta is None else delta[logits_rows]
        normed = torch.empty_like(residual, dtype=normed.dtype)
        ops.add_norm(residual, delta, *self.norm, normed)
        logits: torch.Tensor = self.head.rows(normed)
        return logits

    def _layer(self, layer: Any, spec: AttentionSpec) -> _Layer:
        if not spec.plain:
            raise ValueError("soft-cap or sinks")
        _require(layer, LAYER_PARTS)
        attention, mlp = layer.self_attn, layer.mlp
        _require(attention, ATTENTION_PARTS, optional=True)
        _require(mlp, MLP_PARTS)
        if type(mlp.act_fn).__name__ not in ("SiLUActivation", "SiLU") or mlp.gate_proj.bias is not None:
            raise ValueError("another activation, or biases in the gated layers")
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        biases = [linear.bias for linear in (q, k, v)]
        if any(b is None for b in biases) != all(b is None for b in biases):
            raise ValueError("biases on some of q, k and v")
        has_norms = getattr(attention, "q_norm", None) is not None
        return _Layer(
            input_norm=_norm(layer.input_layernorm),
            post_norm=_norm(layer.post_attention_layernorm),
            qkv=make_linear(
                torch.cat([q.weight, k.weight, v.weight]), None if biases[0] is None else torch.cat(biases)
            ),
            out=make_linear(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=make_linear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), None),
            down=make_linear(mlp.down_proj.weight, mlp.down_proj.bias),
            qk_norms=(*_norm(attention.q_norm)[:1], *_norm(attention.k_norm)) if has_norms else None,
            options=Options(spec.scale, spec.window, None, None),
        )


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    """Weight and epsilon of an RMS norm; the probe finds out those that compute something else."""
    if not hasattr(module, "variance_epsilon"):
        raise ValueError("another norm")
    return module.weight.detach().float().contiguous(), float(module.variance_epsilon)


def _require(module: Any, parts: set[str], optional: bool = False) -> None:
    """The module has these children and no others (or only some of them, where `optional`)."""
    found = {name for name, _ in module.named_children()}
    if not (found <= parts if optional else found == parts):
        raise ValueError(f"unexpected parts: {sorted(found ^ parts)}")
