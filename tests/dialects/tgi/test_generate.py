"""POST /, /generate and /generate_stream in the router's contract: first they work, then each refusal, word for word."""

from __future__ import annotations

import pytest

from tests.live import events

INPUTS = "Question: What is the capital of Spain?\nAnswer:"
TEXT = " The capital of Spain is Madrid."


def ask(**parameters):
    return {"inputs": INPUTS, "parameters": parameters}


@pytest.mark.live
def test_it_works(server):
    answer = server.post("/generate", ask(max_new_tokens=8, details=True))
    body = answer.json()
    assert list(body) == ["generated_text", "details"]
    assert body["generated_text"].startswith(" The capital of Spain")
    details = body["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == len(details["tokens"]) == 8
    assert details["seed"] is None
    assert details["prefill"] == []
    assert "".join(t["text"] for t in details["tokens"] if not t["special"]) == body["generated_text"]
    for name in ("x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time",
                 "x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens"):  # fmt: skip
        assert name in answer.headers
    assert answer.headers["x-generated-tokens"] == "8"
    assert answer.headers["x-compute-characters"] == str(len(INPUTS))


@pytest.mark.live
def test_without_details(server):
    assert list(server.post("/generate", ask(max_new_tokens=2)).json()) == ["generated_text"]


@pytest.mark.live
def test_stop_strings_stay_in_the_text(server):
    body = server.post("/generate", ask(max_new_tokens=40, stop=["is Madr"], details=True)).json()
    assert body["details"]["finish_reason"] == "stop_sequence"
    assert "is Madr" in body["generated_text"]


@pytest.mark.live
def test_the_end_token_counts_before_a_stop_string_that_ends_in_it(server):
    template = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    parameters = {"details": True, "max_new_tokens": 50, "stop": ["help you"]}
    body = server.post("/generate", {"inputs": template, "parameters": parameters}).json()
    assert body["generated_text"] == "Hello! How can I help you"
    parameters["stop"] = ["?<|im_end|>"]
    body = server.post("/generate", {"inputs": template, "parameters": parameters}).json()
    assert body["details"]["finish_reason"] == "eos_token"


@pytest.mark.live
def test_end_of_sequence_is_a_token(server):
    template = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    body = server.post("/generate", {"inputs": template, "parameters": {"details": True, "max_new_tokens": 50}}).json()
    assert body["generated_text"] == "Hello! How can I help you today?"
    assert body["details"]["finish_reason"] == "eos_token"
    last = body["details"]["tokens"][-1]
    assert (last["text"], last["special"]) == ("<|im_end|>", True)
    assert len(body["details"]["tokens"]) == body["details"]["generated_tokens"]


@pytest.mark.live
def test_root_gives_a_list_with_the_prompt(server):
    (body,) = server.post("/", ask(max_new_tokens=8)).json()
    assert body["generated_text"].startswith(INPUTS + " The capital")
    (body,) = server.post("/", ask(max_new_tokens=8, return_full_text=False)).json()
    assert body["generated_text"].startswith(" The capital")


@pytest.mark.live
@pytest.mark.parametrize("path", ["/generate_stream", "/"])
def test_stream(server, path):
    body = {**ask(max_new_tokens=8, details=True, return_full_text=False), "stream": True}
    answer = server.post(path, body)
    assert answer.headers["content-type"] == "text/event-stream"
    frames = events(answer)
    assert [f["index"] for f in frames] == list(range(1, 9))
    assert all(list(f) == ["index", "token", "generated_text", "details"] for f in frames)
    assert all(f["generated_text"] is None and f["details"] is None for f in frames[:-1])
    text = "".join(f["token"]["text"] for f in frames if not f["token"]["special"])
    assert frames[-1]["generated_text"] == text
    details = frames[-1]["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 8, None)
    assert details["input_length"] > 5


@pytest.mark.live
def test_sampling_is_repeatable_and_told(server):
    body = ask(max_new_tokens=12, seed=5, temperature=1.3, details=True)
    first, second = (server.post("/generate", body).json() for _ in range(2))
    assert first["generated_text"] == second["generated_text"]
    assert first["details"]["seed"] == 5
    unseeded = server.post("/generate", {"inputs": INPUTS}).json()  # no parameters at all mean sampling
    assert "generated_text" in unseeded


@pytest.mark.live
@pytest.mark.parametrize("how", [{"do_sample": True}, {"temperature": 1.0}])
def test_best_of(server, how):
    body = server.post("/generate", ask(max_new_tokens=6, best_of=3, details=True, **how)).json()
    others = body["details"]["best_of_sequences"]
    assert len(others) == 2
    mean = lambda tokens: sum(t["logprob"] for t in tokens) / len(tokens)  # noqa: E731
    assert all(mean(body["details"]["tokens"]) >= mean(o["tokens"]) for o in others)
    assert all(o["seed"] is not None for o in others)


@pytest.mark.live
def test_prefill_and_top_tokens(server):
    body = ask(max_new_tokens=3, decoder_input_details=True, top_n_tokens=2, details=True)
    details = server.post("/generate", body).json()["details"]
    assert details["prefill"][0]["logprob"] is None
    assert all(t["logprob"] < 0 for t in details["prefill"][1:])
    assert "".join(t["text"] for t in details["prefill"]) == INPUTS
    assert len(details["top_tokens"]) == 3
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert top[0]["id"] == token["id"]


@pytest.mark.live
def test_truncate_keeps_the_end(server):
    answer = server.post("/generate", ask(max_new_tokens=1, truncate=3))
    assert answer.headers["x-prompt-tokens"] == "3"


REFUSALS = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 99}, "`best_of` must be > 0 and <= 8. Given: 99"),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"seed": 1, "best_of": 2, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 2047. Given: 0"),
    ({"grammar": {"type": "regex", "value": 1}}, "grammar is not supported"),
    ({"adapter_id": "x"}, "`adapter_id`: the adapter 'x' was not found"),
]


@pytest.mark.parametrize(("parameters", "text"), REFUSALS)
def test_validation_texts(server, parameters, text):
    answer = server.post("/generate", ask(**parameters))
    assert answer.status_code == 422
    assert answer.json() == {"error": f"Input validation error: {text}", "error_type": "validation"}


@pytest.mark.parametrize(("parameters", "text"), [r for r in REFUSALS if "best_of" not in r[0]])
def test_streams_answer_200_and_an_error_frame(server, parameters, text):
    answer = server.post("/generate_stream", ask(**parameters))
    assert answer.status_code == 200
    assert events(answer) == [{"error": f"Input validation error: {text}", "error_type": "validation"}]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 422),
        ({}, 422),
        ({"inputs": 5}, 422),
        ({"inputs": ["a"]}, 422),
        ({"inputs": ""}, 422),
        ({"inputs": "a", "parameters": None}, 422),
        ({"inputs": "a", "parameters": {"do_sample": None}}, 422),
        ({"inputs": "a", "parameters": {"seed": -1}}, 422),
        ({"inputs": "a", "parameters": {"max_new_tokens": -5}}, 422),
        ({"inputs": "a", "parameters": {"top_k": "x"}}, 422),
        ({"inputs": "a", "parameters": {"top_k": 2**70}}, 422),
        ({"inputs": "a " * 3000}, 422),
    ],
)
def test_malformed_bodies(server, body, status):
    answer = server.post("/generate", body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error", "error_type"}


def test_too_long_is_told_with_numbers(server):
    answer = server.post("/generate", {"inputs": "a " * 1500, "parameters": {"max_new_tokens": 900}})
    assert answer.status_code == 422
    assert "`inputs` tokens + `max_new_tokens` must be <= 2048. Given:" in answer.json()["error"]


def test_operations(server):
    for path in ("/health", "/ping", "/"):
        answer = server.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    info = server.get("/info").json()
    assert info["model_id"] == "demo"
    assert info["max_total_tokens"] == 2048
    tokens = server.post("/tokenize", {"inputs": "Hé 1"}).json()
    raw = "Hé 1".encode()
    assert [raw[t["start"] : t["stop"]].decode() for t in tokens] == [t["text"] for t in tokens]
    refused = {"error": "Not Found: this server does not serve GET /nothing", "error_type": "not_found"}
    assert server.get("/nothing").json() == refused
