"""Sampling: reproducible by seed, equal to transformers' filters, and exact in its penalties and masks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.cpu.kernels import ops
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler, uniform
from engine.shapes import ShapeError
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts


def request(output: list[int] | None = None, prompt: list[int] | None = None, **params: object) -> Request:
    made = Request((0, 0), list(prompt or [1, 2, 3]), SamplingParams(**{"max_tokens": 99, **params}), 0.0)
    made.token_ids += output or []
    return made


def draws(logits: torch.Tensor, n: int, **params: object) -> list[int]:
    rows = [request(seed=s, **params) for s in range(n)]
    return Sampler([]).sample([(row, 0) for row in rows], logits.expand(n, -1))[0]


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_full_batch():
    asked = prompts(1700, tuple(range(4, 36)), seed=1)
    knobs = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.8}, {"repetition_penalty": 1.3}]
    together = Driver(core(DEMO))
    for i, prompt in enumerate(asked):
        together.submit(i, prompt, temperature=0.9, seed=i, max_tokens=12, ignore_eos=True, **knobs[i % len(knobs)])
    together.run()
    alone = Driver(core(DEMO))
    for i in range(0, 32, 5):
        alone.submit(i, asked[i], temperature=0.9, seed=i, max_tokens=12, ignore_eos=True, **knobs[i % len(knobs)])
        alone.run()
        assert alone.tokens(i) == together.tokens(i)


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert all(0 < u < 1 for u in numbers)
    assert abs(sum(numbers) / 10_000 - 0.5) < 0.01


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"typical_p": 0.6}, [TypicalLogitsWarper(0.6)]),
        ({"top_k": 30, "top_p": 0.7, "temperature": 1.5},
         [TemperatureLogitsWarper(1.5), TopKLogitsWarper(30), TopPLogitsWarper(0.7)]),
        ({"top_p": 0.9, "min_p": 0.1}, [TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)]),
        ({"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
         [TemperatureLogitsWarper(1.2), TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02),
          TypicalLogitsWarper(0.95)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vocab", [50, 3000])
def test_filters_equal_those_of_transformers(params, warpers, vocab):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * (0.3 if vocab == 3000 else 2)
    scores = logits.clone()
    for warper in warpers:
        scores = warper(None, scores)
    expected = scores.softmax(-1)[0]
    drawn = torch.bincount(torch.tensor(draws(logits, 4000, **params)), minlength=vocab) / 4000
    assert not bool((drawn > 0)[expected == 0].any())
    # total variation of 4,000 draws from k equally likely tokens is about sqrt(k / 4000) / 2.5
    support = int((expected > 0).sum())
    assert float((drawn - expected).abs().sum()) / 2 < 0.02 + 0.6 * math.sqrt(support / 4000)


def test_repetition_penalty_equals_that_of_transformers():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 3, 9]]), logits.clone())
    asked = request(output=[9], repetition_penalty=1.7, temperature=0.0, logprobs=-1, logprobs_mode="processed")
    _, logprobs = Sampler([]).sample([(asked, 0)], logits)
    got = dict(logprobs[0].top)
    reference = expected.log_softmax(-1)[0]
    assert all(abs(got[i] - float(reference[i])) < 1e-5 for i in range(50))


def test_presence_and_frequency_count_the_output_alone():
    logits = torch.zeros(1, 10)
    base = {"temperature": 0.0, "logprobs": -1, "logprobs_mode": "processed"}
    asked = request(output=[5, 5, 6], prompt=[7, 7], presence_penalty=1.0, frequency_penalty=0.5, **base)
    _, logprobs = Sampler([]).sample([(asked, 0)], logits)
    got = dict(logprobs[0].top)
    assert got[5] - got[0] == pytest.approx(-2.0, abs=1e-5)
    assert got[6] - got[0] == pytest.approx(-1.5, abs=1e-5)
    assert got[7] - got[0] == pytest.approx(0.0, abs=1e-5)


def test_masks():
    logits = torch.arange(10.0)[None]
    choose = lambda **p: Sampler([9]).sample([(request(temperature=0.0, **p), 0)], logits.clone())[0][0]  # noqa: E731
    assert choose() == 9
    assert choose(min_tokens=2) == 8
    assert choose(min_tokens=2, stop_token_ids=[8]) == 7
    assert choose(logit_bias={4: 100.0}) == 4
    assert choose(allowed_token_ids=[2, 5]) == 5
    assert choose(bad_words=[[9]]) == 8
    assert choose(bad_words=[[3, 9]]) == 9, "3 is the prompt's last token"
    assert choose(bad_words=[[3, 9]], output=[3]) == 8
    assert choose(bad_words=[[4, 9]], output=[3]) == 9


def test_raw_logprobs_ignore_the_knobs():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    asked = request(temperature=0.5, top_k=3, logit_bias={0: 5.0}, logprobs=3, seed=1)
    (token,), logprobs = Sampler([]).sample([(asked, 0)], logits)
    reference = logits.log_softmax(-1)[0]
    assert logprobs[0].logprob == pytest.approx(float(reference[token]), abs=1e-6)
    assert [i for i, _ in logprobs[0].top] == reference.topk(3).indices.tolist()
    assert logprobs[0].rank == int((reference > reference[token]).sum()) + 1


def test_raw_logprobs_are_over_what_a_grammar_allows():
    """As in vLLM, which masks logits before it computes them."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    forbidden = torch.arange(40) != 7
    forbidden[9] = False
    asked = request(temperature=0.0, logprobs=3, logit_bias={7: 1.0})
    asked.matcher = SimpleNamespace(forbidden=lambda: forbidden)
    (token,), (found,) = Sampler([]).sample([(asked, 0)], logits.clone())
    reference = logits[0].masked_fill(forbidden, -torch.inf).log_softmax(-1)
    assert token in (7, 9)
    assert found.logprob == pytest.approx(float(reference[token]), abs=1e-6)
    assert [value for _, value in found.top[:2]] == pytest.approx(reference.topk(2).values.tolist(), abs=1e-6)


