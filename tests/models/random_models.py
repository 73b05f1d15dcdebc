"""Makes models with random weights: real shapes for benchmarks, and a tiny one of each family for tests.

    python -m tests.models.random_models DIRECTORY NAME [NAME ...]

NAME is a key of REAL or TINY. The tokenizer is the demo model's; the rest of a larger vocabulary cannot be written as
text. It downloads nothing.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

REAL: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.04,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-3b": {
        "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip

_TINY = {
    "vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TINY: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 12}, "qwen2": {}, "qwen3": {"head_dim": 16}, "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 12}, "gemma3_text": {"head_dim": 16, "sliding_window": 12},
    "phi": {}, "phi3": {}, "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}, "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96}, "starcoder2": {}, "stablelm": {}, "cohere": {}, "olmo2": {},
    "granite": {}, "glm": {"head_dim": 16}, "smollm3": {}, "mixtral": _MOE, "qwen3_moe": {**_MOE, "head_dim": 16},
    "gpt_oss": {**_MOE, "head_dim": 16, "sliding_window": 12}, "phimoe": {**_MOE, "sliding_window": 12},
    "qwen2_moe": {
        **_MOE, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1,
        "shared_expert_intermediate_size": 48,
    },
    "ministral3": {
        "head_dim": 16, "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "bloom": {"n_layer": 3, "n_head": 4},
}  # fmt: skip


def make_model(directory: Path, name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write the model of that name below `directory` and return its folder. `changes` are fields of its configuration."""
    overrides = REAL[name] if name in REAL else {**_TINY, "model_type": name, **TINY[name], **changes}
    config = AutoConfig.for_model(**overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for key, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.05)
            elif "embed" in key and name in TINY:
                weight.mul_(2.0)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    target = directory / name
    model.save_pretrained(target)
    for file in TOKENIZER_FILES:
        shutil.copy(DEMO / file, target / file)
    return target


def main() -> None:
    """Make those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="+", choices=[*REAL, *TINY])
    options = parser.parse_args()
    for name in options.names:
        print(make_model(options.directory, name))


if __name__ == "__main__":
    main()
