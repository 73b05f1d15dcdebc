"""POST /v2/models/{m}/stopInfer."""

from __future__ import annotations

import threading

import pytest

from inference.generation.running import RunningRequests
from tests import calls
from tests.dialects.mindie.conftest import PROMPT

PATH = "/v2/models/demo/stopInfer"


@pytest.mark.live
def test_a_stopped_request_ends_with_what_it_has(mindie):
    """The dialect cannot ignore the end of a text, and what is sampled may come to it first: then another seed is tried."""
    for seed in range(50):
        answers = []
        body = {"id": "long", "text_input": "Once upon a time", "parameters": {
            "max_new_tokens": 2000, "details": True, "do_sample": True, "temperature": 5.0, "seed": seed}}  # fmt: skip
        thread = threading.Thread(target=ask, args=(mindie, body, answers))
        thread.start()
        stopped = False
        while not stopped and thread.is_alive():
            stopped = mindie.post(PATH, {"id": "long", "more": 1}).status_code == 200
        thread.join()
        if stopped:
            break
    assert stopped
    details = answers[0].json()["details"]
    assert details["finish_reason"] == "stop_sequence"
    assert details["generated_tokens"] < 2000
    mindie.server.wait_idle()


def ask(mindie, body, answers) -> None:
    answers.append(mindie.post("/v2/models/demo/generate", body))


@pytest.mark.live
def test_it_echoes_the_body(mindie):
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {"req-id": "77"}
    with calls.stream("POST", f"{mindie.server.mindie_url}/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        stopped = mindie.post(PATH, {"id": "77", "x": [1]})
        assert (stopped.status_code, stopped.content) == (200, b'{"id":"77","x":[1]}')
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"stop"' in rest[-2]


@pytest.mark.live
def test_an_id_is_free_once_its_last_frame_is_read(mindie):
    body = {"id": "again", "text_input": PROMPT, "parameters": {"max_new_tokens": 2, "details": True}}
    for _ in range(5):
        with calls.stream("POST", f"{mindie.server.mindie_url}/v2/models/demo/generate_stream", json=body) as answer:
            for line in answer.iter_lines():
                if '"finish_reason"' in line:
                    mindie.refused(PATH, {"id": "again"}, "RequestId is again not found.", 404)
                    break
            else:
                raise AssertionError(f"no last frame: {answer.status_code}")


def test_what_has_ended_is_not_found_while_its_answer_is_being_sent():
    class Sent:
        ended = False
        stops = 0

        def cancel(self) -> None:
            self.stops += 1

    running, first, second = RunningRequests(), Sent(), Sent()
    with running.entry("me", {"a", "b"}, first):
        assert running.knows("me", "b")
        assert not running.knows("you", "b")
        first.ended = True
        assert not running.knows("me", "a")
        assert not running.stop("me", "a")
        with running.entry("me", {"a"}, second):
            assert running.stop("me", "a")
        assert not running.knows("me", "a")
    assert (first.stops, second.stops) == (0, 1)


def test_refusals(mindie):
    mindie.refused(PATH, {"id": "none"}, "RequestId is none not found.", 404)
    mindie.refused(PATH, {}, "Not found id.")
    mindie.refused(PATH, b"{", "Failed to parse context to json body.")
    mindie.refused(PATH, {"id": "a b"}, "The format of id is invalid, it should match ^[a-zA-Z0-9_-]{1,256}$.")
    mindie.refused("/v2/models/x/stopInfer", {"id": "a"}, "Model x not found.", 404)
