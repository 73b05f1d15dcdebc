"""Makes embedding models with random weights, in sentence-transformers' format."""

from __future__ import annotations

import shutil

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel

from tests.conftest import DEMO

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0,
    "max_position_embeddings": 130, "initializer_range": 0.2, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
VOCABULARY = Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab_size()


def encoder(directory, kind: str, *rest, normalise: bool = True, **changes):
    """A random transformer with what follows it, as sentence-transformers itself saves them."""
    plain = directory / f"{kind}-plain"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, "model_type": kind, "vocab_size": VOCABULARY, **changes})
    AutoModel.from_config(config).save_pretrained(plain)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, plain / file)
    if not rest:
        return plain
    target = directory / kind
    ending = [modules.Normalize()] if normalise else []
    SentenceTransformer(modules=[modules.Transformer(str(plain)), *rest, *ending], device="cpu").save(str(target))
    return target
