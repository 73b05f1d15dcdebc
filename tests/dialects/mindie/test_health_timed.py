"""GET /health/timed and /health/timed-{N}: a real inference."""

from __future__ import annotations

import pytest


@pytest.mark.live
@pytest.mark.parametrize("suffix", ["", "-1", "-600", "-5"])
def test_it_works(mindie, suffix):
    answer = mindie.manage(f"/health/timed{suffix}")
    assert (answer.status_code, answer.content) == (200, b'{"status":"healthy"}')


@pytest.mark.live
def test_it_computes(mindie):
    before = mindie.server.metric("vllm:generation_tokens_total")
    mindie.manage("/health/timed-5")
    assert mindie.server.metric("vllm:generation_tokens_total") == before + 1


@pytest.mark.parametrize("suffix", ["-0", "-601", "-999"])
def test_out_of_range(mindie, suffix):
    answer = mindie.manage(f"/health/timed{suffix}")
    assert answer.status_code == 404
    assert answer.json()["error"] == "Wait time should be in range of [1, 600], input is not valid"


def test_too_many_digits(mindie):
    answer = mindie.manage("/health/timed-1000")
    assert answer.status_code == 404
    assert answer.json()["error"] == "Max wait time is 600, input is invalid or too long"


@pytest.mark.parametrize("suffix", ["x", "-", "--1", "-1x"])
def test_no_such_path(mindie, suffix):
    answer = mindie.manage(f"/health/timed{suffix}")
    assert (answer.status_code, answer.content) == (404, b"")
