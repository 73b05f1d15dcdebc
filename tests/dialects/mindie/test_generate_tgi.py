"""POST /generate with `inputs`, and the TGI rows' parameters."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, golden

NEITHER = (
    '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, the request body '
    'must be valid json", "error_type": "validation"}'
)


def ask(**parameters):
    return {"inputs": PROMPT, "parameters": parameters}


@pytest.mark.live
def test_golden(mindie):
    golden(mindie.post("/generate", ask(max_new_tokens=7)).content, f'{{"generated_text":"{LINE}"}}')


@pytest.mark.live
def test_golden_details(mindie):
    body = ask(max_new_tokens=2, details=True, decoder_input_details=True, seed=12, truncate=1)
    token = '{"id":<n>,"logprob":null,"special":null,"text":null}'
    golden(
        mindie.post("/generate", body).content,
        '{"details":{"prompt_tokens":1,"finish_reason":"length","generated_tokens":2,"prefill":['
        + token
        + '],"seed":12,"tokens":['
        + token
        + ","
        + token
        + ']},"generated_text":"<text>"}'.replace("<text>", mindie.post("/generate", body).json()["generated_text"]),
    )


@pytest.mark.live
def test_it_never_streams_and_defaults_to_20_tokens(mindie):
    answer = mindie.post("/generate", {**ask(details=True), "stream": True}).json()
    assert answer["details"]["generated_tokens"] <= 20


@pytest.mark.live
def test_full_text_has_a_space_between(mindie):
    text = mindie.post("/generate", ask(max_new_tokens=1, return_full_text=True)).json()["generated_text"]
    assert text == f"{PROMPT}  The"


@pytest.mark.live
def test_stop_is_cut(mindie):
    answer = mindie.post("/generate", ask(max_new_tokens=20, stop=" Spain", details=True)).json()
    assert answer["generated_text"] == " The capital of"
    assert answer["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.live
def test_eos_is_counted(mindie):
    template = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    answer = mindie.post(
        "/generate", {"inputs": template, "parameters": {"details": True, "max_new_tokens": 60}}
    ).json()
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["generated_tokens"] == len(answer["details"]["tokens"])


@pytest.mark.live
def test_unknown_adapters_run_on_the_base_model(mindie):
    base = mindie.post("/generate", ask(max_new_tokens=7)).json()
    assert mindie.post("/generate", ask(max_new_tokens=7, adapter_id="none")).json() == base
    assert mindie.post("/generate", ask(max_new_tokens=7, adapter_id="demo")).json() == base


@pytest.mark.live
def test_parts_are_joined(mindie):
    parts = [{"type": "text", "text": PROMPT[:10]}, {"type": "text", "text": PROMPT[10:]}]
    body = {"inputs": parts, "parameters": {"max_new_tokens": 7}}
    assert mindie.post("/generate", body).json() == {"generated_text": LINE}


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"temperature": 0}, "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
        ({"temperature": -1}, "Parameter temperature must be in (0.0,3.40282e+38], got -1."),
        ({"temperature": "x"}, "temperature must be float type."),
        ({"temperature": True}, "temperature must be float type."),
        ({"top_k": 0}, "Parameter top_k must be in -1 || (0,2147483647], got 0"),
        ({"top_k": -1}, "Parameter top_k must be in -1 || (0,2147483647], got -1"),
        ({"top_k": 2**31}, "Parameter top_k must be in -1 || (0,2147483647], got 2147483648"),
        ({"top_k": 1.5}, "top_k must be integer type."),
        ({"top_p": 1.0}, "Parameter top_p must be in (0.0,1.0], got 1.0."),
        ({"top_p": 0}, "Parameter top_p must be in (0.0,1.0], got 0."),
        ({"typical_p": 1.1}, "Parameter typical_p must be in (0.0,1.0], got 1.1."),
        ({"do_sample": 1}, "do_sample must be boolean type."),
        ({"seed": -1}, "seed must be unsigned type."),
        ({"seed": 2**63}, "Parameter seed must be in [0, 9223372036854775807], got 9223372036854775808."),
        ({"repetition_penalty": 0}, "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got 0."),
        ({"watermark": "x"}, "watermark must be boolean type."),
        ({"adapter_id": "a b"}, "The format of adapter_id is invalid."),
        ({"max_new_tokens": 0}, "Parameter max_new_tokens must be in (0,2147483647], got 0."),
        ({"details": "x"}, "details must be boolean type."),
        ({"truncate": 0}, "truncate must be in (0,2147483647], got 0."),
        (
            {"stop": ["x"] * 1025},
            "Input validation error: `stop` must be list[string] if list, and item length in [1, 1024] with total "
            "<= 32768",
        ),
        ({"stop": 5}, "Input validation error: param stop must be string or list[string]"),
        ({"temperature": 0, "stop": 5}, "Input validation error: param stop must be string or list[string]"),
    ],
)
def test_refused_parameters(mindie, parameters, error):
    mindie.refused("/generate", ask(**parameters), error)


@pytest.mark.live
@pytest.mark.parametrize("parameters", [{"top_p": 0.99}, {"typical_p": 1}, {"top_k": 2**31 - 1}, {"seed": 2**63 - 1},
                                        {"temperature": None}, {"unknown": 1}, {"best_of": 3}])  # fmt: skip
def test_accepted_parameters(mindie, parameters):
    assert mindie.post("/generate", ask(max_new_tokens=1, **parameters)).status_code == 200


def test_refused_bodies(mindie):
    for body in (b"{", b"[]", {}, {"inputs": None}, b'{"inputs": "a"', b"[" * 2000 + b"]" * 2000):
        mindie.refused("/generate", body, NEITHER)
    mindie.refused("/generate", {"inputs": 5}, "The type of inputs is abnormal")
    mindie.refused("/generate", {"inputs": []}, "Inputs arr is empty")
    mindie.refused("/generate", {"inputs": "a", "parameters": []}, "parameters must be object type.")
    mindie.refused("/generate", {"inputs": ""}, "Inputs length must be in (0, 41943040], but got 0")
    image = {"inputs": [{"type": "image_url", "image_url": "x"}]}
    mindie.refused("/generate", image, "Parts of type image_url are not supported by this model.")


def test_too_long(mindie):
    error = (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than 2047,"
        "the input ids length is 5001"
    )
    mindie.refused("/generate", {"inputs": "a " * 5000}, error, 424)


def test_lone_surrogates(mindie):
    assert mindie.post("/generate", b'{"inputs": "\\ud800"}').status_code == 422
