"""Makes a model with random weights that every server can load and whose every token can be read in a stream.

    python -m benchmarks.models SHAPE DTYPE FOLDER

The tokenizer has the shape's whole vocabulary: what it learns from the standard library's sources, then made-up words that
are only ever decoded. Tokens that are not plain text have embeddings of zeros. Their logits are zero then, so that greedy
decoding never chooses them: no answer ends early, and no text is held back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.models.random_models import REAL, make_model

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
LEARNED = 16384
CORPUS_BYTES = 8 << 20
EMBEDDING = "model.embed_tokens.weight"


def corpus() -> Iterator[str]:
    """ASCII text, the same for one version of Python."""
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if total < CORPUS_BYTES and "site-packages" not in path.parts:
            text = path.read_bytes().decode("ascii", "ignore")
            total += len(text)
            yield text


def learn() -> dict[str, Any]:
    """A byte-level BPE as tokenizer.json has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=LEARNED, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus(), trainer)
    learned: dict[str, Any] = json.loads(tokenizer.to_str())
    return learned


def fill(tokenizer: dict[str, Any], size: int) -> dict[str, int]:
    """Extend its vocabulary to `size` tokens, the special ones last, and return it."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), size - len(SPECIALS)):
        vocabulary[f"\u0120filler{number}"] = number
    tokenizer["added_tokens"] = []
    for number, token in enumerate(SPECIALS, size - len(SPECIALS)):
        vocabulary[token] = number
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags})
    return vocabulary


def is_plain(token: str) -> bool:
    """Whether the token is ASCII text, as a byte-level vocabulary writes it."""
    return token not in SPECIALS and all("!" <= character <= "~" or character == "\u0120" for character in token)


def make(shape: str, dtype: torch.dtype, target: Path) -> None:
    """Write the model; `target` exists only when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        folder = make_model(Path(unfinished), shape, dtype=dtype)
        tokenizer = learn()
        vocabulary = fill(tokenizer, REAL[shape]["vocab_size"])
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        names = {"eos_token": SPECIALS[0], "pad_token": SPECIALS[3], "additional_special_tokens": list(SPECIALS[1:3])}
        # The class that both transformers 4 and 5 know, since peers pin theirs.
        settings = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        ends = {"eos_token_id": vocabulary[SPECIALS[0]], "pad_token_id": vocabulary[SPECIALS[3]], "bos_token_id": None}
        for name in ("config.json", "generation_config.json"):
            config = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**config, **ends}, indent=1))
        weights = load_file(folder / "model.safetensors")
        weights[EMBEDDING][[number for token, number in vocabulary.items() if not is_plain(token)]] = 0
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.move(folder, target)


def main() -> None:
    """Make the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(REAL))
    parser.add_argument("dtype", choices=["bfloat16", "float32"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    make(options.shape, getattr(torch, options.dtype), options.folder)


if __name__ == "__main__":
    main()
