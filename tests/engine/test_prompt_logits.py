"""Log-probabilities of prompts in pieces: a step's logits have a limit, and the pieces change no number."""

from __future__ import annotations

import pytest

from engine import model_runner, prompt_logits
from tests.engine.engines import Driver, core, prompts
from tests.live import DEMO

ROWS = 7


def answered() -> tuple[Driver, list[list[int]]]:
    """A driver with its requests done, and the rows of logits that each step computed for each request's prompt."""
    driver = Driver(core(DEMO))
    launch, steps = driver.engine.runner.launch, []

    def counted(scheduled):
        pairs = zip(scheduled.requests, scheduled.num_new_tokens, strict=True)
        steps.append([len(request.prompt_rows(request.num_computed_tokens + count)) for request, count in pairs])
        return launch(scheduled)

    driver.engine.runner.launch = counted
    for number, prompt in enumerate(prompts(driver.engine.info.vocab_size, (50, 60, 70, 1))):
        asked = {} if number == 2 else {"prompt_logprobs": 2}
        driver.submit(number, prompt, max_tokens=3, ignore_eos=True, logprobs=1, **asked)
    driver.run()
    driver.engine.close()
    return driver, steps


def numbers(driver: Driver) -> list[list]:
    """The tokens and log-probabilities of each request, however they were divided."""
    return [
        [each for output in driver.outputs[number] for each in getattr(output, name) or []]
        for number in range(4)
        for name in ("prompt_logprobs", "logprobs", "token_ids")
    ]


@pytest.fixture(scope="module")
def expected():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "LOGPROB_ROWS", 1 << 20)
        driver, steps = answered()
    assert steps[0] == [49, 59, 0, 0]
    return driver


def test_slices_of_rows_change_no_number(expected, monkeypatch):
    monkeypatch.setattr(model_runner, "LOGPROB_ROWS", 3)
    found, _ = answered()
    assert numbers(found) == numbers(expected)


def test_a_step_has_a_limit_of_logits_for_prompts(expected, monkeypatch):
    monkeypatch.setattr(prompt_logits, "MAX_BYTES", ROWS * 4 * expected.engine.info.vocab_size)
    found, steps = answered()
    assert steps[0] == [ROWS, 0]  # the third one does not wait for it
    assert max(sum(step) for step in steps) == ROWS
    assert sum(sum(step) for step in steps) == 49 + 59
    assert numbers(found) == numbers(expected)
