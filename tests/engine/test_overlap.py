"""Steps that are launched before the tokens of the step before are read: the same tokens, ends and failures."""

from __future__ import annotations

import random
import re

import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu.backend import CpuBackend
from engine.gpu.sampling import DeviceSampler, DeviceTokens
from engine.sampling.params import Grammar
from tests.engine.engines import Driver, Reference, core, prompts
from tests.engine.few_blocks import few_blocks
from tests.models.random_models import make_model

VOCABULARY = 400
OPTIONS = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 96, "block_size": 4}


class LaterBackend(CpuBackend):
    """A CPU whose tokens are read late, as a device's are."""

    def sampler(self, eos_token_ids: list[int]) -> DeviceSampler:
        return DeviceSampler(eos_token_ids)


class PaddingBackend(LaterBackend):
    """It computes a row of logits where none is wanted, as a device does, whose graphs have no step without one."""

    def run(self, forward, cache, batch) -> torch.Tensor:
        logits = super().run(forward, cache, batch)
        return logits if len(batch.logits_rows) else torch.zeros(1, logits.shape[1])


class WaitingSampler(DeviceSampler):
    def choose_later(self, rows, logits) -> None:
        return None


def overlapping(model, backend: type[CpuBackend] = PaddingBackend, **options: object) -> EngineCore:
    config = EngineConfig(model=str(model), dtype="float32", **options)
    return EngineCore(config, backend(config))


def waiting(model, **options: object) -> EngineCore:
    engine = core(model, **options)
    engine.runner.sampler = WaitingSampler(engine.runner.sampler.eos_token_ids)
    return engine


@pytest.fixture(scope="module")
def model(models_dir):
    return make_model(models_dir, "llama")


def asked(rng: random.Random, number: int) -> dict[str, object]:
    """Mostly what a device can choose alone; now and then what the host has to see."""
    params: dict[str, object] = {
        "max_tokens": rng.randrange(1, 30), "temperature": rng.choice([0.0, 1.0, 3.0]), "seed": number,
        "stop_token_ids": [rng.randrange(3, VOCABULARY) for _ in range(20)],
    }  # fmt: skip
    special = [{"repetition_penalty": 1.3}, {"top_p": 0.8}, {"logprobs": 1}, {"min_tokens": 3}, {"prompt_logprobs": 0}]
    usual = [{}, {}, {"top_k": 20, "top_p": 0.8}]
    return params | (rng.choice(special) if rng.random() < 0.1 else rng.choice(usual))


def requests(count: int) -> list[tuple[list[int], dict[str, object]]]:
    rng = random.Random(7)
    prefix = [rng.randrange(3, VOCABULARY) for _ in range(16)]
    own = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 40))] for _ in range(count)]
    return [(prefix * rng.randrange(2) + own[i], asked(rng, i)) for i in range(count)]


def run(engine: EngineCore, count: int, blocks: int = 0) -> tuple[Driver, float]:
    """The same requests whatever the engine; the share of steps that were launched ahead of the last one's tokens."""
    driver, joins, ahead, steps, left = Driver(engine), random.Random(1), 0, 0, requests(count)
    pool = engine.scheduler.pool
    with few_blocks(pool, blocks or pool.num_free):
        while left or engine.has_work:
            while left and len(engine.requests) < 12 and joins.random() < 0.8:
                prompt, params = left.pop(0)
                assert driver.submit(count - 1 - len(left), prompt, **params) is None
            driver.step()
            steps += 1
            ahead += engine._running is not None
    engine.check_integrity()
    return driver, ahead / steps


def test_the_same_tokens_and_ends(model):
    """With preemptions, prefix hits, chunks, stop tokens, and rows that are read at once among the others."""
    expected, none = run(waiting(model, speculative_tokens=0, **OPTIONS), 150)
    found, ahead = run(overlapping(model, speculative_tokens=0, **OPTIONS), 150, blocks=40)
    assert none == 0
    assert ahead > 0.4
    assert found.engine.scheduler.num_preemptions > 0
    assert found.engine.scheduler.prefix_hits > 0
    reasons = [found.finish_reason(i) for i in range(150)]
    assert min(reasons.count("stop"), reasons.count("length")) > 20
    for i in range(150):
        assert found.tokens(i) == expected.tokens(i)
        assert found.finish_reason(i) == expected.finish_reason(i)
        assert found.outputs[i][-1].stop_token_id == expected.outputs[i][-1].stop_token_id


def test_greedy_equals_generate(model):
    driver = Driver(overlapping(model, speculative_tokens=0, **OPTIONS))
    prompted = prompts(VOCABULARY, (30, 5, 41, 9, 17))
    for i, prompt in enumerate(prompted):
        assert driver.submit(i, prompt, max_tokens=20, ignore_eos=True) is None
        driver.step()
    driver.run()
    reference = Reference(model)
    for i, prompt in enumerate(prompted):
        reference.assert_equal(prompt, driver.tokens(i))


