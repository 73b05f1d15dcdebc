"""Greedy float32 text equals transformers' generate, whatever the schedule: staggered, chunked, preempted, cached."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cpu.fused import FusedDecoder
from tests.conftest import DEMO
from tests.engine.engines import Driver, Reference, core, prompts
from tests.engine.few_blocks import few_blocks
from tests.models.random_models import TINY, make_model

FAMILIES = [name for name in TINY if name != "bloom"]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_generate(family, models_dir):
    model = make_model(models_dir, family)
    driver = Driver(core(model, max_num_batched_tokens=17, max_num_seqs=4, max_model_len=128))
    asked = prompts(400, (30, 5, 41, 17, 3, 9))
    for i, prompt in enumerate(asked):  # staggered: a new one every other step, chunked by the small budget
        assert driver.submit(i, prompt, max_tokens=20, ignore_eos=True) is None
        driver.step()
        driver.step()
    driver.run()
    reference = Reference(model)
    for i, prompt in enumerate(asked):
        reference.assert_equal(prompt, driver.tokens(i))


FUSED = {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("family", sorted({*FUSED, "gemma2", "gpt2", "mixtral", "cohere"}))
def test_which_families_run_fused(family, models_dir):
    engine = core(make_model(models_dir, family), max_model_len=128)
    assert isinstance(engine.runner.forward, FusedDecoder) == (family in FUSED)


def test_a_window_that_no_probe_reaches_is_kept(models_dir):
    model = make_model(models_dir, "mistral", sliding_window=40)
    driver = Driver(core(model, max_model_len=128))
    (prompt,) = prompts(400, (90,))
    driver.submit(0, prompt, max_tokens=10, ignore_eos=True)
    driver.run()
    Reference(model).assert_equal(prompt, driver.tokens(0))


@pytest.fixture(scope="module")
def demo_reference():
    return Reference(DEMO)


DEMO_PROMPTS = prompts(1700, (70, 9, 33, 70, 120, 1), seed=3)


def test_demo_model_all_at_once(demo_reference):
    driver = Driver(core(DEMO))
    for i, prompt in enumerate(DEMO_PROMPTS):
        driver.submit(i, prompt, max_tokens=40, ignore_eos=True)
    driver.run()
    for i, prompt in enumerate(DEMO_PROMPTS):
        demo_reference.assert_equal(prompt, driver.tokens(i))


def test_preempted_requests_are_recomputed_exactly(demo_reference):
    # 24 blocks of 16 tokens for six requests that need 28 in the end.
    driver = Driver(core(DEMO, kv_cache_bytes=64 << 20, max_model_len=256, block_size=16, max_num_seqs=6))
    with few_blocks(driver.engine.scheduler.pool, 24):
        for i, prompt in enumerate(DEMO_PROMPTS):
            driver.submit(i, prompt, max_tokens=60, ignore_eos=True)
        while driver.engine.has_work:
            driver.step()
        assert driver.engine.scheduler.num_preemptions > 0
        for i, prompt in enumerate(DEMO_PROMPTS):
            demo_reference.assert_equal(prompt, driver.tokens(i))
    driver.engine.check_integrity()


def test_cached_prefixes_give_the_same_text(demo_reference):
    driver = Driver(core(DEMO, max_num_batched_tokens=64))
    shared = prompts(1700, (64,), seed=9)[0]
    asked = [shared + tail for tail in prompts(1700, (5, 1, 30), seed=10)]
    for i, prompt in enumerate(asked):
        driver.submit(i, prompt, max_tokens=20, ignore_eos=True)
    driver.run()
    assert [driver.outputs[i][0].cached_tokens for i in range(3)] == [0, 64, 64]
    for i, prompt in enumerate(asked):
        demo_reference.assert_equal(prompt, driver.tokens(i))


def test_siblings_of_one_prompt_share_its_prefill():
    driver = Driver(core(DEMO))
    prompt = prompts(1700, (100,), seed=4)[0]
    for i in range(4):
        driver.submit(i, prompt, temperature=1.0, seed=i, max_tokens=5, ignore_eos=True)
    driver.run()
    assert sorted(driver.outputs[i][0].cached_tokens for i in range(4)) == [0, 96, 96, 96]


def test_salted_prompts_share_nothing():
    from engine.messages import Submit
    from engine.sampling.params import SamplingParams

    driver = Driver(core(DEMO))
    prompt = prompts(1700, (64,))[0]
    for i, salt in enumerate(["", "a", "b", "a"]):
        driver.engine.submit(1, Submit(i, prompt, SamplingParams(max_tokens=2, temperature=0.0), cache_salt=salt))
        driver.run()
    assert [driver.outputs[i][0].cached_tokens for i in range(4)] == [0, 0, 0, 48]


def test_log_probabilities_equal_those_of_float64(models_dir):
    """Of prompt and output, for requests that are chunked and share steps; every token of the vocabulary."""
    model = make_model(models_dir, "qwen3")
    driver = Driver(core(model, max_num_batched_tokens=17, max_num_seqs=4, max_model_len=128))
    asked = prompts(400, (30, 5, 41, 9))
    for i, prompt in enumerate(asked):
        driver.submit(i, prompt, max_tokens=8, ignore_eos=True, logprobs=-1, prompt_logprobs=3)
    driver.run()
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    for i, prompt in enumerate(asked):
        tokens = driver.tokens(i)
        with torch.inference_mode():
            expected = exact(input_ids=torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        found = [e for o in driver.outputs[i] for e in o.prompt_logprobs or []]
        assert [e.token_id for e in found] == prompt[1:]
        for position, entry in enumerate(found):
            assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=2e-4)
            assert [t for t, _ in entry.top] == expected[position].topk(3).indices.tolist()
        chosen = [e for o in driver.outputs[i] for e in o.logprobs or []]
        for position, entry in enumerate(chosen, len(prompt) - 1):
            row = dict(entry.top)
            assert len(row) == 400
            assert entry.rank == 1
            ours = torch.tensor([row[t] for t in range(400)], dtype=torch.float64)
            assert float((ours - expected[position]).abs().max()) < 2e-4
