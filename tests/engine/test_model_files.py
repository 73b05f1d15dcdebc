"""What a worker makes of a model's files before any weight is loaded."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.failures import FinishReason
from engine.models.files import ModelError, read_config, tokenizer_file
from engine.models.identity import model_digest
from tests.engine.engines import Driver, core
from tests.live import DEMO
from tests.models.random_models import make_model


def unconverted(folder, *merged):
    """A model whose tokenizer is in older files; its last tokens are pairs of letters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "vocab.json").write_text(
        json.dumps({text: token for token, text in enumerate(["<|endoftext|>", "a", "b", *merged])})
    )
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merged)]) + "\n")
    return folder


def test_a_converted_tokenizer_is_written_once(tmp_path):
    """So that a worker that replaces another starts on a disk that is full by then."""
    model, cache = unconverted(tmp_path / "model", "ab"), tmp_path / "cache"
    cache.mkdir()
    made = tokenizer_file(model, str(cache))
    assert Tokenizer.from_file(str(made)).encode("ab").ids == [3]
    written = made.stat()
    assert tokenizer_file(model, str(cache)) == made
    assert (made.stat().st_mtime_ns, made.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    made.write_bytes(b"\xff half of a file")
    assert Tokenizer.from_file(str(tokenizer_file(model, str(cache)))).encode("ab").ids == [3]
    assert list(cache.iterdir()) == [made]


def test_models_whose_directories_have_the_same_name_keep_their_own_tokenizers(tmp_path):
    """Two deployments, or two versions of one model: they share the folder of derived files."""
    models = [unconverted(tmp_path / "one" / "model", "ab"), unconverted(tmp_path / "other" / "model", "ba", "ab")]
    made = [tokenizer_file(model, str(tmp_path)) for model in models]
    assert [Tokenizer.from_file(str(path)).encode("ab").ids for path in made] == [[3], [4]]


def quantized(folder, config):
    shutil.copytree(DEMO, folder)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    return folder


def test_a_quantization_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        read_config(quantized(tmp_path / "model", "awq"))


def test_a_cache_has_the_bytes_that_were_asked_for():
    """Also few; too few for any sequence are refused."""
    asked = {"kv_cache_bytes": 1 << 20, "max_model_len": 512}
    engine = core(DEMO, **asked)
    used = sum(
        tensor.nbytes for tensors in (engine.runner.cache.keys, engine.runner.cache.values) for tensor in tensors
    )
    assert used <= 1 << 20
    driver = Driver(engine)
    driver.submit(1, [5, 6, 7], max_tokens=3, ignore_eos=True)
    driver.run()
    assert len(driver.tokens(1)) == 3
    engine.close()
    with pytest.raises(ModelError, match=r"kv_cache_bytes must be at least \d+ .* got 1000"):
        core(DEMO, kv_cache_bytes=1000)


@pytest.mark.parametrize(("named", "known"), [(50256, []), (-1, []), ([2, 400, -1, 17], [2, 17])])
def test_an_end_of_sequence_token_outside_of_the_vocabulary_is_never_sampled(tmp_path, named, known, caplog):
    """transformers runs such models; they end at their other tokens, or at `max_tokens`."""
    model = make_model(tmp_path, "llama")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, "eos_token_id": named}))
    (model / "tokenizer_config.json").write_text("{}")
    driver = Driver(core(model))
    assert driver.engine.info.eos_token_ids == known
    assert "end-of-sequence" in caplog.text
    driver.submit(1, [5, 6, 7], max_tokens=3, min_tokens=3, logit_bias=dict.fromkeys(range(399), -100.0))
    driver.run()
    assert driver.tokens(1) == [399] * 3  # the last one, for which -1 would stand


@pytest.mark.parametrize("spelled", ["text", "object"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_text_ends_at_the_tokenizers_own_end_too(models_dir, tmp_path, file, spelled):
    """Fine-tunes often change only the tokenizer."""
    model = shutil.copytree(make_model(models_dir, "llama"), tmp_path / "model")
    end = Tokenizer.from_file(str(model / "tokenizer.json")).id_to_token(17)
    (model / "tokenizer_config.json").write_text("{}")
    (model / file).write_text(json.dumps({"eos_token": end if spelled == "text" else {"content": end}}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "eos_token_id": 0}))
    driver = Driver(core(model))
    assert driver.engine.info.eos_token_ids == [3, 0, 17]
    for number, token in enumerate((3, 0, 17)):
        driver.submit(number, [5, 6, 7], max_tokens=5, logit_bias={token: 100.0})
        driver.run()
        assert driver.finish_reason(number) == FinishReason.STOP


def test_models_that_differ_in_one_token_are_two(models_dir, tmp_path):
    """As after a training of new tokens alone."""
    source = make_model(models_dir, "llama")
    shutil.copytree(source, tmp_path / "other")
    weights = load_file(source / "model.safetensors")
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name][37] += 0.5
    save_file(weights, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    assert model_digest(source, "none") == model_digest(source, "none")
    assert model_digest(source, "none") != model_digest(tmp_path / "other", "none")