def test_a_token_that_was_drawn_has_a_probability_among_equals_too():
    """Logits that are rounded to bfloat16 have equals at the edge of top-k, of which any may be drawn."""
    logits = torch.zeros(1, 20_000)
    logits[0, torch.randperm(20_000, generator=torch.Generator().manual_seed(4))[:100]] = 9.0
    for seed in range(40):
        asked = request(top_k=50, logprobs=1, logprobs_mode="processed", seed=seed)
        _, (found,) = Sampler([]).sample([(asked, 0)], logits.clone())
        assert math.isfinite(found.logprob)


def test_processed_alternatives_are_those_that_the_filters_keep():
    logits = torch.arange(10.0)[None]
    asked = request(top_k=2, logprobs=5, logprobs_mode="processed", seed=1)
    _, (found,) = Sampler([]).sample([(asked, 0)], logits)
    assert [token for token, _ in found.top] == [9, 8]


def test_a_row_of_too_many_equals_changes_no_other():
    generator = torch.Generator().manual_seed(5)
    mine, equals = torch.randn(1, 5000, generator=generator) * 3, torch.zeros(1, 5000)
    alone = ops.select(mine, [0.9], 256)
    beside = ops.select(torch.cat([mine, equals]), [0.9, 0.9], 256)
    assert (alone.overflown, beside.overflown) == ([], [1])
    for name in ("values", "ids", "log_totals"):
        assert torch.equal(getattr(beside, name)[:1], getattr(alone, name))
    rows = [request(seed=8, temperature=0.9, top_p=0.9), request(seed=9, temperature=0.9, top_p=0.5)]
    together = Sampler([]).sample([(row, 0) for row in rows], torch.cat([mine, equals]))[0]
    apart = [Sampler([]).sample([(row, 0)], x)[0][0] for row, x in zip(rows, (mine, equals), strict=True)]
    assert together == apart


