"""What a worker makes of a model's files before any weight is loaded."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from engine.models.files import tokenizer_file


def test_a_converted_tokenizer_is_written_once(tmp_path):
    """So that a worker that replaces another starts on a disk that is full by then."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    cache.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (model / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (model / "merges.txt").write_text("#version: 0.2\na b\n")
    made = tokenizer_file(model, str(cache))
    assert Tokenizer.from_file(str(made)).encode("ab").ids == [3]
    written = made.stat()
    assert tokenizer_file(model, str(cache)) == made
    assert (made.stat().st_mtime_ns, made.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    made.write_bytes(b"\xff half of what another model")
    assert Tokenizer.from_file(str(tokenizer_file(model, str(cache)))).encode("ab").ids == [3]
