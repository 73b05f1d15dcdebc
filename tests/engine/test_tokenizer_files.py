"""Tokenizers that are published without a tokenizer.json: they are converted, and their ids stay their libraries'."""

from __future__ import annotations

import base64
import json

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.models.files import ModelError, tokenizer_file

CORPUS = [
    "The capital of Spain is Madrid, and that of Norway is Oslo; both are towns with many people in them.",
    "def answer(question: str) -> str:\n    return question.upper()  # 42 times, or 1234567890",
    "A sentence can be as long as it wants, can't it? It's what I'd say: don't worry, we'll see.",
] * 40
TEXTS = [
    "The capital of Norway", "äöü ß 日本語 🙂 é", "def f(x):\n    return x + 1", "12345 67", "It's here; don't", "tabs\tand lines\n\n",
]  # fmt: skip
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(folder, model_type, config):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def ranks() -> dict[bytes, int]:
    """Mergeable bytes by their rank: what a tiktoken.model contains."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    in_order = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return {bytes(letters[letter] for letter in token): rank for token, rank in in_order}


def converted(folder) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file(folder, str(folder))))


def test_sentencepiece(tmp_path):
    """As Llama 2's was published: pieces with a fallback to bytes."""
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=400, model_type="bpe",
        byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, remove_extra_whitespaces=False,
        normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    write(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"})
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = converted(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == own.encode(text)
        assert tokenizer.decode(own.encode(text)) == own.decode(own.encode(text))


def test_tiktoken(tmp_path):
    """Bytes by their ranks, special tokens in tokenizer_config.json, with gaps between them."""
    mergeable = ranks()
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in mergeable.items())
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    special = {len(mergeable): "[BOS]", len(mergeable) + 1: "[EOS]", len(mergeable) + 4: "<|im_user|>"}
    tokens = {str(token): {"content": text, "special": True} for token, text in special.items()}
    write(tmp_path, "kimi_k25", {"added_tokens_decoder": tokens, "bos_token": "[BOS]", "eos_token": "[EOS]"})
    own = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=mergeable, special_tokens={})
    tokenizer = converted(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == own.encode(text)
    assert {token: tokenizer.id_to_token(token) for token in special} == special


@pytest.mark.parametrize("model_type", ["mistral3", "ministral3"])
def test_tekken(tmp_path, model_type):
    """As Mistral's newer models are published: bytes by their ranks after a number of special tokens."""
    mergeable, first = ranks(), 100
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in mergeable.items()
    ]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "<s>", "</s>"])]
    config = {
        "pattern": pattern, "num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab) + first,
        "default_num_special_tokens": first, "version": "v7",
    }  # fmt: skip
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    own = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=mergeable, special_tokens={})
    tokenizer = converted(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == [first + token for token in own.encode(text)]
    assert tokenizer.token_to_id("</s>") == 2


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "kimi_k25"])
def test_a_tokenizer_that_needs_the_models_code_is_refused(tmp_path, model_type):
    """As Kimi's are published. transformers would split texts otherwise than that code, for some types silently."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    own = {"AutoTokenizer": ["tokenization_own.TikTokenTokenizer", None]}
    write(tmp_path, model_type, {"tokenizer_class": "TikTokenTokenizer", "auto_map": own})
    with pytest.raises(ModelError, match=r"needs code of the model, which is never run; add a tokenizer\.json"):
        tokenizer_file(tmp_path, str(tmp_path))
