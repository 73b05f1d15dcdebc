"""Load a causal LM so that it can be trusted: from safetensors alone, complete, and proven on the paged path.

Every refusal is a `ModelError` that names what is wrong; nothing here touches a request.
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine import attention
from engine.fused import FusedDecoder
from engine.kernels.emit import has_bf16_dot
from engine.layers import has_amx, pack_linears
from engine.probe import (
    Forward,
    ProbeError,
    check_paged_logits,
    plain_forward,
    record_layers,
    reference_logits,
)

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.kv_cache import AttentionSpec
    from engine.lora import LoraLayer

logger = logging.getLogger(__name__)

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(Exception):
    """The model cannot be served; the text says why, for an operator to read."""


@dataclass(slots=True)
class LoadedModel:
    """A model that passed the probe, with what the rest of the engine needs to know of it."""

    forward: Forward
    architecture: str
    directory: Path
    tokenizer_file: Path
    dtype: torch.dtype
    specs: list[AttentionSpec]
    lora_layers: list[LoraLayer]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    sampling_defaults: dict[str, float]


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, check, load, pack and probe the model; raises ModelError with the reason when any of it fails."""
    directory = locate(config.model)
    hf_config = read_config(directory)
    check_weights(directory)
    dtype = _dtype(config.dtype)
    model = _from_pretrained(directory, dtype)
    limit = max_model_len(hf_config, config.max_model_len)
    text_config = hf_config.get_text_config()
    vocab_size = int(text_config.vocab_size)
    try:
        reference = reference_logits(model, vocab_size)
        attention.install()
        model.set_attn_implementation(attention.NAME)
        specs = record_layers(model, int(text_config.num_hidden_layers))
        forward, lora_layers = _forward(model, specs, reference, vocab_size, dtype)
    except ProbeError as error:
        raise ModelError(f"{type(model).__name__} cannot be served: {error}") from error
    generation = model.generation_config or GenerationConfig()
    eos = generation.eos_token_id if generation.eos_token_id is not None else text_config.eos_token_id
    return LoadedModel(
        forward=forward,
        architecture=type(model).__name__,
        directory=directory,
        tokenizer_file=_tokenizer_file(directory, config.cache_dir),
        dtype=dtype,
        specs=specs,
        lora_layers=lora_layers,
        max_model_len=limit,
        vocab_size=vocab_size,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        sampling_defaults=_sampling_defaults(directory),
    )


def _forward(
    model: PreTrainedModel,
    specs: list[AttentionSpec],
    reference: list[torch.Tensor],
    vocab_size: int,
    dtype: torch.dtype,
) -> tuple[Forward, list[LoraLayer]]:
    """The fastest forward pass that gives the reference's logits: fused where the structure allows, else packed; and
    the layers that take adapters.
    """
    try:
        fused = FusedDecoder(model, specs)
        check_paged_logits(fused, specs, reference, vocab_size, dtype)
    except (ValueError, AttributeError, ProbeError) as error:
        logger.info("%s runs unfused: %s", type(model).__name__, error)
    else:
        return fused, fused.lora_layers
    lora_layers = pack_linears(model)
    forward = plain_forward(model)
    check_paged_logits(forward, specs, reference, vocab_size, dtype)
    # Not the output layer, which sees the rows that are sampled alone, nor experts, which see those routed to them.
    return forward, [layer for layer in lora_layers if not layer.other_rows]


def locate(source: str) -> Path:
    """The model's directory: `source` itself, or the hub snapshot of that id."""
    if Path(source).is_dir():
        return Path(source).resolve()
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(f"the directory {source} does not exist")
    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{source} is neither a directory nor a model that can be fetched from the hub ({type(error).__name__})"
        ) from error


def read_config(directory: Path) -> Any:
    """config.json as transformers' own class, if it describes a causal LM without remote code."""
    if not (directory / "config.json").is_file():
        raise ModelError("config.json is missing")
    try:
        raw = json.loads((directory / "config.json").read_text())
        model_type = raw.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"config.json is not a JSON object: {error}") from error
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"the architecture {model_type!r} is not a causal language model that transformers knows")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"config.json cannot be used: {error}") from error


def check_weights(directory: Path) -> None:
    """Only safetensors, every shard there, every header consistent with its file's length."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError("model.safetensors.index.json is not a valid index") from error
        if any("/" in name or not name.endswith(".safetensors") for name in names):
            raise ModelError("model.safetensors.index.json names files outside of the model's directory")
        shards = [directory / name for name in names]
    else:
        shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickled:
            raise ModelError(f"{pickled[0]} is pickled and never loaded; convert the weights to safetensors")
        raise ModelError("there are no *.safetensors weights in the directory")
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"the weight file {shard.name} is missing")
        try:
            with safe_open(shard, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weight file {shard.name} is damaged or truncated: {error}") from error


def max_model_len(hf_config: Any, wanted: int) -> int:
    """The longest sequence: the model's own limit, or `wanted` where that is less.

    Rotary embeddings that change with the length of the call ("dynamic", "longrope") would let sequences of one
    batch disturb each other, so such models stop at the length where the change begins.
    """
    text = hf_config.get_text_config()
    own = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *[v for v in rope.values() if isinstance(v, dict)]]:
        if parameters.get("rope_type") in {"dynamic", "longrope"}:
            own = min(own, int(parameters.get("original_max_position_embeddings") or own))
    if wanted > own:
        raise ModelError(f"max_model_len must be at most {own}, the model's own limit, got {wanted}")
    return wanted or own


def _dtype(wanted: str) -> torch.dtype:
    if wanted != "auto":
        return DTYPES[wanted]
    # Where the CPU has to widen bfloat16 first, float32 products are faster.
    return torch.bfloat16 if has_bf16_dot() or has_amx() else torch.float32


def _from_pretrained(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report below names them
        )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError, AttributeError) as error:
        raise ModelError(f"transformers cannot load the model: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{len(missing)} weights are missing, the first is {missing[0]}")
    if report["mismatched_keys"]:
        raise ModelError(
            f"weights have other shapes than config.json says, e.g. {sorted(report['mismatched_keys'])[0]}"
        )
    model.eval()
    return model


def _tokenizer_file(directory: Path, cache_dir: str) -> Path:
    """tokenizer.json, or one that transformers makes of older files."""
    if (directory / "tokenizer.json").is_file():
        try:
            FastTokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"tokenizer.json cannot be used: {error}") from error
        return directory / "tokenizer.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except (ValueError, KeyError, TypeError, OSError, AttributeError, ImportError) as error:
        raise ModelError(f"there is no tokenizer that can be used: {error}") from error
    target = Path(cache_dir or tempfile.mkdtemp(prefix="dragoman-")) / f"{directory.name}-tokenizer.json"
    backend.save(str(target))
    return target


def _sampling_defaults(directory: Path) -> dict[str, float]:
    """What generation_config.json itself sets; transformers' own defaults are not the model's."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"generation_config.json is not valid JSON: {error}") from error
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: float(raw[name]) for name in names if isinstance(raw.get(name), (int, float))}
