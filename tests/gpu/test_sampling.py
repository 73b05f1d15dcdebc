"""What the device's sampler chooses and reports, beside the CPU's."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.sampling import DeviceSampler
from engine.sampling.logprobs import Asked, token_logprobs
from engine.sampling.sampler import Sampler
from tests.engine.test_sampling import request

pytestmark = pytest.mark.smoke

VOCABULARY, EOS = 3000, [2, 7]
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    "relative": {"relative_frequency_penalty": 0.5, "temperature": 0.0},
    "bias": {"logit_bias": {5: 30.0, 6: -3.0}, "temperature": 0.0},
    "allowed": {"allowed_token_ids": [3, 9, 100, 2999], "top_p": 0.9},
    "banned": {"bad_words": [[11], [1, 12], [40, 13]], "min_tokens": 50, "stop_token_ids": [14, 99999]},
    "watermark": {"watermark": True, "repetition_penalty": 1.1},
    "typical": {"typical_p": 0.7},
    "top-p": {"top_p": 0.8, "presence_penalty": 1.0},
    "raw": {"logprobs": 3, "repetition_penalty": 1.2},
    "raw, all": {"logprobs": -1, "temperature": 0.0},
    "processed": {"logprobs": 4, "logprobs_mode": "processed", "top_k": 5},
    "processed, greedy": {"logprobs": 2, "logprobs_mode": "processed", "temperature": 0.0, "frequency_penalty": 0.4},
    "scored": {"logprobs": 0, "logprobs_mode": "processed"},
    "scored, greedy": {"logprobs": 0, "logprobs_mode": "processed", "temperature": 0.0},
    "processed, unfiltered": {"logprobs": 2, "logprobs_mode": "processed", "temperature": 0.5},
    "processed, top-p": {"logprobs": -1, "logprobs_mode": "processed", "top_p": 0.5, "repetition_penalty": 1.1},
    "processed, named": {"logprobs": 0, "logprobs_mode": "processed", "top_k": 3, "logprob_token_ids": [4, 8]},
    "named": {"logprobs": 0, "logprob_token_ids": [4, 8]},
}


def rows(ways: list[dict[str, object]]):
    return [
        (request([40, 41, 40] + [n] * n, prompt=[1, 2, 3, 3, 3 + n], seed=n, **{"temperature": 1.0, **way}), 0)
        for n, way in enumerate(ways)
    ]


def logits_of(count: int) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def in_order(top, other) -> list[int]:
    """The tokens of `top`; those that rounding makes equals or neighbours of equals, in the other's order."""
    values, places = dict(other), {token: place for place, (token, _) in enumerate(other)}
    assert all(value == pytest.approx(values[token], abs=1e-5) for token, value in top)
    return sorted((token for token, _ in top), key=places.__getitem__)


def assert_same(found, expected) -> None:
    tokens, logprobs = found
    assert tokens == expected[0]
    for one, other in zip(logprobs, expected[1], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
            assert in_order(one.top, other.top) == [token for token, _ in other.top]


@pytest.mark.parametrize("way", WAYS)
def test_eight_rows_of_one_kind(way, device):
    logits = logits_of(8)
    expected = Sampler(EOS).sample(rows([WAYS[way]] * 8), logits.clone())
    assert_same(DeviceSampler(EOS).sample(rows([WAYS[way]] * 8), logits.to(device)), expected)


def test_rows_of_every_kind_and_each_alone(device):
    ways, logits = [*WAYS.values()], logits_of(len(WAYS))
    together = DeviceSampler(EOS).sample(rows(ways), logits.to(device))
    assert_same(together, Sampler(EOS).sample(rows(ways), logits.clone()))
    for n, row in enumerate(rows(ways)):
        alone = DeviceSampler(EOS).sample([row], logits[n : n + 1].to(device))
        assert_same(alone, ([together[0][n]], [together[1][n]]))


def test_counts_follow_the_output(device):
    """Over steps, and with more different tokens than there was room for at first."""
    logits = logits_of(1)
    one, other = (request([], prompt=[1, 2, 3], temperature=0.0, frequency_penalty=2.0) for _ in range(2))
    for _ in range(600):
        (token,), _ = DeviceSampler(EOS).sample([(one, 0)], logits.clone().to(device))
        (same,), _ = Sampler(EOS).sample([(other, 0)], logits.clone())
        assert token == same
        one.token_ids.append(token)
        other.token_ids.append(token)
    assert len({*one.token_ids}) > 500
    counts = torch.bincount(torch.tensor(one.token_ids[3:]), minlength=VOCABULARY)
    assert token == int((logits[0] - 2.0 * (counts - (torch.arange(VOCABULARY) == token).int())).argmax())


def test_prompts_are_scored_on_the_device(device):
    logits = logits_of(5)
    tokens = [4, 8, 15, 16, 23]
    found = token_logprobs(logits.to(device), tokens, Asked(2))
    assert_same((tokens, found), (tokens, token_logprobs(logits, tokens, Asked(2))))