@pytest.mark.parametrize("columns", [1024, 5000])
def test_rounding_never_draws_a_token_of_next_to_no_weight(columns):
    """A sum of float32 is sometimes more than that of its terms in float64, and a number may lie between the two."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(200, columns, generator=generator)
    logits[:, -8:] = -60.0
    drawn = ops.choose(logits, [1.0] * len(logits), [1 - 2**-53] * len(logits))
    assert all(float(row[token]) > -60 for row, token in zip(logits, drawn, strict=True))


def test_scores_are_those_of_the_softmax():
    """Of any rows of a larger tensor, in every type, with equals and with tokens that are forbidden."""
    logits = torch.randn(7, 3001, generator=torch.Generator().manual_seed(3)) * 4
    logits[2].round_()
    logits[4, 5:40] = -torch.inf
    numbers, heat, tokens = [6, 2, 4, 4], [1.0, 0.7, 1.0, 3.0], [0, 3000, 40, 4]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = logits.to(dtype)
        values, ranks = ops.scores(given, numbers, heat, tokens)
        scaled = given[numbers].double() / torch.tensor(heat, dtype=torch.float64)[:, None]
        own = torch.tensor(tokens)[:, None]
        assert values == pytest.approx(scaled.log_softmax(-1).gather(1, own)[:, 0].tolist(), abs=2e-6)
        assert ranks == ((scaled > scaled.gather(1, own)).sum(1) + 1).tolist()
    with pytest.raises(ShapeError):
        ops.scores(logits, [7], [1.0], [0])
    with pytest.raises(ShapeError):
        ops.scores(logits, [0], [1.0], [3001])


def test_of_equals_the_lowest_ids_are_listed():
    logits = torch.zeros(1, 300)
    logits[0, [250, 7, 40]] = 5.0
    asked = request(temperature=0.0, logprobs=2)
    (token,), (logprob,) = Sampler([]).sample([(asked, 0)], logits)
    assert token == 7
    assert logprob is not None
    assert [token_id for token_id, _ in logprob.top] == [7, 40]


def test_an_alternative_that_is_hardly_possible_has_its_log_probability():
    logits = torch.zeros(1, 300)
    logits[0, 3] = 80.0
    (_,), (logprob,) = Sampler([]).sample([(request(temperature=0.0, logprobs=2), 0)], logits)
    assert logprob is not None
    assert [value for _, value in logprob.top] == pytest.approx([0.0, -80.0])


@pytest.mark.parametrize("worth", [-math.inf, math.nan])
@pytest.mark.parametrize(
    "way",
    [
        {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.9}, {"logprobs": 5, "temperature": 0.0},
        {"top_k": 5, "logprobs": 2, "logprobs_mode": "processed"}, {"top_k": 3000}, {"top_p": 0.9, "logprobs": 0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_allow_nothing_write_nowhere_else(dtype, way, worth):
    """Some token comes out, and the rows beside it have theirs."""
    logits = torch.randn(3, 60_000, generator=torch.Generator().manual_seed(1))
    rows = [
        (request(seed=n, temperature=1.0) if n != 1 else request(**{"temperature": 1.0, **way}), 0) for n in range(3)
    ]
    expected = [Sampler([]).sample(rows[n : n + 1], logits[n : n + 1].to(dtype))[0][0] for n in (0, 2)]
    logits[1] = worth
    tokens, _ = Sampler([]).sample(rows, logits.to(dtype))
    assert [tokens[0], tokens[2]] == expected
    assert 0 <= tokens[1] < 60_000


def test_what_forbids_every_token_is_answered_with_some():
    """Allowed tokens that are all banned, as a client can ask for."""
    for way in (
        {"top_p": 0.9},
        {"typical_p": 0.9},
        {"logprobs": 5},
        {"top_k": 2, "logprobs": 2, "logprobs_mode": "processed"},
    ):
        asked = request(temperature=1.0, allowed_token_ids=[2], min_tokens=5, **way)
        (token,), _ = Sampler([2]).sample([(asked, 0)], torch.zeros(1, 100_000))
        assert 0 <= token < 100_000


def test_rows_that_need_more_candidates_keep_their_own_logits():
    """The first row comes back for 4,096 candidates when the second one begins with them."""
    logits = torch.zeros(2, 20_000)
    logits[0] += torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 0.01
    logits[1, 1000:1300] = 30.0
    rows = [(request(temperature=1.0, top_p=0.95, seed=1), 0), (request(temperature=1.0, top_k=300, seed=2), 0)]
    alone = [Sampler([]).sample([row], logits[n : n + 1].clone())[0][0] for n, row in enumerate(rows)]
    assert Sampler([]).sample(rows, logits.clone())[0] == alone
    assert 1000 <= alone[1] < 1300


def test_alternatives_that_are_kept_are_listed_however_unlikely():
    logits = torch.zeros(1, 5000)
    logits[0, :5] = torch.tensor([20.0, 13.0, 12.0, 11.0, 10.0])
    asked = request(temperature=0.2, top_k=50, logprobs=5, logprobs_mode="processed")
    (_,), (logprob,) = Sampler([]).sample([(asked, 0)], logits)
    assert logprob is not None
    assert [value for _, value in logprob.top] == pytest.approx([0.0, -35.0, -40.0, -45.0, -50.0], abs=1e-4)


def test_of_hundreds_of_equals_the_chosen_one_is_listed_first():
    logits = torch.zeros(1, 5000)
    logits[0, 351:651] = 4.0
    (token,), (logprob,) = Sampler([]).sample([(request(temperature=0.0, logprobs=2), 0)], logits)
    assert logprob is not None
    assert (token, [token_id for token_id, _ in logprob.top]) == (351, [351, 352])
    assert logprob.logprob == logprob.top[0][1]