def test_a_grammar_is_followed_beside_rows_that_are_launched_ahead(models_dir):
    model = make_model(models_dir, "llama", vocab_size=1736)
    driver = Driver(overlapping(model, speculative_tokens=0, **OPTIONS))
    driver.submit(0, [5, 6, 7], max_tokens=40, ignore_eos=True)
    driver.step()
    driver.submit(1, [8, 9], max_tokens=20, grammar=Grammar("regex", "[ab]{4}"))
    driver.run()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert re.fullmatch("[ab]{4}", tokenizer.decode(driver.tokens(1)))
    Reference(model).assert_equal([5, 6, 7], driver.tokens(0))


def test_siblings_wait_for_the_prefix_that_the_running_step_computes(model):
    """Its blocks are found once that step has been read, and are computed only once."""
    driver = Driver(overlapping(model, speculative_tokens=0, **{**OPTIONS, "max_num_batched_tokens": 64}))
    (prompt,) = prompts(VOCABULARY, (61,))
    for i in range(4):
        driver.submit(i, prompt, max_tokens=8, ignore_eos=True)
    driver.run()
    assert [driver.outputs[i][0].cached_tokens for i in range(4)] == [0, 60, 60, 60]


@pytest.mark.parametrize("backend", [LaterBackend, PaddingBackend])
def test_a_chunk_of_a_prompt_is_read_when_the_next_step_is_launched(model, backend):
    """Else its time would be that of its launch, and the next step would seem to take both."""
    driver = Driver(overlapping(model, backend, speculative_tokens=0, **OPTIONS))
    (prompt,) = prompts(VOCABULARY, (60,))
    driver.submit(0, prompt, max_tokens=4, ignore_eos=True)
    learned = driver.engine.stats.steps
    for chunk in range(3):
        driver.step()
        assert driver.engine._running is not None
        assert driver.engine.stats.steps == learned + chunk
    driver.run()
    assert driver.engine.failed_steps == 0
    Reference(model).assert_equal(prompt, driver.tokens(0))


def test_a_launch_that_fails_keeps_what_the_step_before_has_chosen(model, monkeypatch):
    driver = Driver(overlapping(model, speculative_tokens=0, **OPTIONS))
    driver.submit(0, [5, 6, 7], max_tokens=40, ignore_eos=True)
    driver.step()
    driver.step()
    with monkeypatch.context() as patched:
        patched.setattr(driver.engine.runner, "launch", lambda batch: 1 / 0)
        driver.step()
    assert len(driver.tokens(0)) == 2
    assert driver.finish_reason(0) == "error"
    assert driver.engine.failed_steps == 1
    assert not driver.engine.has_work
    driver.engine.check_integrity()


def test_a_request_that_leaves_gets_no_token_of_the_step_that_runs(model):
    driver = Driver(overlapping(model, speculative_tokens=0, **OPTIONS))
    driver.submit(0, [5, 6, 7], max_tokens=40, ignore_eos=True)
    for _ in range(4):
        driver.step()
    assert driver.engine._running is not None
    driver.engine.abort(1, [0])
    driver.run()
    assert [output.finish_reason for output in driver.outputs[0]] == [None, None, None, "abort"]


def test_a_failure_that_the_device_reports_late_fails_those_requests_alone(model, monkeypatch):
    driver = Driver(overlapping(model, speculative_tokens=0, **OPTIONS))
    driver.submit(0, [5, 6, 7], max_tokens=40, ignore_eos=True)
    driver.step()
    with monkeypatch.context() as patched:
        patched.setattr(DeviceTokens, "read", lambda self: 1 / 0)
        driver.step()
    assert driver.finish_reason(0) == "error"
    driver.run()
    driver.submit(1, [5, 6, 7], max_tokens=3, ignore_eos=True)
    driver.run()
    assert driver.finish_reason(1) == "length"
    assert driver.engine.failed_steps == 0


def test_handed_over_in_mid_step_and_continued(model):
    """A token that was launched and not read is lost with the step; the next worker computes it again."""
    asked = {
        i: (prompt, {"max_tokens": 30, "ignore_eos": True, "temperature": float(i % 2), "seed": i})
        for i, (prompt, _) in enumerate(requests(6))
    }
    whole, first, second = (Driver(overlapping(model, **OPTIONS)) for _ in range(3))
    for i, (prompt, params) in asked.items():
        whole.submit(i, prompt, **params)
        first.submit(i, prompt, **params)
    whole.run()
    while first.engine._running is None or len(first.tokens(0)) < 5:
        first.step()
    first.engine.hand_over()
    first.run()
    moved = [i for i in asked if first.finish_reason(i) == "moved"]
    assert 0 in moved
    for i in moved:
        prompt, params = asked[i]
        assert second.submit(i, prompt, generated=first.tokens(i), **params) is None
    second.run()
    for i in asked:
        assert first.tokens(i) + second.tokens(i) == whole.tokens(i), i
