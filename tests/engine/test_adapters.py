"""Adapters in one batch against peft, one at a time; slots, waiting and loading; and every adapter that is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.adapters.files import CONFIG, WEIGHTS, content_digest
from engine.adapters.peft import read_adapter
from engine.failures import Failure, FailureCode, words
from engine.messages import AdapterCommand, AdapterRef
from tests.engine.engines import Driver, Reference, core, prompts
from tests.models.random_models import make_model
from tests.waiting import wait_until

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA},
    "attention": {"r": 5, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LLAMA,
        "rank_pattern": {"layers.0.*q_proj": 9, "down_proj": 2},
        "alpha_pattern": {"k_proj": 40},
    },
    "rslora": {"r": 40, "lora_alpha": 12, "use_rslora": True, "target_modules": LLAMA},
    "dora": {"r": 6, "lora_alpha": 12, "use_dora": True, "target_modules": LLAMA},
    "dora-part": {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["k_proj", "up_proj"]},
}


def make_adapter(model: Path, folder: Path, name: str, **config: object) -> AdapterRef:
    """A PEFT adapter with random weights that change the model's answers."""
    target = folder / model.name / name
    if not target.is_dir():
        torch.manual_seed(sum(name.encode()))
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.3)
            if "magnitude" in key:
                parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
        adapted.save_pretrained(target)
    return AdapterRef(content_digest(target), str(target))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def assert_equal_to_peft(driver: Driver, model: Path, refs: list[AdapterRef | None]) -> None:
    """Every adapter and none in one batch, chunked and staggered: tokens exact, log-probabilities within 1e-5."""
    asked = prompts(400, (30, 5, 41, 17, 23, 9, 12)[: len(refs)])
    for i, (prompt, ref) in enumerate(zip(asked, refs, strict=True)):
        assert driver.submit(i, prompt, adapter=ref, max_tokens=12, ignore_eos=True, prompt_logprobs=0) is None
        driver.step()
    driver.run()
    for i, (prompt, ref) in enumerate(zip(asked, refs, strict=True)):
        reference = Reference(model, None if ref is None else Path(ref.directory))
        reference.assert_equal(prompt, driver.tokens(i))
        found = torch.tensor([t.logprob for o in driver.outputs[i] for t in o.prompt_logprobs or []])
        expected = reference.logprobs(prompt)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_kind_in_one_batch_equals_peft(family, models_dir, folder):
    model = make_model(models_dir, family)
    refs = [make_adapter(model, folder, name, **config) for name, config in VARIANTS.items()]
    driver = Driver(core(model, max_num_batched_tokens=17, max_num_seqs=8, max_model_len=128))
    assert_equal_to_peft(driver, model, [*refs, None])


def test_a_family_that_runs_unfused(models_dir, folder):
    model = make_model(models_dir, "gpt2")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    refs = [make_adapter(model, folder, "gpt2", **config), make_adapter(model, folder, "gpt2-other", **config)]
    assert_equal_to_peft(Driver(core(model, max_model_len=128)), model, [None, *refs])


def test_bfloat16_stays_near_peft(models_dir, folder):
    from engine.config import EngineConfig
    from engine.core import EngineCore

    model = make_model(models_dir, "llama")
    ref = make_adapter(model, folder, "dora", **VARIANTS["dora"])
    driver = Driver(EngineCore(EngineConfig(model=str(model), dtype="bfloat16", max_model_len=128)))
    (prompt,) = prompts(400, (60,))
    driver.submit(0, prompt, adapter=ref, max_tokens=1, prompt_logprobs=0)
    driver.run()
    found = torch.tensor([t.logprob for o in driver.outputs[0] for t in o.prompt_logprobs or []])
    expected = Reference(model, Path(ref.directory)).logprobs(prompt)
    assert float((found - expected).abs().mean() / expected.abs().mean()) < 0.02


def test_prefixes_are_shared_within_an_adapter_only(models_dir, folder):
    model = make_model(models_dir, "llama")
    refs = [make_adapter(model, folder, name, **VARIANTS[name]) for name in ("plain", "attention")]
    driver = Driver(core(model, max_model_len=128))
    (prompt,) = prompts(400, (64,))
    cached = []
    for i, ref in enumerate([refs[0], refs[1], None, refs[0], refs[1], None]):
        driver.submit(i, prompt, adapter=ref, max_tokens=2, ignore_eos=True)
        driver.run()
        cached.append(driver.outputs[i][0].cached_tokens)
    assert cached == [0, 0, 0, 48, 48, 48]


def test_more_adapters_than_slots_and_nobody_starves(models_dir, folder):
    """Two adapters hold both slots with ever new requests; a third gets a slot, and others pass it meanwhile."""
    model = make_model(models_dir, "llama")
    refs = [make_adapter(model, folder, name, **VARIANTS[name]) for name in ("plain", "attention", "rslora")]
    driver = Driver(core(model, max_model_len=128, max_adapters=2, max_num_seqs=8))
    asked = prompts(400, (7,) * 40)
    number = 0

    def submit(ref: AdapterRef | None) -> int:
        nonlocal number
        driver.submit(number, asked[number], adapter=ref, max_tokens=8, ignore_eos=True)
        number += 1
        return number - 1

    for ref in refs:
        driver.engine.command(AdapterCommand(0, "load", ref))
    wait_for(driver, refs)
    for _ in range(2):
        submit(refs[0])
        submit(refs[1])
        driver.step()
    third, plain = submit(refs[2]), submit(None)
    while not driver.outputs[third]:
        assert number < 38, "the third adapter starves"
        submit(refs[number % 2])
        for _ in range(3):
            driver.step()
    assert driver.outputs[plain]
    assert refs[2].digest in driver.engine.adapters.in_slots
    driver.run()
    for i in range(number):
        assert len(driver.tokens(i)) == 8


def test_the_output_layer_takes_no_adapter(models_dir, folder):
    """It sees the rows that are sampled, not the step's; so do experts those that are routed to them."""
    for family in ("llama", "gpt2", "mixtral"):
        shapes = core(make_model(models_dir, family), max_model_len=64).adapters.shapes
        assert shapes
        assert not any("lm_head" in path or "experts" in path for path in shapes)


def test_the_output_layer_takes_no_adapter_where_it_sees_the_rows_of_all_steps(tmp_path):
    """When the model is proven, steps of one row, which are made two, come only with short contexts."""
    for family in ("gemma", "gpt2"):
        long = {"max_position_embeddings": 2048} | ({"n_positions": 2048} if family == "gpt2" else {})
        shapes = core(make_model(tmp_path, family, **long), max_model_len=1024).adapters.shapes
        assert shapes
        assert "lm_head" not in shapes


def test_an_idle_engine_loads_and_pins(models_dir, folder):
    model = make_model(models_dir, "llama")
    ref = make_adapter(model, folder, "plain", **VARIANTS["plain"])
    engine = core(model, max_model_len=64)
    assert engine.command(AdapterCommand(0, "load", ref)) is None
    wait_until(lambda: engine.command(AdapterCommand(1, "pin", ref)) is None, every_s=0.01)


def wait_for(driver: Driver, refs: list[AdapterRef]) -> None:
    """Until the adapters are loaded."""

    def loaded() -> bool:
        driver.engine.adapters.poll()
        return all(driver.engine.adapters.loaded(ref.digest) for ref in refs)

    wait_until(loaded, every_s=0.01)


@pytest.mark.parametrize("cached", [1, 2])
def test_more_adapters_than_the_cache_holds(cached, models_dir, folder):
    """Those that wait longest are loaded first, and every request is served."""
    model = make_model(models_dir, "llama")
    refs = [make_adapter(model, folder, name, **config) for name, config in VARIANTS.items()]
    driver = Driver(core(model, max_model_len=128, max_adapters=1, max_cached_adapters=cached, max_num_seqs=4))
    (prompt,) = prompts(400, (9,))
    for i in range(12):
        driver.submit(i, prompt, adapter=refs[i % len(refs)], max_tokens=3, ignore_eos=True)
    driver.run()
    assert [len(driver.tokens(i)) for i in range(12)] == [3] * 12
    assert all(driver.tokens(i) == driver.tokens(i + 6) for i in range(6))


