"""Tiny configurations of every family that transformers knows, and variants of them with limits that short prompts pass."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 4
ORIGINAL = 32
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_head", "kv_channels", "attention_head_dim"), 16),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner", "ffn_hidden_size",
            "intermediate_size_mlp", "shared_intermediate_size", "dense_intermediate_size", "d_ff",
        ),
        96,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
                     "moe_shared_expert_intermediate_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 400),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "local_attention", "attention_window"), 12),
    "attention_chunk_size": 16, "floor_scale": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0, "use_cache": True, "n_shared_experts": 1, "laurel_rank": 8,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "state_size": 8, "lru_width": 64, "dbrx_ffn": None,
    "original_max_position_embeddings": ORIGINAL,
    "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "o_lora_rank": 16, "layer_types": None,
    "max_window_layers": 2, "hidden_dim": 64,
}  # fmt: skip


def _axes(section: list[int], partial: float = 1.0) -> dict[str, Any]:
    """The rotary embedding of text and images: `section` is how many of a head's frequencies each axis has."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    return {"rope_parameters": {**parameters, "partial_rotary_factor": partial} if partial < 1 else parameters}


_MLA = {"head_dim": 8, "num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), _MLA),
    **{
        key: {**_MLA, "rope_interleave": True}
        for key in ("axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3")
    },
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2, "topk_method": "greedy"},
    **{key: {"rotary_dim": 8} for key in ("codegen", "gptj")},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xlm": {"emb_dim": 64, "n_words": 400, "n_langs": 1},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
    **{key: {"layer_types": ["conv", "full_attention"] * 2} for key in ("lfm2", "lfm2_moe")},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **_MLA},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, **_MLA},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    **{key: {"global_head_dim": 32, "head_dim": 16} for key in ("gemma4_text", "gemma4_unified_text")},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "zamba": {"layer_types": ["mamba", "mamba", "hybrid", "mamba"]},
    "moshi": {"audio_vocab_size": 100},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5},
    **dict.fromkeys(
        (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
            "qwen3_vl_text",
            "qwen3_vl_moe_text",
            "paddleocr_vl_text",
            "glm_ocr_text",
        ),
        _axes([4, 2, 2]),
    ),
    "glm4v_text": _axes([2, 1, 1], 0.5),
    "glm4v_moe_text": {**_axes([2, 1, 1], 0.5), "n_routed_experts": 4},
    "ernie4_5_vl_moe_text": {**_axes([3, 3, 2]), "moe_intermediate_size": [48, 48]},
    "qwen2_vl.vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
    "mistral4": {"head_dim": 16, "num_key_value_heads": 4, "rope_interleave": True},
}
"""What some families need beside that."""
_ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
    "window-0": {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 0},
    **{name: {"rope_parameters": parameters} for name, parameters in _ROPE.items()},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "use_bias": True, "qkv_bias": True, "use_qkv_bias": True},
    "decoder": {"is_decoder": True},
    "shared-keys": {"num_kv_shared_layers": 2},
    "odd-heads": {"hidden_size": 72, "head_dim": 18},
}


def variant_fits(family: str, variant: str) -> bool:
    """Whether the family's configuration has a field of the variant's."""
    if not variant:
        return True
    fields = vars(_defaults(CONFIG_MAPPING[family]).get_text_config())
    changed = [name for name, value in VARIANTS[variant].items() if name in fields and fields[name] != value]
    return bool(changed) and (not variant.startswith("window") or "sliding_window" in fields)


def tiny_config(family: str, variant: str = "") -> PreTrainedConfig:
    """The family's own configuration with every size made small."""
    kind = CONFIG_MAPPING[family]
    fields = _shrunk(kind, VARIANTS[variant], family)
    return AutoConfig.for_model(family, **fields)


def _defaults(kind: Any) -> Any:
    try:
        return kind()
    except (ValueError, TypeError):
        return kind(**{name: value for name, value in SMALL.items() if value is not None})


def _shrunk(kind: Any, changes: dict[str, Any], family: str) -> dict[str, Any]:
    """Arguments for the configuration's class `kind`: what it has, made small; the parts of composite ones likewise."""
    default = _defaults(kind)
    fields: dict[str, Any] = {}
    for name, given in vars(default).items():
        if name in SMALL and (given is not None or name == "head_dim" or SMALL[name] is None):
            fields[name] = SMALL[name]
    if kinds := _kinds(default):
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    if isinstance(vars(default).get("rope_parameters"), dict):
        fields["rope_parameters"] = _short(vars(default)["rope_parameters"])
    for name, value in changes.items():
        if name in vars(default):
            if name == "rope_parameters" and isinstance(value, dict):
                value = _rope(vars(default)[name], value)
            fields[name] = value
    fields.update(OWN.get(default.model_type, {}))
    fields.update(OWN.get(family, {}) if default.model_type != family else {})
    for name in getattr(kind, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig) and part.model_type in CONFIG_MAPPING:
            text = name in ("text_config", "decoder", "llm_config")
            fields[name] = {
                **_shrunk(type(part), changes if text else {}, part.model_type),
                "model_type": part.model_type,
                **OWN.get(f"{family}.{name}", {}),
            }
    return fields


def _kinds(default: Any) -> list[str]:
    """The kinds of layers that the family's own configuration mixes; none if it has one kind, or names none."""
    types = vars(default).get("layer_types")
    kinds = [*dict.fromkeys(types)] if isinstance(types, list) else []
    return kinds if 1 < len(kinds) <= LAYERS else []


def _short(parameters: dict[str, Any]) -> dict[str, Any]:
    """The same rotary embedding with an original length that prompts pass."""
    return {
        name: _short(value) if isinstance(value, dict) else ORIGINAL if name.startswith("original_max") else value
        for name, value in parameters.items()
    }


def _rope(default: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """The scaling with the family's own bases, for each kind of layer where it has several."""
    if isinstance(default, dict) and any(isinstance(v, dict) for v in default.values()):
        return {kind: _rope(parameters, wanted) for kind, parameters in default.items()}
    kept = {k: v for k, v in (default or {}).items() if k in ("rope_theta", "partial_rotary_factor")}
    return {"rope_theta": 10000.0, **kept, **wanted}
