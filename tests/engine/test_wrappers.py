"""Models that read images or sound beside text: their decoders answer texts as transformers does, adapters included."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, GenerationConfig

from engine.adapters.failures import AdapterCode
from engine.adapters.files import WEIGHTS, content_digest
from engine.messages import AdapterRef
from engine.models.files import ModelError
from engine.models.wrappers import decoder_of
from tests.engine.engines import Driver, Reference, core, prompts
from tests.models.random_models import DEMO, TOKENIZER_FILES
from tests.models.tiny_families import tiny_config

ALONE = {"mistral3": "MistralForCausalLM", "internvl": "Qwen2ForCausalLM", "smolvlm": "LlamaForCausalLM"}
"""Families whose decoder is one that transformers also has by itself."""
WITHIN = ("qwen2_5_vl", "qwen3_vl", "glm4v")


def make(folder: Path, family: str) -> Path:
    """A tiny model of the family with random weights."""
    target = folder / family
    if not target.is_dir():
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(tiny_config(family), dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.add_(torch.randn_like(weight) * 0.05)
                else:
                    weight.normal_(0, 1.0 if "embed" in name else 1.4 * weight.shape[-1] ** -0.5)
        model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
        model.save_pretrained(target)
        for file in TOKENIZER_FILES:
            shutil.copy(DEMO / file, target / file)
    return target


def adapter_of(model: Path, target: Path, modules: str) -> Path:
    """peft's adapter of the whole model's modules that the pattern names."""
    whole = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(whole, LoraConfig(r=4, target_modules=modules)).save_pretrained(target)
    return target


class Whole(Reference):
    """transformers' own generate by the whole model, with peft's adapter where one is given."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self.model = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32).eval()
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wrappers")


@pytest.mark.parametrize("family", [*ALONE, *WITHIN])
def test_texts_and_adapters_are_those_of_the_whole_model(family, folder):
    model = make(folder, family)
    target = folder / f"{family}-adapter"
    torch.manual_seed(1)
    adapted = get_peft_model(
        AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules=r".*(language_model|text_model)\..*\.(q_proj|v_proj|down_proj)"),
    )
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(target)
    driver = Driver(core(model))
    asked = prompts(400, (30, 5, 17, 9))
    refs = [None, AdapterRef(content_digest(target), str(target))] * 2
    for i, (prompt, ref) in enumerate(zip(asked, refs, strict=True)):
        assert driver.submit(i, prompt, adapter=ref, max_tokens=10, ignore_eos=True) is None
        driver.step()
    driver.run()
    for ref in (None, target):
        reference = Whole(model, ref)
        for i, prompt in enumerate(asked):
            if (refs[i] is None) == (ref is None):
                reference.assert_equal(prompt, driver.tokens(i))
    driver.engine.close()


@pytest.mark.parametrize("family", [*ALONE, *WITHIN])
def test_what_no_text_needs_is_left_out_of_memory(family, folder):
    whole = AutoModelForMultimodalLM.from_pretrained(make(folder, family), dtype=torch.float32).eval()
    served = decoder_of(whole)
    assert type(served).__name__ == ALONE.get(family, type(whole).__name__)
    decoder = served.get_decoder()
    kept = {id(weight) for weight in (*decoder.parameters(), *served.get_output_embeddings().parameters())}
    assert {id(weight) for weight in served.parameters()} == kept


def test_an_adapter_of_what_reads_images_is_refused(folder):
    model = make(folder, "internvl")
    target = adapter_of(model, folder / "vision-adapter", r".*vision_tower.*q_proj")
    engine = core(model)
    driver = Driver(engine)
    driver.submit(0, [5, 6, 7], adapter=AdapterRef(content_digest(target), str(target)))
    driver.run()
    (output,) = driver.outputs[0]
    assert output.error.facts["adapter"] == AdapterCode.NO_LAYER
    engine.close()


def test_names_of_older_releases(folder):
    """Adapters that were trained when the language model stood around its decoder."""
    model = make(folder, "mistral3")
    target = adapter_of(model, folder / "older-adapter", r".*language_model.*q_proj")
    newer = AdapterRef(content_digest(target), str(target))
    older = folder / "renamed-adapter"
    shutil.copytree(target, older)
    tensors = load_file(target / WEIGHTS)
    renamed = {key.replace("model.language_model.", "language_model.model."): tensor for key, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, older / WEIGHTS)
    driver = Driver(core(model))
    for i, ref in enumerate((newer, AdapterRef(content_digest(older), str(older)))):
        driver.submit(i, [5, 6, 7, 8], adapter=ref, max_tokens=8, ignore_eos=True)
    driver.run()
    assert driver.tokens(0) == driver.tokens(1) != []
    driver.engine.close()


def test_weights_of_a_layer_under_two_names_are_refused(folder):
    model = make(folder, "mistral3")
    target = adapter_of(model, folder / "twice", r".*language_model.*layers.0.*q_proj")
    tensors = load_file(target / WEIGHTS)
    older = {
        key.replace("model.language_model.", "language_model.model."): tensor.clone() for key, tensor in tensors.items()
    }
    save_file({**tensors, **older}, target / WEIGHTS)
    driver = Driver(core(model))
    driver.submit(0, [5, 6, 7], adapter=AdapterRef(content_digest(target), str(target)))
    driver.run()
    assert driver.outputs[0][0].error.facts["adapter"] == AdapterCode.TWICE
    driver.engine.close()


def test_an_encoder_with_a_decoder_is_refused_by_name(tmp_path):
    target = make(tmp_path, "mistral3")
    tiny_config("t5gemma2").save_pretrained(target)
    with pytest.raises(ModelError, match="t5gemma2 is an encoder with a decoder; only decoders are served"):
        core(target)
