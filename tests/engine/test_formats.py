"""Checkpoints that transformers would load wrong, with a warning at most: each is refused by the name of what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, Qwen3ForSequenceClassification

from engine.config import EngineConfig
from engine.embedding.model import load_embedding_model
from engine.models.files import ModelError, makes_embeddings
from tests.conftest import DEMO
from tests.engine.encoders import encoder
from tests.engine.engines import Driver, core
from tests.models.random_models import make_model


@pytest.fixture
def model(models_dir, tmp_path) -> Path:
    return shutil.copytree(make_model(models_dir, "qwen3"), tmp_path / "model")


def change(directory: Path, name: str = "config.json", **fields: object) -> None:
    path = directory / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))


def store(directory: Path, made) -> None:
    """Change the tensors by `made`, which takes and returns a dictionary."""
    save_file(made(load_file(directory / "model.safetensors")), directory / "model.safetensors", {"format": "pt"})


def fp8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ModelOpt writes them: a scale for each linear layer."""
    stored = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or "embed" in name or "lm_head" in name:
            stored[name] = weight
            continue
        scale = weight.abs().max() / 448
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        stored[name.replace(".weight", ".weight_scale")] = scale.float()
        stored[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
    return stored


METHODS = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "MXFP4": {"quant_method": "mxfp4"},
    "NVFP4 (ModelOpt)": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "bitsandbytes": {"load_in_4bit": True},
    "AutoRound": {"quant_method": "intel/auto-round", "bits": 4},
    "'brand-new'": {"quant_method": "brand-new"},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_declared_format_is_named(model, name):
    change(model, quantization_config=METHODS[name])
    with pytest.raises(ModelError) as caught:
        core(model)
    assert f"quantized as {name}, which this release does not read" in str(caught.value)
    assert "install" not in str(caught.value)


@pytest.mark.parametrize("declared", [True, False])
def test_fp8_weights_do_not_lose_their_scales(model, declared):
    store(model, fp8)
    if declared:
        change(model, "hf_quant_config.json", quantization={"quant_algo": "FP8"})
    with pytest.raises(ModelError, match=r"quantized as FP8"):
        core(model)


STORED = {
    "compressed-tensors": {"q.weight_packed": torch.zeros(2, 2, dtype=torch.int32)},
    "AWQ or GPTQ": {"q.qweight": torch.zeros(2, 2, dtype=torch.int32)},
    "bitsandbytes": {"q.weight.absmax": torch.zeros(2)},
    "NVFP4": {"q.weight_scale_2": torch.zeros(())},
    "MXFP4": {"experts.gate_up_proj_blocks": torch.zeros(2, 2, dtype=torch.uint8)},
    "I8 without a declared format": {"q.weight": torch.zeros(2, 2, dtype=torch.int8)},
    "F8_E5M2": {"q.weight": torch.zeros(2, 2).to(torch.float8_e5m2)},
}


@pytest.mark.parametrize("name", STORED)
def test_a_format_that_nothing_declares_is_told_by_its_tensors(model, name):
    store(model, lambda weights: {**weights, **STORED[name]})
    with pytest.raises(ModelError, match=f"quantized as {'FP8' if name.startswith('F8') else name}"):
        core(model)


@pytest.mark.parametrize(("file", "name"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")])
def test_a_format_of_before_transformers_knew_it(model, file, name):
    change(model, file, bits=4)
    with pytest.raises(ModelError, match=f"quantized as {name}"):
        core(model)


def test_gguf_is_named(model):
    (model / "model.safetensors").rename(model / "model-Q4_K_M.gguf")
    for source in (model, model / "model-Q4_K_M.gguf"):
        with pytest.raises(ModelError, match="does not read GGUF: serve the checkpoint that it was made from"):
            core(source)


def test_a_reward_model_generates_no_text(model, tmp_path):
    scores = Qwen3ForSequenceClassification.from_pretrained(model, num_labels=1)
    scores.save_pretrained(tmp_path / "scores")
    shutil.copy(model / "tokenizer.json", tmp_path / "scores")
    with pytest.raises(ModelError, match="Qwen3ForSequenceClassification, which has no language-model head"):
        core(tmp_path / "scores")
    with pytest.raises(ModelError, match="Qwen3ForSequenceClassification, whose head gives scores"):
        load_embedding_model(EngineConfig(model=str(tmp_path / "scores"), task="embed"))
    assert not makes_embeddings(tmp_path / "scores")


@pytest.mark.parametrize("name", ["Qwen2ForRewardModel", "LlamaRewardModel"])
def test_a_reward_model_by_its_name_is_no_embedder(model, name):
    change(model, architectures=[name])
    assert not makes_embeddings(model)
    with pytest.raises(ModelError, match=f"{name}, which has no language-model head"):
        core(model)


@pytest.mark.parametrize("extra", ["v_head.summary.weight", "score.weight", "model.layers.0.self_attn.q_proj.scale",
                                   "model.layers.0.mlp.extra.weight"])  # fmt: skip
def test_a_weight_that_no_layer_takes_is_refused(model, extra):
    store(model, lambda weights: {**weights, extra: torch.ones(4)})
    with pytest.raises(
        ModelError, match=f"1 weights of its files belong to no layer of the model, the first is {extra}"
    ):
        core(model)


HARMLESS = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.99.mlp.up_proj.weight",
            "mtp.layers.0.norm.weight", "model.layers.0.self_attn.k_proj.k_scale",
            "model.layers.1.self_attn.attn.v_scale", "model.mtp_layers.0.norm.weight", "model.embeddings.position_ids"]  # fmt: skip


def test_what_a_language_model_does_not_need_is_left_out(model, models_dir):
    store(model, lambda weights: {**weights, **{name: torch.ones(4) for name in HARMLESS}})
    driver, plain = Driver(core(model)), Driver(core(make_model(models_dir, "qwen3")))
    for each in (driver, plain):
        each.submit(1, [5, 6, 7], max_tokens=5, ignore_eos=True)
        each.run()
    assert driver.tokens(1) == plain.tokens(1)


def test_a_tied_head_may_be_stored(tmp_path, models_dir):
    """Some writers store it beside the table that it is tied to."""
    model = shutil.copytree(DEMO, tmp_path / "model")
    tied = AutoModelForCausalLM.from_pretrained(model)
    assert tied.config.tie_word_embeddings
    store(model, lambda weights: {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    driver = Driver(core(model))
    driver.submit(1, [5, 6, 7], max_tokens=2, ignore_eos=True)
    driver.run()
    assert len(driver.tokens(1)) == 2


def test_an_encoder_may_have_the_head_that_it_was_trained_with(tmp_path):
    plain = encoder(tmp_path, "bert")
    config = BertConfig.from_pretrained(plain)
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    shutil.copy(plain / "tokenizer.json", tmp_path / "masked")
    assert load_embedding_model(EngineConfig(model=str(tmp_path / "masked"))).dimensions == config.hidden_size
    store(tmp_path / "masked", lambda weights: {**weights, "adapter.weight": torch.ones(4)})
    with pytest.raises(ModelError, match=r"the first is adapter\.weight"):
        load_embedding_model(EngineConfig(model=str(tmp_path / "masked")))
