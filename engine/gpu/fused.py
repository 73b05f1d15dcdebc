"""The forward pass of Llama-shaped decoders (engine/models/decoder.py) on a device: four products and five small kernels a layer.

transformers' layers are some forty kernels each, and a step of few rows is bound by their number. The pass is captured in graphs
as any other. It takes no soft-caps and no sinks, and only heads whose keys and values have one width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention import Options, current
from engine.gpu.attention import DeviceAttention
from engine.gpu.layers import add_norm, gated
from engine.gpu.lora import SlotLinear
from engine.gpu.products import FewRowsLinear, linear
from engine.models.decoder import DecoderParts
from engine.process.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.gpu.lora import Slots
    from engine.models.decoder import LayerParts, Norm
    from engine.quantization.base import QuantizedLayers
    from engine.shapes import AttentionSpec


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights on the device."""

    input_norm: Norm
    post_norm: Norm
    qkv: nn.Module
    out: nn.Module
    gate_up: nn.Module
    down: nn.Module
    qk_norms: tuple[torch.Tensor, torch.Tensor, float] | None
    options: Options


class FusedDecoder:
    """embed → layers → norm → lm_head."""

    def __init__(
        self,
        model: PreTrainedModel,
        specs: list[AttentionSpec],
        slots: Slots,
        quantized: QuantizedLayers | None,
        device: torch.device,
    ) -> None:
        """Copy the model's weights to the device, layer by layer, those of linear layers quantized by `quantized`; its rotary module
        is moved there. Raises ValueError or AttributeError for other structures.
        """
        parts = DecoderParts(model, specs)
        self._slots, self._quantized, self._device = slots, quantized, device
        self.heads, self.head_dim = parts.heads, parts.head_dim
        one = (parts.heads, parts.kv_heads, parts.head_dim, parts.head_dim)
        if any((spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim) != one for spec in specs):
            raise ValueError("layers whose heads differ in number or width")
        if self.head_dim % 2:
            raise ValueError("heads of an odd width")
        self._rotary = parts.rotary.to(device)
        self._embed = parts.embed.weight.detach().to(device)
        tied = parts.head.weight.data_ptr() == parts.embed.weight.data_ptr()
        self._head = self._embed if tied else parts.head.weight.detach().to(device)
        self._head_bias = None if parts.head.bias is None else parts.head.bias.detach().to(device)
        self._norm = self._placed(parts.norm)
        self.layers = [self._layer(layer) for layer in parts.layers()]

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Ids and positions [1, T] int64, rows [L] int64 -> logits [L, V]. The current context must be a DeviceAttention."""
        context = current()
        assert isinstance(context, DeviceAttention)
        x = F.embedding(input_ids[0], self._embed)
        residual = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        normed, attended = torch.empty_like(x), x.new_zeros(len(x), self.heads, self.head_dim)
        cosines, sines = (table[0] for table in self._rotary(residual[None], position_ids=positions))
        add_norm(residual, x, *self.layers[0].input_norm, normed, first=True)
        following = [*(layer.input_norm for layer in self.layers[1:]), self._norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            progress.moved()
            qkv = layer.qkv(normed)
            context.rotate_and_attend(index, qkv, cosines, sines, layer.qk_norms, layer.options, attended)
            add_norm(residual, layer.out(attended.flatten(1)), *layer.post_norm, normed, first=False)
            both = layer.gate_up(normed)
            add_norm(residual, layer.down(gated(both)), *next_norm, normed, first=False)
        return linear(normed.index_select(0, logits_rows), self._head, self._head_bias)

    @property
    def slot_layers(self) -> list[SlotLinear]:
        """The layers that take adapters."""
        parts = (part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return [part for part in parts if isinstance(part, SlotLinear)]

    def _layer(self, parts: LayerParts) -> _Layer:
        weight, bias = parts.qkv()
        gate_up, norms = torch.cat([parts.gate.weight, parts.up.weight]), parts.qk_norms
        return _Layer(
            input_norm=self._placed(parts.input_norm),
            post_norm=self._placed(parts.post_norm),
            qkv=self._linear(weight, bias, parts.paths("q_proj", "k_proj", "v_proj")),
            out=self._linear(parts.out.weight, parts.out.bias, parts.paths("o_proj")),
            gate_up=self._linear(gate_up, None, parts.paths("gate_proj", "up_proj")),
            down=self._linear(parts.down.weight, parts.down.bias, parts.paths("down_proj")),
            qk_norms=None if norms is None else (norms[0].to(self._device), norms[1].to(self._device), norms[2]),
            options=Options(parts.scale, None, None),
        )

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: list[tuple[str, int]]) -> nn.Module:
        made: nn.Module | None = None if self._quantized is None else self._quantized.linear(weight.detach(), bias)
        if made is None:
            made = FewRowsLinear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            made.weight = nn.Parameter(weight.detach().to(self._device), requires_grad=False)
            if bias is not None:
                made.bias = nn.Parameter(bias.detach().to(self._device), requires_grad=False)
            return SlotLinear(made, parts, self._slots)
        return made

    def _placed(self, norm: Norm) -> Norm:
        return norm[0].to(self._device), norm[1]
