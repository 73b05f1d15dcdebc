"""Outputs that wait for a reader who lags: nothing is lost, nothing comes out of order, little is kept."""

from __future__ import annotations

import asyncio

import pytest

from engine.client import MAX_MERGED, EngineDead, _Collector
from engine.messages import RequestOutput, Submit, TokenLogprob
from engine.sampling.params import SamplingParams

TOKENS = 2000
ALTERNATIVES = 20


def output(token, **fields):
    top = [(token + i, -0.1 * i) for i in range(ALTERNATIVES)]
    return RequestOutput(1, [token], logprobs=[TokenLogprob(token, -0.5, 1, top)], **fields)


def all_of(collector):
    async def read():
        outputs = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs.append(await collector.get())
        return outputs

    return asyncio.run(read())


def lagging():
    collector = _Collector(Submit(1, [1], SamplingParams(max_tokens=TOKENS)))
    collector.put(output(0, cached_tokens=3, queue_s=0.5))
    for token in range(1, TOKENS - 1):
        collector.put(output(token))
    collector.put(output(TOKENS - 1, finish_reason="length"))
    return collector


def test_a_lagging_reader_gets_everything_in_order_and_in_pieces():
    outputs = all_of(lagging())
    assert [token for each in outputs for token in each.token_ids] == list(range(TOKENS))
    assert [entry.token_id for each in outputs for entry in each.logprobs] == list(range(TOKENS))
    assert max(len(each.token_ids) for each in outputs) <= MAX_MERGED
    assert outputs[0].cached_tokens == 3
    assert [each.finish_reason for each in outputs[:-1]] == [None] * (len(outputs) - 1)


def test_what_waits_is_small():
    """Decoded, every alternative would take 110 bytes and more."""
    assert lagging().packed_bytes < TOKENS * (100 + 13 * ALTERNATIVES)


def test_a_failure_comes_behind_what_came_before_it():
    collector = lagging()
    collector.fail("it died")

    async def read():
        tokens = []
        while len(tokens) < TOKENS:
            tokens += (await collector.get()).token_ids
        with pytest.raises(EngineDead, match="it died"):
            await collector.get()
        return tokens

    assert asyncio.run(read()) == list(range(TOKENS))


def test_a_reader_that_wants_steps_gets_each_by_itself():
    collector = _Collector(Submit(1, [1], SamplingParams(max_tokens=9)), steps=True)
    steps = [[0], [1, 2, 3], [4], [], [5, 6]]
    for tokens in steps[:-1]:
        collector.put(RequestOutput(1, tokens))
    collector.put(RequestOutput(1, steps[-1], finish_reason="length"))
    assert [output.token_ids for output in all_of(collector)] == steps
