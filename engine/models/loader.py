"""Load a causal LM so that it can be trusted: from safetensors alone, complete, and proven on the paged path.

Every refusal is a `ModelError` that names what is wrong; nothing here touches a request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from engine import attention
from engine.cpu.fused import FusedDecoder
from engine.cpu.kernels.emit import has_bf16_dot
from engine.cpu.layers import has_amx
from engine.models.files import (
    ModelError,
    check_causal,
    check_weights,
    locate,
    max_model_len,
    read_config,
    sampling_defaults,
    tokenizer_file,
)
from engine.models.probe import QUANTISED_TOLERANCE, TOLERANCE, Proof
from engine.models.record import ProbeError
from engine.process.progress import progress

if TYPE_CHECKING:
    from pathlib import Path

    from engine.adapters.slots import AdapterLayer
    from engine.backend import Backend, Forward
    from engine.config import EngineConfig
    from engine.cpu.kv_cache import AttentionSpec

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    """A model that passed the probe, with what the rest of the engine needs to know of it."""

    forward: Forward
    architecture: str
    directory: Path
    tokenizer_file: Path
    dtype: torch.dtype
    specs: list[AttentionSpec]
    lora_layers: list[AdapterLayer]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    sampling_defaults: dict[str, float]
    rounding: str | None
    """Why a sequence's numbers may be rounded otherwise in another batch; None: they are the same, to the bit."""


def load_model(config: EngineConfig, backend: Backend) -> LoadedModel:
    """Find, check, load, pack and probe the model; raises ModelError with the reason when any of it fails."""
    directory = locate(config.model)
    check_causal(directory)
    hf_config = read_config(directory)
    check_weights(directory)
    dtype = _dtype(config.dtype, backend.device)
    progress.begin("reading the weights")
    model = from_pretrained(AutoModelForCausalLM, directory, dtype, **backend.pretrained_options())
    limit = max_model_len(hf_config, config.max_model_len)
    text_config = hf_config.get_text_config()
    vocab_size = int(text_config.vocab_size)
    progress.begin("proving the model")
    try:
        # Should the process end in what follows, this is the last that its log says of it.
        logger.info("proving %s", type(model).__name__)
        proof = Proof(model, int(text_config.num_hidden_layers), vocab_size, limit)
        attention.install()
        model.set_attn_implementation(attention.NAME)
        tolerance = QUANTISED_TOLERANCE if config.quantization != "none" else TOLERANCE[dtype]
        forward, lora_layers = _forward(backend, model, proof, dtype, tolerance)
    except ProbeError as error:
        raise ModelError(f"{type(model).__name__} cannot be served: {error}") from error
    generation = model.generation_config or GenerationConfig()
    eos = generation.eos_token_id if generation.eos_token_id is not None else text_config.eos_token_id
    return LoadedModel(
        forward=forward,
        architecture=type(model).__name__,
        directory=directory,
        tokenizer_file=tokenizer_file(directory, config.cache_dir),
        dtype=dtype,
        specs=proof.specs,
        lora_layers=lora_layers,
        max_model_len=limit,
        vocab_size=vocab_size,
        eos_token_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
        sampling_defaults=sampling_defaults(directory),
        rounding=_rounding(backend, forward),
    )


def _forward(
    backend: Backend,
    model: PreTrainedModel,
    proof: Proof,
    dtype: torch.dtype,
    tolerance: float,
) -> tuple[Forward, list[AdapterLayer]]:
    """The backend's fastest way to run the model that passes the proof, and the layers that take adapters."""
    *faster, last = backend.candidates(model, proof.specs)
    for candidate in faster:
        try:
            forward, layers = candidate()
            proof.check(backend, forward, dtype, tolerance)
        except (ValueError, AttributeError, ProbeError) as error:
            logger.info("%s runs unfused: %s", type(model).__name__, error)
        else:
            return forward, layers
    forward, layers = last()
    proof.check(backend, forward, dtype, tolerance)
    # Not the output layer, which sees the rows that are sampled alone, nor experts, which see those routed to them.
    return forward, [layer for layer in layers if not layer.other_rows]


def _rounding(backend: Backend, forward: Forward) -> str | None:
    if backend.device.type != "cpu":
        return "the device sums in an order that depends on the batch"
    if not isinstance(forward, FusedDecoder):
        return "layers of transformers run between our kernels, and torch rounds as it likes there"
    return "products of many rows go to AMX, those of few do not" if forward.uses_tiles else None


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type != "cpu":
        return torch.bfloat16
    # Where the CPU has to widen bfloat16 first, float32 products are faster.
    return torch.bfloat16 if has_bf16_dot() or has_amx() else torch.float32


def from_pretrained(
    auto: Any, directory: Path, dtype: torch.dtype, unused: str | None = None, **options: Any
) -> PreTrainedModel:
    """The model by transformers' class `auto`, all its weights there but those whose names begin with `unused`."""
    try:
        model, report = auto.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report below names them
            **options,
        )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError, AttributeError) as error:
        raise ModelError(f"transformers cannot load the model: {error}") from error
    missing = sorted(key for key in report["missing_keys"] if unused is None or not key.startswith(unused))
    if missing:
        raise ModelError(f"{len(missing)} weights are missing, the first is {missing[0]}")
    if report["mismatched_keys"]:
        raise ModelError(
            f"weights have other shapes than config.json says, e.g. {sorted(report['mismatched_keys'])[0]}"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded
