"""Beam search in its arithmetic and its parameters, over a fake worker: as vLLM's."""

from __future__ import annotations

import gc

import pytest

from engine.sampling.params import SamplingParams
from inference.generation import beam_search
from tests.unit.scripts import Script, model_info

COMPLETIONS = "/v1/completions"
ASK = {"model": "demo", "prompt": "a", "use_beam_search": True, "max_tokens": 3}
TOLD = [-0.1, -0.1, -1.5]
STEPS = [Script(tokens=[300, 1, 302], logprobs=TOLD)] * 3
"""The only beam's tokens; the second alternative of the second step is the end token."""


@pytest.mark.parametrize(("length_penalty", "finish"), [(1.0, "stop"), (3.0, "length")])
async def test_an_end_token_counts_as_length(serving, length_penalty, finish):
    """-0.7 of two tokens beside -1.7 of three."""
    serving.worker.scripts += STEPS
    answer = await serving.post(COMPLETIONS, {**ASK, "length_penalty": length_penalty})
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == finish


async def test_the_models_defaults_have_no_part(start):
    """Steps are greedy ones of one token each, whatever the model's generation_config.json says."""
    defaults = {"repetition_penalty": 1.5, "temperature": 0.7, "top_p": 0.5, "top_k": 3.0, "min_p": 0.1}
    serving = await start(info=model_info(sampling_defaults=defaults))
    serving.worker.scripts += STEPS
    assert (await serving.post(COMPLETIONS, {**ASK, "logit_bias": {"7": 1}})).status == 200
    plain = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, "logprobs_mode": "processed", "logit_bias": {7: 1}}
    assert [s.params for s in serving.worker.submits] == [SamplingParams(max_tokens=n, **plain) for n in (1, 2, 3)]


NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0, "stop": [], "min_tokens": 0}


@pytest.mark.parametrize(
    ("plane", "path", "body"),
    [
        ("front", COMPLETIONS, {**ASK, **NEUTRAL}),
        ("mindie", COMPLETIONS, {**ASK, **NEUTRAL, "stop": None, "n": 2}),
        ("front", "/v2/models/demo/generate", {"text_input": "a", "parameters": {"beam_width": 2, "repetition_penalty": 1.0}}),
    ],
)  # fmt: skip
async def test_neutral_parameters_are_ignored(serving, plane, path, body):
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == 200, answer.text


@pytest.mark.parametrize("fields", [{"repetition_penalty": 0.9}, {"prompt_logprobs": 0}, {"min_tokens": 1}])
async def test_other_ones_are_refused(serving, fields):
    answer = await serving.post(COMPLETIONS, {**ASK, **fields})
    assert answer.json()["error"]["message"] == f"{next(iter(fields))} cannot be used with use_beam_search."


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_not_echoed_with_log_probabilities(serving, stream):
    """Which a search does not compute: vLLM's refusal."""
    answer = await serving.post(COMPLETIONS, {**ASK, "echo": True, "logprobs": 0, "stream": stream})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "echo")


async def test_a_step_makes_few_beams_and_keeps_few(serving, monkeypatch):
    """Of 2 x width extensions a beam only the likeliest become beams, and of those that have ended only the best stay."""
    width, steps, made, kept = 3, 8, [], []

    class Counted(beam_search._Beam):
        def __init__(self, *fields) -> None:
            super().__init__(*fields)
            made.append(len(self.token_ids))
            if made.count(steps) == 1 and len(self.token_ids) == steps:  # the last step's first one
                kept.append(sum(type(each) is Counted for each in gc.get_objects()))

    monkeypatch.setattr(beam_search, "_Beam", Counted)
    serving.worker.scripts += [Script(tokens=[1] * steps, logprobs=[-0.1] * steps)] * (width * steps)
    answer = await serving.post(COMPLETIONS, {**ASK, "n": width, "max_tokens": steps})
    assert len(answer.json()["choices"]) == width
    ends = 2  # the model's end tokens
    assert max(made.count(length) for length in range(1, steps + 1)) <= width + width * ends
    assert kept[0] <= 3 * width + width * ends  # the beams, those that have ended, and a step's new ones


@pytest.mark.parametrize(
    ("allowed", "most_tokens", "width", "most"),
    [([300, 301], 1, 4, 2), ([300, 301], 2, 4, 4), ([300, 1], 3, 5, 4), ([1], 5, 2, 1), ([300], 5, 2, 1)],
)
async def test_fewer_sequences_than_beams_are_refused(serving, allowed, most_tokens, width, most):
    """Token 2 ends a sequence."""
    allowed = [2 if token == 1 else token for token in allowed]
    body = {**ASK, "max_tokens": most_tokens, "n": width, "allowed_token_ids": allowed}
    answer = await serving.post(COMPLETIONS, body)
    if width <= most:
        assert answer.status == 200, answer.text
        return
    assert (answer.status, answer.json()["error"]["param"]) == (400, "n")
    assert answer.json()["error"]["message"].startswith(f"n must be at most {most} with these allowed_token_ids")
    assert serving.worker.submits == []


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_are_shown_where_they_are_asked_for(serving, skip):
    serving.worker.scripts += [Script(tokens=[1, 300, 302], logprobs=[-0.1] * 3)] * 3
    answer = await serving.post(COMPLETIONS, {**ASK, "max_tokens": 1, "skip_special_tokens": skip})
    (choice,) = answer.json()["choices"]
    assert choice["text"] == ("" if skip else "<|im_start|>")


async def test_a_sequence_that_ends_with_its_first_token_is_an_answer(serving):
    serving.worker.scripts += [Script(tokens=[2], logprobs=[-0.5])]
    answer = await serving.post(COMPLETIONS, {**ASK, "max_tokens": 1})
    assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "")
