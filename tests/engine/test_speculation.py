"""Draft tokens change how many steps a text takes, and nothing else."""

from __future__ import annotations

import pytest
import torch

from engine.speculation.prompt_lookup import PAUSE_TOKENS, PromptLookup, allowance
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts
from tests.engine.few_blocks import few_blocks
from tests.models.random_models import make_model

PHRASE = prompts(1700, (12,), seed=5)[0]
REPEATING = [PHRASE * 4, [7, *PHRASE * 3]]

PARAMETERS = {
    "greedy": {},
    "few words": {"allowed_token_ids": PHRASE[1:3]},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 50},
    "biased": {"logit_bias": {PHRASE[0]: 5.0}},
    "logprobs": {"logprobs": 2, "temperature": 0.5, "seed": 1},
    "minimum": {"min_tokens": 30, "ignore_eos": False},
    "penalised": {"repetition_penalty": 1.3},
    "stop token": {"stop_token_ids": [PHRASE[3]], "ignore_eos": False},
}


def outcome(speculative_tokens: int, prompt: list[int], **params: object):
    driver = Driver(core(DEMO, speculative_tokens=speculative_tokens, max_model_len=256))
    driver.submit(0, prompt, **{"max_tokens": 60, "ignore_eos": True, **params})
    driver.run()
    outputs = driver.outputs[0]
    logprobs = [(e.token_id, e.logprob, e.rank, e.top) for o in outputs for e in o.logprobs or []]
    last = outputs[-1]
    return driver.tokens(0), last.finish_reason, last.stop_token_id, logprobs, driver.engine.stats


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("prompt", REPEATING, ids=["repeats", "shifted"])
def test_the_output_does_not_depend_on_drafts(name, prompt):
    *plain, _ = outcome(0, prompt, **PARAMETERS[name])
    *drafted, stats = outcome(8, prompt, **PARAMETERS[name])
    assert drafted == plain
    assert stats.generation_tokens == len(plain[0])
    if name == "few words":  # it soon says the same over and over
        assert stats.steps < len(plain[0]) / 2, "no draft token was right"


@pytest.mark.full
def test_the_last_token_is_never_passed():
    for max_tokens in (1, 2, 3, 7):
        tokens, reason, *_ = outcome(8, REPEATING[0], max_tokens=max_tokens)
        assert (len(tokens), reason) == (max_tokens, "length")


def test_small_batches_joined_left_and_preempted(models_dir):
    """Two at a time out of six, in few blocks, each as it is alone without drafts."""
    model = make_model(models_dir, "qwen2")
    asked = [prompt * 3 for prompt in prompts(400, (5, 9, 2, 12, 7, 3), seed=8)]
    texts = []
    for tokens in (0, 6):
        driver = Driver(core(model, speculative_tokens=tokens, max_num_seqs=2, max_model_len=128, block_size=4))
        with few_blocks(driver.engine.scheduler.pool, 30):
            for i, prompt in enumerate(asked):
                driver.submit(i, prompt, max_tokens=40, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
            while driver.engine.has_work:
                driver.step()
        driver.engine.check_integrity()
        texts.append([driver.tokens(i) for i in range(6)])
    assert texts[0] == texts[1]


def test_drafts_follow_the_latest_occurrence_and_their_luck():
    lookup = PromptLookup()
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 5, 1, 2], 8) == [4]
    lookup.learn(1, 1, 11)
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 5, 1, 2, 4], 8) == [5, 1]
    lookup.learn(2, 2, 14)
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 5, 1, 2, 4, 5, 1, 2], 3) == [4, 5, 1]
    lookup.learn(3, 0, 15)
    tokens = torch.tensor([1, 2] * 20).tolist()
    assert lookup.propose(tokens[: 14 + PAUSE_TOKENS], 8) == []
    assert lookup.propose(tokens[: 15 + PAUSE_TOKENS], 8) != []
    assert PromptLookup().propose([5], 4) == []
    assert [allowance(n, 4) for n in (1, 2, 4, 5, 64)] == [4, 3, 1, 0, -1]
