"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import pytest

from tests.conftest import DEMO

pytestmark = pytest.mark.live

MESSAGES = [{"role": "user", "content": "Hé 1"}]


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer  # which imports torch

    return AutoTokenizer.from_pretrained(DEMO)


def test_prompts(server, reference):
    ids = reference.encode("Hello wörld")
    answer = server.post("/tokenize", {"prompt": "Hello wörld", "return_token_strs": True}).json()
    assert answer == {
        "count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": reference.convert_ids_to_tokens(ids)
    }  # fmt: skip
    assert server.post("/tokenize", {"prompt": "a", "model": "demo"}).json()["token_strs"] is None
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "Hello wörld"}


@pytest.mark.parametrize("generation", [True, False])
def test_messages(server, reference, generation):
    text = reference.apply_chat_template(MESSAGES, add_generation_prompt=generation, tokenize=False)
    ids = reference.encode(text, add_special_tokens=False)
    answer = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": generation})
    assert answer.json()["tokens"] == ids
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}


def test_info(server, reference):
    info = server.get("/tokenizer_info").json()
    assert info["chat_template"] == reference.chat_template
    assert info["eos_token"] == reference.eos_token


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}, 400,
         "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)  # fmt: skip
def test_refused(server, path, body, status, param):
    answer = server.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
