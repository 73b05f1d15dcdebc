"""The forward pass of Llama-shaped decoders as one flat function over packed weights.

transformers' layers cost several milliseconds a step in plumbing and small operations. Decoders whose layers are
`norm, q/k/v, rotary, attention, o, norm, gate/up, down` (Llama, Mistral, Qwen2, Qwen3, SmolLM and the like) run here
with one product for q, k and v, one for gate and up, and fused norms. Everything else runs transformers' own forward.
A model runs here if its structure is supported, if every name that its own code uses is known here, and if verification
finds equal logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from engine.attention import Options, attend, current
from engine.cpu import lora
from engine.cpu.attention import PagedAttention
from engine.cpu.kernels import ops
from engine.cpu.kernels.threads import Program, pool_state, recording
from engine.cpu.layers import Gate, Linear, PanelLinear, lora_layers, make_gate, make_linear
from engine.cpu.spaced_rows import spaced_rows
from engine.models.decoder import DecoderParts
from engine.process.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.cpu.lora import LoraLayer
    from engine.cpu.wanted_rows import WantedRows
    from engine.models.decoder import LayerParts
    from engine.quantization.base import QuantizedLayers
    from engine.shapes import AttentionSpec

MOST_ROWS, MOST_PROGRAMS = 256, 64
"""Rows of the largest steps that are recorded, in which Python takes a notable part of the time, and how many a cache keeps: one
takes about 100 KB.
"""


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
        """Take over the model's weights, the layers' quantized by `quantized`, or `coded`; raises ValueError or AttributeError for
        other structures (engine/models/decoder.py).
        """
        parts = DecoderParts(model, specs)
        self._quantized, self._coded = quantized, coded
        self.embed, self.rotary, self.norm = parts.embed, parts.rotary, parts.norm
        self.head_dim, self.heads, self.kv_heads = parts.head_dim, parts.heads, parts.kv_heads
        self.layers = [self._layer(layer) for layer in parts.layers()]
        # Without adapters, because it sees only the sampled rows.
        head = make_linear(parts.head.weight, parts.head.bias, [], None, coded)
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
        last = residual[:, :hidden].index_select(0, logits_rows)  # row by row; indexing copies number by number
        normed = torch.empty_like(last, dtype=normed.dtype)
        ops.norm(last, *self.norm, normed)
        return self.head.logits(normed)

    def _replayed(self, context: PagedAttention, space: _Workspace, layers: int) -> None:
        """The first layers, without Python between their kernels if a step like this one was recorded."""
        programs = context.cache.programs
        like = (id(self), self._grown, space.residual.shape[0], layers, pool_state(), lora.current())
        program = programs.get(like)
        if program is not None:
            programs[like] = programs.pop(like)  # the one that was used longest ago is the first to go
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
            space.residual.index_select(0, wanted.rows),
            *(getattr(space, field.name)[:rows] for field in fields(_Workspace)[1:]),
        )
        query, *_ = self._heads(qkv.index_select(0, wanted.rows))
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
                spaced_rows(rows, ops.wide(hidden), torch.float32),
                spaced_rows(rows, hidden, dtype),
                spaced_rows(rows, layer.qkv.width, dtype),
                spaced_rows(rows, self.heads * self.head_dim, dtype).unflatten(1, (self.heads, self.head_dim)),
                spaced_rows(rows, layer.gate.width, dtype),
                torch.zeros(rows, self.head_dim),
                torch.zeros(rows, self.head_dim),
            )
            self._grown += 1
        return _Workspace(*(getattr(self._space, field.name)[:rows] for field in fields(_Workspace)))

    def _layer(self, parts: LayerParts) -> _Layer:
        weight, bias = parts.qkv()
        qkv, gate = parts.paths("q_proj", "k_proj", "v_proj"), parts.paths("gate_proj", "up_proj")
        how = (self._quantized, self._coded)
        return _Layer(
            input_norm=parts.input_norm,
            post_norm=parts.post_norm,
            qkv=make_linear(weight, bias, qkv, *how),
            out=make_linear(parts.out.weight, parts.out.bias, parts.paths("o_proj"), *how),
            gate=make_gate(parts.gate.weight, parts.up.weight, gate, *how),
            down=make_linear(parts.down.weight, parts.down.bias, parts.paths("down_proj"), *how),
            qk_norms=parts.qk_norms,
            options=Options(parts.scale, None, None),
        )
