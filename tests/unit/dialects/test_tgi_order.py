"""TGI's validation: of two wrong fields the router refuses the one that it checks first."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

GENERATE, STREAM = "/generate", "/generate_stream"
ORDER: dict[str, tuple[Any, str]] = {
    "best_of": (2, "you must use sampling when `best_of` is > 1"),
    "repetition_penalty": (0, "`repetition_penalty` must"),
    "frequency_penalty": (3, "`frequency_penalty` must"),
    "top_p": (1, "`top_p` must"),
    "typical_p": (1, "`typical_p` must"),
    "top_k": (0, "`top_k` must"),
    "max_new_tokens": (0, "`max_new_tokens` must"),
    "stop": (["a"] * 5, "`stop` supports up to 4 stop sequences. Given: 5"),
    "top_n_tokens": (6, "`top_n_tokens` must"),
    "inputs": ("", "`inputs` cannot be empty"),
    "truncate": (0, "`truncate` must"),
    "long inputs": ("a " * 3000, "`inputs` "),
    "grammar": ({"type": "json", "value": {}}, "grammar is not valid: Grammar must have a 'properties' field"),
}
"""Every field in the router's order, with a value that it refuses and how the error begins."""
SAMPLES = {"top_p", "typical_p", "top_k"}
"""Fields that are given to sample, so that `best_of` is right."""
PAIRS = [
    (first, second)
    for first, second in combinations(ORDER, 2)
    if {first, second} != {"inputs", "long inputs"} and not (first == "best_of" and second in SAMPLES)
]


def body(*names: str) -> dict[str, Any]:
    """A request with the wrong values of these fields."""
    asked: dict[str, Any] = {"inputs": "The capital", "parameters": {"max_new_tokens": 2}}
    for name in names:
        if name.endswith("inputs"):
            asked["inputs"] = ORDER[name][0]
        else:
            asked["parameters"][name] = ORDER[name][0]
    return asked


@pytest.mark.parametrize(("first", "second"), PAIRS)
async def test_the_first_is_refused(serving, first, second):
    answer = await serving.post(GENERATE, body(first, second))
    assert (answer.status, answer.json()["error_type"]) == (422, "validation")
    assert answer.json()["error"].startswith(f"Input validation error: {ORDER[first][1]}")
    assert not serving.worker.submits


@pytest.mark.parametrize("best_of", [0, 2, 100])
async def test_a_stream_refuses_best_of_before_its_range(serving, best_of):
    parameters = {"best_of": best_of, "do_sample": True, "decoder_input_details": True}
    answer = await serving.post(STREAM, {"inputs": "The capital", "parameters": parameters})
    (frame,) = answer.events
    assert frame["error"] == "Input validation error: `best_of` != 1 is not supported when streaming tokens"
    del parameters["best_of"]
    (frame,) = (await serving.post(STREAM, {"inputs": "The capital", "parameters": parameters})).events
    assert "`decoder_input_details` == true is not supported" in frame["error"]


@pytest.mark.parametrize("path", [GENERATE, STREAM, "/", "/tokenize", "/vertex"])
@pytest.mark.parametrize("text", [b"", b"{", b'{"inputs": "a"'])
async def test_what_is_no_json_is_refused_by_the_routers_parser(serving, path, text):
    answer = await serving.post(path, text)
    assert (answer.status, answer.json()["error_type"]) == (400, "validation")
    assert answer.json()["error"].startswith("Failed to parse the request body as JSON: ")


async def test_parameters_of_a_vertex_instance_may_be_null(serving):
    answer = await serving.post("/vertex", {"instances": [{"inputs": "The capital", "parameters": None}]})
    assert answer.status == 200, answer.text
    answer = await serving.post("/vertex", {"instances": [{"inputs": None}]})
    assert (answer.status, answer.json()["error_type"]) == (422, "validation")


async def test_a_prompt_that_fills_the_context_alone(serving):
    """The total is checked first, also where the client names none."""
    answer = await serving.post(GENERATE, {"inputs": "a " * 3000})
    expected = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: "
    assert answer.json()["error"].startswith(expected)
    assert answer.json()["error"].endswith(" `inputs` tokens and 0 `max_new_tokens`")
