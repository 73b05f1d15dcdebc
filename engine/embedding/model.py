"""An embedding model: an encoder, or a decoder with last-token pooling.

It runs transformers' forward pass over padded batches. A model whose embeddings change with padding is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.embedding.pooling import Pooling, read_pooling
from engine.models.files import ModelError, check_weights, locate, max_model_len, read_config, tokenizer_file
from engine.models.formats import EMBEDDERS_HEADS, check_embedders_head, check_format
from engine.models.loader import DTYPES, from_pretrained
from engine.process.progress import progress
from engine.quantization.base import method

if TYPE_CHECKING:
    from pathlib import Path

    from engine.config import EngineConfig

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
LEAST_FILLED = 0.75
"""A text joins a padded batch only if it fills at least this fraction of the batch's row length."""


@dataclass(slots=True)
class EmbeddingModel:
    """A checked model. `truncations`: the lengths that its embeddings may be cut to; empty: none, None: any length."""

    model: Any
    pooling: Pooling
    architecture: str
    directory: Path
    tokenizer_file: Path
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    dimensions: int
    truncations: list[int] | None

    @torch.inference_mode()
    def embed(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """One vector [dimensions] float32 for each sequence of ids, not normalised."""
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        vectors: dict[int, torch.Tensor] = {}
        while order:
            least = len(sequences[order[0]]) * LEAST_FILLED
            count = sum(len(sequences[i]) >= least for i in order)
            group, order = order[:count], order[count:]
            vectors.update(zip(group, self._forward([sequences[i] for i in group]), strict=True))
        return [vectors[i] for i in range(len(sequences))]

    def _forward(self, sequences: list[list[int]]) -> torch.Tensor:
        lengths = torch.tensor([len(ids) for ids in sequences])
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        ids = torch.full((len(sequences), int(lengths.max())), padding)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
        options = {} if self.model.config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else {"use_cache": False}
        hidden = self.model(input_ids=ids, attention_mask=mask, **options).last_hidden_state
        return self.pooling.embed(hidden, lengths)


def load_embedding_model(config: EngineConfig) -> EmbeddingModel:
    """Find, check and load the model; raises ModelError with the reason if it cannot be served.

    `dtype` "auto" is float32, because vectors are compared with those that other programs compute with the same
    weights.
    """
    if config.device == "cuda" or method(config.quantization) is not None:
        raise ModelError("embedding models compute on the CPU, with their weights as they are")
    directory = locate(config.model)
    hf_config = read_config(directory)
    check_embedders_head(getattr(hf_config, "architectures", None))
    check_weights(directory)
    check_format(directory)
    dtype = torch.float32 if config.dtype == "auto" else DTYPES[config.dtype]
    text_config = hf_config.get_text_config()
    # A model is an encoder unless transformers lists it as a causal LM; families that are decoders only with
    # `is_decoder` set in their configuration are encoders too.
    causal = text_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not hasattr(text_config, "is_decoder")
    pooling = read_pooling(directory, causal)
    progress.begin("reading the weights")
    model = from_pretrained(AutoModel, directory, dtype, heads=EMBEDDERS_HEADS)
    own = min([max_model_len(hf_config, 0), *_position_tables(model)])
    own = min(own, pooling.max_tokens or own)
    if config.max_model_len > own:
        raise ModelError(f"max_model_len must be at most {own}, the model's own limit, got {config.max_model_len}")
    hidden = int(text_config.hidden_size)
    dimensions = pooling.dimensions(hidden)
    lengths = getattr(hf_config, "matryoshka_dimensions", None) or []
    if not isinstance(lengths, list) or not all(type(n) is int and 1 <= n <= dimensions for n in lengths):
        raise ModelError(f"config.json: matryoshka_dimensions must be a list of numbers from 1 to {dimensions}")
    loaded = EmbeddingModel(
        model=model,
        pooling=pooling,
        architecture=type(model).__name__,
        directory=directory,
        tokenizer_file=tokenizer_file(directory, config.cache_dir),
        dtype=dtype,
        max_model_len=config.max_model_len or own,
        vocab_size=int(text_config.vocab_size),
        dimensions=dimensions,
        truncations=lengths or (None if getattr(hf_config, "is_matryoshka", False) else []),
    )
    progress.begin("verifying the model")
    _check_padding(loaded)
    return loaded


def _position_tables(model: nn.Module) -> list[int]:
    """The tokens that fit into tables of positions which begin after the padding id, as those of RoBERTa and its descendants do."""
    tables = [table for name, table in model.named_modules() if name.endswith("position_embeddings")]
    offset = [table for table in tables if isinstance(getattr(table, "padding_idx", None), int)]
    return [table.weight.shape[0] - table.padding_idx - 1 for table in offset]


def _check_padding(loaded: EmbeddingModel) -> None:
    """Raise ModelError unless texts of several lengths get the same vectors together as alone."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, loaded.max_model_len) for n in (17, 14, 13)]
    texts = [torch.randint(loaded.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    try:
        together = loaded.embed(texts)
        alone = [loaded.embed([text])[0] for text in texts]
    except Exception as error:  # model families fail in different ways; the reason goes to the operator
        raise ModelError(f"{loaded.architecture} cannot make embeddings: {error}") from error
    for one, other in zip(together, alone, strict=True):
        difference = float((one - other).norm() / other.norm().clamp_min(1e-6))
        if one.shape != (loaded.dimensions,) or not difference <= TOLERANCE[loaded.dtype]:
            raise ModelError(f"{loaded.architecture} gives other embeddings in a batch than alone ({difference:.1e})")
