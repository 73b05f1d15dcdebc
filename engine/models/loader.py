"""Loads a causal LM: safetensors only, all weights present, and verified on the paged path.

Every refusal is a `ModelError` that names what is wrong; nothing here touches a request.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel

from engine import attention
from engine.models import long_rope
from engine.models.files import (
    ModelError,
    check_generates,
    check_weights,
    end_of_text,
    locate,
    longest_position,
    max_model_len,
    read_config,
    sampling_defaults,
    tokenizer_file,
)
from engine.models.formats import check_format, check_head, check_unexpected
from engine.models.probe import Proof, tolerance_of
from engine.models.record import ProbeError
from engine.models.wrappers import decoder_of, generator_class
from engine.process.progress import progress

if TYPE_CHECKING:
    from pathlib import Path

    from engine.adapters.slots import AdapterLayer
    from engine.backend import Backend, Candidate, Forward
    from engine.config import EngineConfig
    from engine.shapes import AttentionSpec

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    """A verified model, and the facts about it that the engine needs."""

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
    """Why results are not batch-invariant (bitwise equal in any batch); None if they are."""
    original_length: int
    """Longer sequences rotate all of their positions otherwise (`engine.models.long_rope`); sys.maxsize: none do."""


def load_model(config: EngineConfig, backend: Backend) -> LoadedModel:
    """Find, check, load, pack and verify the model; raises ModelError with the reason if any of it fails."""
    directory = locate(config.model)
    check_generates(directory)
    hf_config = read_config(directory)
    if hf_config.is_encoder_decoder:
        raise ModelError(f"{hf_config.model_type} is an encoder with a decoder; only decoders are served")
    check_head(getattr(hf_config, "architectures", None))
    check_weights(directory)
    check_format(directory)
    dtype = backend.default_dtype() if config.dtype == "auto" else DTYPES[config.dtype]
    progress.begin("reading the weights")
    model = decoder_of(from_pretrained(generator_class(hf_config), directory, dtype, **backend.pretrained_options()))
    original_length = long_rope.original_length(model, longest_position(hf_config))
    limit = max_model_len(hf_config, config.max_model_len, by_sequence=original_length is not None)
    text_config = hf_config.get_text_config()
    vocab_size = int(text_config.vocab_size)
    progress.begin("verifying the model")
    try:
        # If the process crashes during verification, this is the last line of its log.
        logger.info("verifying %s", type(model).__name__)
        num_layers = int(text_config.num_hidden_layers)
        proof = Proof(model, num_layers, vocab_size, limit, original_length)
        if original_length is not None:
            long_rope.install(model, original_length)
        attention.install()
        model.set_attn_implementation(attention.NAME)
        rounding = tolerance_of(dtype, num_layers)
        tolerance = rounding if backend.quantization is None else backend.quantization.tolerance
        forward, lora_layers = _forward(backend, model, proof, dtype, tolerance)
    except ProbeError as error:
        raise ModelError(f"{type(model).__name__} cannot be served: {error}") from error
    tokens = tokenizer_file(directory, config.cache_dir)
    return LoadedModel(
        forward=forward,
        architecture=type(model).__name__,
        directory=directory,
        tokenizer_file=tokens,
        dtype=dtype,
        specs=proof.specs,
        lora_layers=lora_layers,
        max_model_len=limit,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(
            model, getattr(text_config, "eos_token_id", None), end_of_text(directory, tokens), vocab_size
        ),
        sampling_defaults=sampling_defaults(directory),
        rounding=backend.rounding(forward),
        original_length=sys.maxsize if original_length is None else original_length,
    )


def _eos_token_ids(
    model: PreTrainedModel, configured: int | list[int] | None, tokenizers: int | None, vocab_size: int
) -> list[int]:
    """The tokens that end a text: those of generation_config.json, those `configured` in config.json and the
    tokenizer's own, for a fine-tune often changes only one of the three. An id outside of the vocabulary, such as the
    -1 or the default of its family that some models have, is never sampled.
    """
    generation = model.generation_config or GenerationConfig()
    named: list[int] = []
    for ends in (generation.eos_token_id, configured, tokenizers):
        named += [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    named = list(dict.fromkeys(named))
    known = [token for token in named if 0 <= token < vocab_size]
    if known != named:
        logger.warning("of the end-of-sequence tokens %s, the vocabulary of %d has only %s", named, vocab_size, known)
    return known


def _forward(
    backend: Backend,
    model: PreTrainedModel,
    proof: Proof,
    dtype: torch.dtype,
    tolerance: float,
) -> tuple[Forward, list[AdapterLayer]]:
    """The backend's fastest forward function that passes verification, and the layers that take adapters."""
    *faster, last = backend.candidates(model, proof.specs)
    for candidate in faster:
        proven = _proven(candidate, backend, model, proof, dtype, tolerance)
        if proven is not None:
            return proven
    forward, layers = last()
    proof.check(backend, forward, dtype, tolerance)
    # Not experts, which see the rows that are routed to them.
    return forward, [layer for layer in layers if not layer.other_rows]


def _proven(
    candidate: Candidate,
    backend: Backend,
    model: PreTrainedModel,
    proof: Proof,
    dtype: torch.dtype,
    tolerance: float,
) -> tuple[Forward, list[AdapterLayer]] | None:
    """The candidate's forward function and layers; None, with no reference to its weights left, if it does not pass."""
    name = type(model).__name__
    try:
        forward, layers = candidate()
    except (ValueError, AttributeError) as error:
        logger.info("%s runs unfused: %s", name, error)
        return None
    except Exception:  # an outer boundary: the model's layers may be of any kind
        logger.warning("%s runs unfused", name, exc_info=True)
        return None
    try:
        proof.check(backend, forward, dtype, tolerance)
    except (ValueError, AttributeError) as error:
        logger.info("%s runs unfused: %s", name, error)
        return None
    except ProbeError as error:
        logger.warning("%s runs unfused: %s", name, error)
        return None
    return forward, layers


def from_pretrained(
    auto: Any, directory: Path, dtype: torch.dtype, heads: tuple[str, ...] = (), **options: Any
) -> PreTrainedModel:
    """Load the model with transformers' class `auto`. Raises ModelError if a weight is missing or belongs nowhere,
    except those whose names begin with one of `heads`.
    """
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
    except (
        ValueError,
        KeyError,
        TypeError,
        OSError,
        RuntimeError,
        SafetensorError,
        AttributeError,
        ImportError,
    ) as error:
        raise ModelError(f"transformers cannot load the model: {error}") from error
    if getattr(model, "_hf_peft_config_loaded", False):  # where peft is installed
        raise ModelError("adapter_config.json lies beside its weights; serve the adapter in it as an adapter")
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(heads))
    if missing:
        raise ModelError(f"{len(missing)} weights are missing, the first is {missing[0]}")
    if report["mismatched_keys"]:
        raise ModelError(
            f"weights have other shapes than config.json says, e.g. {sorted(report['mismatched_keys'])[0]}"
        )
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    check_unexpected(report["unexpected_keys"], layers if isinstance(layers, int) else sys.maxsize, heads)
    loaded: PreTrainedModel = model.eval()
    return loaded
