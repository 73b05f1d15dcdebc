"""`use_beam_search`, beside transformers' own beam search in float32."""

from __future__ import annotations

import threading
import time

import pytest

from tests import calls
from tests.conftest import DEMO
from tests.live import LiveServer, events, wait_until

pytestmark = [pytest.mark.full, pytest.mark.live]

PROMPTS = ["Once upon a time, a dog named Kate", "Question: What is", "My name is"]
"""No end token is likely after these: by `ignore_eos` it is a candidate like any other, and transformers bans it."""


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("beams") / "var", environment={"DRAGOMAN_DTYPE": "float32"}).start()
    yield server
    assert server.stop() == 0


def ask(prompt, **fields):
    return {
        "prompt": prompt,
        "use_beam_search": True,
        "n": 3,
        "max_tokens": 10,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_beams_of_transformers(exact, prompt):
    import torch  # what runs without an engine never imports it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(
        **inputs, num_beams=3, num_return_sequences=3, max_new_tokens=10, min_new_tokens=10, do_sample=False,
        length_penalty=1.0, pad_token_id=0,
    )[:, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
    choices = exact.post("/v1/completions", ask(prompt, return_token_ids=True)).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == expected


def test_streams_and_chats(exact):
    choices = exact.post("/v1/completions", ask(PROMPTS[0])).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 3
    frames = [e for e in events(exact.post("/v1/completions", ask(PROMPTS[0], stream=True))) if e != "[DONE]"]
    assert [f["choices"][0]["text"] for f in frames] == [choice["text"] for choice in choices]
    chat = {"messages": [{"role": "user", "content": "What is the capital of Spain?"}], "use_beam_search": True, "n": 2}
    answer = exact.post("/v1/chat/completions", {**chat, "max_tokens": 30}).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of Spain is Madrid."
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [{"stop": "x"}, {"repetition_penalty": 1.1}, {"min_tokens": 2}, {"bad_words": ["x"]}, {"n": 65},
     {"response_format": {"type": "json_object"}}, {"length_penalty": 11}],
)  # fmt: skip
def test_refused(exact, fields):
    answer = exact.post("/v1/completions", ask("a", **fields))
    assert answer.status_code == 400
    assert next(iter(fields)).split("_")[0] in answer.text or "grammar" in answer.text


def test_mindie(exact):

    body = {"model": "demo", "prompt": PROMPTS[0], "use_beam_search": True, "n": 2, "max_tokens": 5}
    whole = calls.post(f"{exact.mindie_url}/v1/completions", json=body, timeout=60).json()
    assert len(whole["choices"]) == 2
    stream = calls.post(f"{exact.mindie_url}/v1/completions", json={**body, "stream": True}, timeout=60)
    frame = events(stream)[0]
    assert [c["text"] for c in frame["choices"]] == [c["text"] for c in whole["choices"]]
    assert stream.text.endswith("}\n\ndata: [DONE]\n\n")
    refused = calls.post(f"{exact.mindie_url}/v1/completions", json={**body, "max_tokens": 129}, timeout=60)
    assert refused.json()["error"] == (
        "Please set the max_tokens to be not larger than 128 when the use_beam_search is on."
    )


def test_a_client_that_hangs_up_ends_the_search(exact):
    before = exact.metric("vllm:generation_tokens_total")
    with exact.raw("/v1/completions", ask("Once", n=4, max_tokens=1500)):
        wait_until(lambda: exact.metric("vllm:generation_tokens_total") > before + 8)
    exact.wait_idle()
    done = exact.metric("vllm:generation_tokens_total")
    exact.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "ignore_eos": True, "temperature": 0})
    wait_until(lambda: exact.metric("vllm:generation_tokens_total") > done)
    assert exact.metric("vllm:generation_tokens_total") == done + 1, "no step of the search came after"


def test_biases_hold_for_beams(exact):
    for fields in ({"allowed_token_ids": [300, 301]}, {"logit_bias": {"300": 100, "301": 100}}):
        choices = exact.post("/v1/completions", ask("a", n=2, return_token_ids=True, **fields)).json()["choices"]
        assert {token for choice in choices for token in choice["token_ids"]} <= {300, 301}


def test_the_deadline_is_the_whole_searchs(tmp_path):
    environment = {"DRAGOMAN_REQUEST_TIMEOUT_S": "1"}
    server = LiveServer(tmp_path / "var", environment=environment).start()
    begun = time.monotonic()
    answer = server.post("/v1/completions", ask("Once", n=16, max_tokens=1500))
    assert answer.status_code == 504
    assert time.monotonic() - begun < 60, "the steps of the search alone would take minutes"
    server.wait_idle()
    assert server.stop() == 0


def test_stopping_keeps_the_beams_so_far(exact):

    answers = []
    body = {"model": "demo", "prompt": "Once", "use_beam_search": True, "n": 4, "max_tokens": 128, "ignore_eos": True}

    def run():
        url = f"{exact.mindie_url}/v1/completions"
        answers.append(calls.post(url, json=body, headers={"req-id": "beams"}, timeout=60))

    thread = threading.Thread(target=run)
    thread.start()
    stop = f"{exact.mindie_url}/v2/models/demo/stopInfer"
    wait_until(lambda: calls.post(stop, json={"id": "beams"}).status_code == 200)
    thread.join(60)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["choices"]) <= 4
    exact.wait_idle()
