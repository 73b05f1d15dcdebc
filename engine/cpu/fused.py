"""The forward pass of Llama-shaped decoders as one flat function over packed weights.

transformers' layers cost several milliseconds a step in plumbing and small operations. Decoders whose layers are
`norm, q/k/v, rotary, attention, o, norm, gate/up, down` (Llama, Mistral, Qwen2, Qwen3, SmolLM and the like) run here
with one product for q, k and v, one for gate and up, and fused norms. Everything else runs transformers' own forward.
A model runs here if its structure is supported, if every name that its own code uses is known here, and if verification
finds equal logits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from engine.attention import Options, attend, current
from engine.cpu import lora
from engine.cpu.attention import PagedAttention
from engine.cpu.kernels import ops
from engine.cpu.kernels.amx import LINE
from engine.cpu.kernels.threads import Program, pool_state, recording
from engine.cpu.layers import Gate, Linear, PanelLinear, lora_layers, make_gate, make_linear
from engine.process.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.cpu.lora import LoraLayer
    from engine.cpu.wanted_rows import WantedRows
    from engine.quantization.base import QuantizedLayers
    from engine.shapes import AttentionSpec

MOST_ROWS, MOST_PROGRAMS = 256, 64
"""Rows of the largest steps that are recorded, in which Python takes a notable part of the time, and how many a cache keeps: one
takes about 100 KB.
"""
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


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights, norms as (weight, epsilon)."""

    input_norm: tuple[torch.Tensor, float]
    post_norm: tuple[torch.Tensor, float]
    qkv: Linear
    out: Linear
    gate: Gate
    down: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    options: Options


@dataclass(slots=True)
class _Workspace:
    """The buffers of a step's layers, by row: the residual stream [T, *], cosines and sines [T, D] in float32, the others in the
    model's type.
    """

    residual: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor


