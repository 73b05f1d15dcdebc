"""Adapters with random weights, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from engine.adapters.files import CONFIG, WEIGHTS, content_digest
from engine.messages import AdapterRef


def make_adapter(model: Path, target: Path, rank: int, seed: int, strength: float = 1.0) -> AdapterRef:
    """A random LoRA on every linear layer of a Llama-shaped model; `strength` scales what it adds."""
    config = AutoConfig.from_pretrained(model)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (out, inner) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inner, generator=generator) * 0.02
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.02
    target.mkdir(parents=True)
    save_file(tensors, target / WEIGHTS)
    (target / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank * strength}))
    return AdapterRef(content_digest(target), str(target))
