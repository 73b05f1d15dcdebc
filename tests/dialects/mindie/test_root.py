"""POST /."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, chunks, golden


@pytest.mark.live
def test_a_list_of_one(mindie):
    answer = mindie.post("/", {"inputs": PROMPT, "parameters": {"max_new_tokens": 7}})
    golden(answer.content, f'[{{"generated_text":"{LINE}"}}]')


@pytest.mark.live
def test_stream(mindie):
    body = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 2}}
    frames = chunks(mindie, "/", body)
    golden(
        frames[-1],
        'data: {"token":{"id":<ids>,"text":"<text> capital","logprob":null,"special":null},'
        '"generated_text":" The capital","details":null}\n\n',
    )


def test_refusals(mindie):
    mindie.refused("/", b"{", "Failed to parse context to json body")
    mindie.refused("/", {"inputs": "a", "stream": "yes"}, "Stream must be boolean type.")
    mindie.refused("/", {}, "Request should contain 'inputs' and the type should be string.")