class FusedDecoder:
    """embed → layers → norm → lm_head. Make it from a model before its linears are packed."""

    def __init__(
        self,
        model: PreTrainedModel,
        specs: list[AttentionSpec],
        quantized: QuantizedLayers | None = None,
        coded: bool = False,
    ) -> None:
        """Take over the model's weights, the layers' quantized by `quantized`, or `coded`; raises ValueError for other structures.

        The scale of each layer is the one that its own code passed to the recorded attention call.
        """
        decoder: Any = model.model
        self._quantized, self._coded = quantized, coded
        _require(decoder, MODEL_PARTS)
        _require(model, {"model", "lm_head"})
        _require_code(type(model).forward, _HEAD_NAMES)
        _require_code(type(decoder).forward, _MODEL_NAMES)
        self.rotary = decoder.rotary_emb
        self.norm = _norm(decoder.norm)
        first = decoder.layers[0].self_attn
        self.head_dim = int(first.head_dim)
        self.heads = first.q_proj.out_features // self.head_dim
        self.kv_heads = first.k_proj.out_features // self.head_dim
        self.layers = [
            self._layer(layer, spec, i) for i, (layer, spec) in enumerate(zip(decoder.layers, specs, strict=True))
        ]
        self.embed = decoder.embed_tokens
        # Without adapters, because it sees only the sampled rows.
        head = make_linear(model.lm_head.weight, model.lm_head.bias, [], None, coded)
        if not isinstance(head, PanelLinear):
            raise ValueError("an output layer of another kind")
        self.head = head
        if len({(layer.qkv.width, layer.gate.width) for layer in self.layers}) > 1:
            raise ValueError("layers of several widths")
        self._space: _Workspace | None = None
        self._grown = 0

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Ids and positions [1, T] int64, rows [L] int64 -> logits [L, V] float32. The current context computes
        attention.
        """
        embedded = self.embed(input_ids)[0]
        rows, hidden = embedded.shape
        space = self._workspace(rows)
        residual, normed = space.residual, space.normed
        residual[:, :hidden] = embedded
        cosines, sines = self.rotary(residual[None], position_ids=positions)
        space.cosines[:], space.sines[:] = cosines[0], sines[0]
        context = current()
        paged = context if isinstance(context, PagedAttention) else None
        wanted = None if paged is None else paged.wanted
        layers = len(self.layers) - (wanted is not None)
        if paged is not None and layers and rows <= MOST_ROWS:
            self._replayed(paged, space, layers)
        else:
            self._run(space, layers, Program())
        if paged is not None and wanted is not None:
            residual, logits_rows = self._last_layer(paged, wanted, space), wanted.logits_rows
        last = residual[logits_rows, :hidden]
        normed = torch.empty_like(last, dtype=normed.dtype)
        ops.norm(last, *self.norm, normed)
        return self.head.logits(normed)

    def _replayed(self, context: PagedAttention, space: _Workspace, layers: int) -> None:
        """The first layers, without Python between their kernels if a step like this one was recorded."""
        programs = context.cache.programs
        like = (id(self), self._grown, space.residual.shape[0], layers, pool_state(), lora.current())
        program = programs.get(like)
        if program is not None:
            context.change(program, self.heads)
            program.replay(progress.moved)
            return
        if len(programs) >= MOST_PROGRAMS:
            del programs[next(iter(programs))]
        with recording() as program:
            self._run(space, layers, program)
        programs[like] = program

    def _run(self, space: _Workspace, layers: int, program: Program) -> None:
        """The first layers over the residual stream; `program` is told where each one ends."""
        for index, layer in enumerate(self.layers[:layers]):
            query, key, value = self._heads(self._projected(layer, space))
            attend(index, query, key, value, layer.options, space.attended)
            self._rest(layer, space)
            program.end_layer()

    def _last_layer(self, context: PagedAttention, wanted: WantedRows, space: _Workspace) -> torch.Tensor:
        """The last layer over the wanted rows of the residual stream, which are copied: [W, *] float32."""
        layer, rows = self.layers[-1], len(wanted.rows)
        qkv = self._projected(layer, space)
        _, key, value = self._heads(qkv)
        if not rows:
            context.store(len(self.layers) - 1, key, value)
            return space.residual[:0]
        few = _Workspace(
            space.residual[wanted.rows], *(getattr(space, field.name)[:rows] for field in fields(_Workspace)[1:])
        )
        query, *_ = self._heads(qkv[wanted.rows])
        context.attend_wanted(len(self.layers) - 1, query, key, value, layer.options, few.attended)
        with lora.adapters_of(wanted.segments, rows):
            self._rest(layer, few)
        return few.residual

    def _projected(self, layer: _Layer, space: _Workspace) -> torch.Tensor:
        """Queries, keys and values [T, *] of all heads, rotated."""
        ops.norm(space.residual[:, : space.normed.shape[1]], *layer.input_norm, space.normed)
        qkv = layer.qkv.rows(space.normed, space.qkv)
        ops.rotate(qkv, (self.heads, self.kv_heads), space.cosines, space.sines, layer.qk_norms)
        return qkv

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the rows [T, *]: query [H, T, D], key and value [HK, T, D]."""
        split = qkv.unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        keys = self.heads + self.kv_heads
        return split[: self.heads], split[self.heads : keys], split[keys:]

    def _rest(self, layer: _Layer, space: _Workspace) -> None:
        """What comes after a layer's attention."""
        layer.out.add_to(space.residual, space.attended.flatten(1))
        ops.norm(space.residual[:, : space.normed.shape[1]], *layer.post_norm, space.normed)
        layer.down.add_to(space.residual, layer.gate.rows(space.normed, space.gated))

    @property
    def lora_layers(self) -> list[LoraLayer]:
        """The layers that take adapters."""
        return lora_layers(part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate, layer.down))

    def _workspace(self, rows: int) -> _Workspace:
        """The first `rows` rows of the layers' buffers, which are allocated once for all steps."""
        if self._space is None or self._space.residual.shape[0] < rows:
            layer, dtype, hidden = self.layers[0], self.embed.weight.dtype, self.embed.weight.shape[1]
            self._space = _Workspace(
                _rows(rows, ops.wide(hidden), torch.float32),
                _rows(rows, hidden, dtype),
                _rows(rows, layer.qkv.width, dtype),
                _rows(rows, self.heads * self.head_dim, dtype).unflatten(1, (self.heads, self.head_dim)),
                _rows(rows, layer.gate.width, dtype),
                torch.zeros(rows, self.head_dim),
                torch.zeros(rows, self.head_dim),
            )
            self._grown += 1
        return _Workspace(*(getattr(self._space, field.name)[:rows] for field in fields(_Workspace)))

    def _layer(self, layer: Any, spec: AttentionSpec, index: int) -> _Layer:
        path = f"model.layers.{index}"
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
                torch.cat([q.weight, k.weight, v.weight]),
                None if biases[0] is None else torch.cat(biases),
                _parts(f"{path}.self_attn.", q_proj=q, k_proj=k, v_proj=v),
                self._quantized,
                self._coded,
            ),
            out=make_linear(
                attention.o_proj.weight,
                attention.o_proj.bias,
                _parts(f"{path}.self_attn.", o_proj=attention.o_proj),
                self._quantized,
                self._coded,
            ),
            gate=make_gate(
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                _parts(f"{path}.mlp.", gate_proj=mlp.gate_proj, up_proj=mlp.up_proj),
                self._quantized,
                self._coded,
            ),
            down=make_linear(
                mlp.down_proj.weight,
                mlp.down_proj.bias,
                _parts(f"{path}.mlp.", down_proj=mlp.down_proj),
                self._quantized,
                self._coded,
            ),
            qk_norms=(*_norm(attention.q_norm)[:1], *_norm(attention.k_norm)) if has_norms else None,
            options=Options(spec.scale, None, None),
        )


def _rows(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [rows, width] whose rows lie an odd number of cache lines apart, so that those of a tile do not meet in the
    same places of the cache.
    """
    lines = -(-width * dtype.itemsize // LINE) | 1
    return torch.zeros(rows, lines * LINE // dtype.itemsize, dtype=dtype)[:, :width]


def _parts(prefix: str, **linears: Any) -> list[tuple[str, int]]:
    """(path, outputs) of the model's layers."""
    return [(prefix + name, linear.out_features) for name, linear in linears.items()]


def _norm(module: Any) -> tuple[torch.Tensor, float]:
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
