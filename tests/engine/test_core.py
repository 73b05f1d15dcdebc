"""The engine's life: refusals, ends, aborts in every phase, failures of a step."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.failures import Failure, FailureCode, words
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts

PROMPT = prompts(1700, (40,))[0]


@pytest.fixture
def driver():
    return Driver(core(DEMO, max_num_batched_tokens=16, max_num_seqs=4))


def test_ends(driver):
    driver.submit(1, PROMPT, max_tokens=3, ignore_eos=True)
    driver.run()
    assert len(driver.tokens(1)) == 3
    assert driver.finish_reason(1) == "length"
    stop = driver.tokens(1)[1]
    driver.submit(2, PROMPT, max_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    driver.run()
    assert driver.finish_reason(2) == "stop"
    assert driver.outputs[2][-1].stop_token_id == stop


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {}, "empty"),
        ([5000], {}, "between 0 and"),
        ([-1], {}, "between 0 and"),
        ([1] * 2048, {}, "over the limit of 2048"),
        ([1], {"max_tokens": 2048}, "over the limit of 2048"),
    ],
)
def test_refusals(driver, prompt, params, text):
    refused = driver.submit(1, prompt, **params)
    assert refused.finish_reason == "error"
    assert text in words(refused.error)
    assert not driver.engine.has_work


def test_the_queue_has_an_end():
    driver = Driver(core(DEMO, max_waiting_requests=2))
    assert [driver.submit(i, PROMPT) for i in range(2)] == [None, None]
    assert driver.submit(2, PROMPT).error == Failure(FailureCode.OVERLOADED)
    assert driver.submit(0, PROMPT).error == Failure(FailureCode.REQUEST_ID_IN_USE)


def test_abort_while_waiting_in_prefill_and_in_decode(driver):
    for i in range(6):  # four places; the budget of 16 leaves most of them in prefill
        driver.submit(i, prompts(1700, (40,), seed=i)[0], max_tokens=50, ignore_eos=True)
    for _ in range(4):
        driver.step()
    statuses = {r.status.value for r in driver.engine.requests.values()}
    assert statuses == {"running", "waiting"}
    driver.engine.abort(1, list(range(6)))
    driver.step()
    assert not driver.engine.requests
    assert all(driver.finish_reason(i) == "abort" for i in range(6))
    driver.engine.check_integrity()


def test_abort_of_strangers_is_ignored(driver):
    driver.submit(1, PROMPT, max_tokens=2)
    driver.engine.abort(2, [1])
    driver.engine.abort(1, [77])
    driver.run()
    assert driver.finish_reason(1) in ("length", "stop")


def test_deadlines(driver):
    driver.engine.submit(1, Submit(1, PROMPT, SamplingParams(max_tokens=500, ignore_eos=True), timeout_s=60.0))
    driver.step()
    (request,) = driver.engine.requests.values()
    assert request.deadline is not None
    request.deadline = 0.0
    driver.run()
    assert driver.finish_reason(1) == "timeout"


def test_priorities_go_first():
    driver = Driver(core(DEMO, max_num_seqs=1))
    for i, priority in enumerate([0, 5, -5]):
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        driver.engine.submit(1, Submit(i, prompts(1700, (9,), seed=i)[0], params, priority=priority))
    driver.run()
    assert list(driver.outputs) == [2, 0, 1]


def test_a_failed_step_fails_its_requests_alone(driver, monkeypatch):
    driver.submit(1, PROMPT, max_tokens=5)
    launch = driver.engine.runner.launch
    monkeypatch.setattr(driver.engine.runner, "launch", lambda batch: 1 / 0)
    driver.step()
    assert driver.finish_reason(1) == "error"
    assert driver.engine.failed_steps == 1
    driver.engine.check_integrity()
    monkeypatch.setattr(driver.engine.runner, "launch", launch)
    driver.submit(2, PROMPT, max_tokens=2, ignore_eos=True)
    driver.run()
    assert driver.finish_reason(2) == "length"
    assert driver.engine.failed_steps == 0


def test_prompt_logprobs_cover_the_prompt_once(driver):
    driver.submit(1, PROMPT, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    driver.run()
    entries = [e for o in driver.outputs[1] for e in o.prompt_logprobs or []]
    assert [e.token_id for e in entries] == PROMPT[1:]
    assert all(len(e.top) == 1 and e.logprob <= 0 for e in entries)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 0}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 8}, {"threads": -1}, {"model": ""}],
)
def test_config_validates_itself(options):
    with pytest.raises(ValueError, match="must"):
        EngineConfig(**{"model": "x", **options})


def test_steps_are_counted_by_what_they_computed(driver):
    """A prompt of 40 tokens takes three steps of at most 16, beside which nothing generates."""
    driver.submit(1, PROMPT, max_tokens=3, ignore_eos=True)
    driver.run()
    counted = driver.engine.histograms
    assert (sum(counted.prompts), counted.prompts_sum, counted.mixed) == (3, 3, 0)
    assert (sum(counted.publish_prefill_s), sum(counted.publish_decode_s)) == (3, sum(counted.decode_s))
    assert counted.publish_prefill_sum_s > 0
    assert (sum(counted.drafted), counted.drafted_sum) == (3, 0)
    driver.submit(2, PROMPT[:5], max_tokens=9, ignore_eos=True)
    driver.step()
    driver.submit(3, PROMPT[5:15], max_tokens=3, ignore_eos=True)
    driver.run()
    assert (sum(counted.prompts), counted.prompts_sum, counted.mixed) == (5, 5, 1)