def test_a_failed_adapter_is_tried_again(models_dir, folder, tmp_path):
    model = make_model(models_dir, "llama")
    good = make_adapter(model, folder, "plain", **VARIANTS["plain"])
    late = AdapterRef(good.digest, str(tmp_path / "late"))
    driver = Driver(core(model, max_model_len=128))
    (prompt,) = prompts(400, (9,))
    driver.submit(0, prompt, adapter=late, max_tokens=3, ignore_eos=True)
    driver.run()
    assert driver.finish_reason(0) == "error"
    shutil.copytree(good.directory, late.directory)
    driver.submit(1, prompt, adapter=late, max_tokens=3, ignore_eos=True)
    driver.run()
    assert len(driver.tokens(1)) == 3


def test_a_slot_without_memory_fails_those_who_wait_for_it_alone(models_dir, folder, monkeypatch):
    model = make_model(models_dir, "llama")
    refs = [make_adapter(model, folder, name, **VARIANTS[name]) for name in ("plain", "attention")]
    driver = Driver(core(model, max_model_len=128))
    (prompt,) = prompts(400, (12,))
    driver.submit(0, prompt, adapter=refs[0], max_tokens=4, ignore_eos=True)
    driver.run()
    last = driver.engine.adapters.layers[-1]

    def put(digest: str, weights: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(last, "put", put)
        driver.submit(1, prompt, adapter=refs[1], max_tokens=4, ignore_eos=True)
        driver.submit(2, prompt, adapter=refs[0], max_tokens=4, ignore_eos=True)
        driver.run()
    assert driver.outputs[1][-1].error == Failure(
        FailureCode.ADAPTER, {"adapter": "slot_failed", "reason": "OutOfMemoryError"}
    )
    assert driver.tokens(2) == driver.tokens(0)
    driver.submit(3, prompt, adapter=refs[1], max_tokens=4, ignore_eos=True)
    driver.run()
    Reference(model, Path(refs[1].directory)).assert_equal(prompt, driver.tokens(3))


def test_pinning_and_unloading(models_dir, folder):
    model = make_model(models_dir, "llama")
    refs = [make_adapter(model, folder, name, **VARIANTS[name]) for name in ("plain", "attention", "rslora")]
    driver = Driver(core(model, max_model_len=128, max_adapters=2))
    engine = driver.engine
    assert engine.command(AdapterCommand(0, "pin", refs[0])) == AdapterFailure(AdapterCode.NOT_LOADED)
    for i, ref in enumerate(refs[:2]):
        driver.submit(i, prompts(400, (7,))[0], adapter=ref, max_tokens=2)
        driver.run()
    assert engine.command(AdapterCommand(0, "pin", refs[0])) is None
    assert engine.command(AdapterCommand(0, "pin", refs[1])).words == "at most 1 of 2 slots can be pinned"
    driver.submit(2, prompts(400, (7,))[0], adapter=refs[2], max_tokens=50, ignore_eos=True)
    while not driver.outputs[2]:
        driver.step()
    assert set(engine.adapters.in_slots) == {refs[0].digest, refs[2].digest}
    assert engine.command(AdapterCommand(0, "unload", refs[2])) == AdapterFailure(AdapterCode.IN_USE)
    driver.run()
    assert engine.command(AdapterCommand(0, "unload", refs[2])) is None
    assert engine.adapters.in_slots == [refs[0].digest]


def test_a_request_that_comes_as_loading_fails_does_not_keep_the_others_waiting(models_dir, tmp_path):
    engine = core(make_model(models_dir, "llama"), max_model_len=64)
    driver, ref = Driver(engine), AdapterRef("1" * 64, str(tmp_path))
    (prompt,) = prompts(400, (9,))
    driver.submit(0, prompt, adapter=ref, max_tokens=3)
    driver.step()
    wait_until(lambda: not engine.loading(ref.digest), every_s=0.01)
    driver.submit(1, prompt, adapter=ref, max_tokens=3)
    driver.step()
    assert [driver.finish_reason(number) for number in (0, 1)] == ["error", "error"]
    driver.submit(2, prompt, adapter=ref, max_tokens=3)
    assert engine.adapters.failure(ref.digest) is None, "it is tried again"
    driver.run()
    assert driver.finish_reason(2) == "error"


def test_a_request_fails_alone_when_its_adapter_cannot_be_loaded(models_dir, folder, tmp_path):
    model = make_model(models_dir, "llama")
    good = make_adapter(model, folder, "plain", **VARIANTS["plain"])
    driver = Driver(core(model, max_model_len=128))
    (prompt,) = prompts(400, (9,))
    driver.submit(0, prompt, adapter=AdapterRef("0" * 64, good.directory), max_tokens=3)
    driver.submit(1, prompt, adapter=AdapterRef("1" * 64, str(tmp_path)), max_tokens=3)
    driver.submit(2, prompt, adapter=good, max_tokens=3, ignore_eos=True)
    driver.run()
    assert words(driver.outputs[0][-1].error) == "adapter: its files have changed since it was registered"
    assert words(driver.outputs[1][-1].error) == "adapter: adapter_config.json is missing"
    assert len(driver.tokens(2)) == 3


REFUSED = {
    "bias": ({"bias": "all"}, 'bias must be "none"'),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "type": ({"peft_type": "IA3"}, "peft_type must be LORA"),
    "init": ({"init_lora_weights": "pissa"}, "rewrites the base model's weights"),
    "another init": ({"init_lora_weights": "lora_ga"}, "rewrites the base model's weights"),
    "rank": ({"r": 3}, "the rank is 8"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha must be a positive number"),
    "an alpha that scales weights beyond float32": ({"lora_alpha": 1e300}, "a weight is not a finite number"),
    "pattern": ({"rank_pattern": {"(": 8}}, "is no pattern"),
    "dora": ({"use_dora": True}, "do not fit together"),
    "alora": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
}
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def plain(models_dir, folder, tmp_path):
    """A copy of a good adapter, to spoil, and the shapes that it is read for."""
    model = make_model(models_dir, "llama")
    source = Path(make_adapter(model, folder, "plain", **VARIANTS["plain"]).directory)
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path, core(model, max_model_len=64).adapters.shapes


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_refused(case, plain):
    directory, shapes = plain
    changes, reason = REFUSED[case]
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(match=reason):
        read_adapter(directory, shapes, 64)


def test_weights_that_are_refused(plain):
    directory, shapes = plain
    good = load_file(directory / WEIGHTS)
    a, b = good[f"{LAYER}.lora_A.weight"], good[f"{LAYER}.lora_B.weight"]
    cases = {
        "no linear layer model.nowhere": {"base_model.model.model.nowhere.lora_A.weight": a},
        "only LoRA on linear layers": {"base_model.model.model.embed_tokens.lora_embedding_A": a},
        "only LoRA": {"model.layers.0.self_attn.q_proj.lora_A.weight": a},
        "its shape is": {f"{LAYER}.lora_A.weight": a[:, :-1].contiguous()},
        "lora_A or lora_B is missing": {f"{LAYER}.lora_A.weight": None},
        "not a finite number": {f"{LAYER}.lora_B.weight": torch.full_like(b, torch.nan)},
    }
    for reason, changes in cases.items():
        tensors = {key: tensor.clone() for key, tensor in {**good, **changes}.items() if tensor is not None}
        save_file(tensors, directory / WEIGHTS)
        with pytest.raises(match=reason):
            read_adapter(directory, shapes, 64)
    save_file(good, directory / WEIGHTS)
    with pytest.raises(match="the rank must be between 1 and 4"):
        read_adapter(directory, shapes, 4)
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-50])
    with pytest.raises(match="cannot be read"):
        read_adapter(directory, shapes, 64)
