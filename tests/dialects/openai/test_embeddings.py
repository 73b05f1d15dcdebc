"""/v1/embeddings over HTTP, beside a model that generates text."""

from __future__ import annotations

import base64
import json
import struct

import pytest
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

from inference.dialects.openai.vectors import DTYPES
from tests.conftest import DEMO
from tests.live import LiveServer

pytestmark = pytest.mark.live
VOCABULARY = Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab_size()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from tests.engine.encoders import encoder  # which imports torch

    return encoder(tmp_path_factory.mktemp("encoder"), "bert")


@pytest.fixture(scope="module")
def embeddings(directory, tmp_path_factory):
    live = LiveServer(tmp_path_factory.mktemp("embeddings") / "var", model=str(directory)).start()
    yield live
    assert live.stop() == 0, live.log


def test_vectors_are_those_of_the_model(embeddings, directory):
    import torch  # what runs without an engine never imports it
    from transformers import AutoModel

    answer = embeddings.post("/v1/embeddings", {"input": [[5, 6, 7], [9]], "model": "bert-plain"}).json()
    assert answer["object"] == "list"
    assert answer["id"].startswith("embd-")
    assert answer["usage"] == {
        "prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": None,
    }  # fmt: skip
    assert [(d["index"], d["object"], len(d["embedding"])) for d in answer["data"]] == [
        (0, "embedding", 32), (1, "embedding", 32),
    ]  # fmt: skip
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(directory)(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist()
    assert answer["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)


def test_feature_extraction(embeddings, monkeypatch):
    """POST / as huggingface_hub sends it; the released client itself."""
    texts = ["Hello, world!", "the cat"]
    expected = [embeddings.post("/v1/embeddings", {"input": text}).json()["data"][0]["embedding"] for text in texts]
    rows = embeddings.post("/", {"inputs": texts}).json()
    assert rows == [pytest.approx(row, abs=1e-6) for row in expected]
    assert embeddings.post("/", {"inputs": texts[0]}).json() == [pytest.approx(expected[0], abs=1e-6)]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which refuses even loopback
    array = InferenceClient(embeddings.url).feature_extraction(texts[0], normalize=True)
    assert array.shape == (1, 32)
    assert array[0].tolist() == pytest.approx(expected[0], abs=1e-6)
    for body in ({}, {"inputs": []}, {"inputs": ""}, {"inputs": 5}, {"inputs": "a", "truncation_direction": "up"},
                 {"inputs": "a", "prompt_name": "query"}, {"inputs": "the " * 2000}):  # fmt: skip
        answer = embeddings.post("/", body)
        assert answer.status_code == 422, body
        assert set(answer.json()) == {"error", "error_type"}
    assert embeddings.post("/", {"inputs": "the " * 2000, "truncate": True}).status_code == 200


def vector(server, **body):
    response = server.post("/v1/embeddings", {"input": "Hello, world!", **body})
    assert response.status_code == 200, response.text
    return response.json()["data"][0]["embedding"]


def test_every_way_of_writing_a_vector_says_the_same(embeddings):
    plain = vector(embeddings)
    for order, endianness in (("<", "native"), ("<", "little"), (">", "big")):
        raw = base64.b64decode(vector(embeddings, encoding_format="base64", endianness=endianness))
        assert list(struct.unpack(f"{order}32f", raw)) == pytest.approx(plain, abs=1e-7)
    raw = base64.b64decode(vector(embeddings, encoding_format="base64", embed_dtype="float16"))
    assert list(struct.unpack("<32e", raw)) == pytest.approx(plain, rel=1e-3)
    raw = base64.b64decode(vector(embeddings, encoding_format="base64", embed_dtype="bfloat16"))
    halves = struct.unpack("<32H", raw)
    assert [struct.unpack("<f", struct.pack("<I", h << 16))[0] for h in halves] == pytest.approx(plain, rel=2**-8)


def test_eight_bits_and_bytes(embeddings):
    import torch  # what runs without an engine never imports it

    plain = vector(embeddings)
    for name, kind in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        raw = base64.b64decode(vector(embeddings, encoding_format="base64", embed_dtype=name))
        assert raw == bytes(torch.tensor(plain).to(kind).view(torch.uint8).tolist())
    body = {"input": ["Hello, world!", "a"], "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"}
    answer = embeddings.post("/v1/embeddings", body)
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert [(item["start"], item["end"], item["shape"]) for item in metadata["data"]] == [
        (0, 64, [32]),
        (64, 128, [32]),
    ]
    assert list(struct.unpack(">32e", answer.content[:64])) == pytest.approx(plain, rel=1e-3, abs=1e-4)
    bare = embeddings.post("/v1/embeddings", {**body, "encoding_format": "bytes_only"})
    assert (bare.content, "metadata" in bare.headers) == (answer.content, False)


def test_eight_bits_round_as_torch_does():
    import torch  # what runs without an engine never imports it

    numbers = torch.randn(20_000) * torch.exp2(torch.arange(20_000) % 40 - 25.0)
    for name, kind in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        known = torch.arange(1 << 7, dtype=torch.uint8).view(kind).float()
        known = known[known.isfinite()]
        given = torch.cat([numbers, known, (known[1:] + known[:-1]) / 2]).float()
        assert (DTYPES[name](given.numpy()) == given.to(kind).view(torch.uint8).numpy()).all()


def test_pooling_is_another_form_of_the_same(embeddings):
    answer = embeddings.post("/pooling", {"input": "Hello, world!", "task": "embed"}).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": vector(embeddings)}]
    for task in ("classify", "token_embed", "plugin", "x"):
        refused = embeddings.post("/pooling", {"input": "a", "task": task})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")


def test_texts_may_be_cut_and_left_unnormalised(embeddings):
    long = "one two three four five six seven eight nine ten " * 40
    refused = embeddings.post("/v1/embeddings", {"input": long})
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]["message"]
    left = vector(embeddings, input=long, truncate_prompt_tokens=4, truncation_side="left")
    right = vector(embeddings, input=long, truncate_prompt_tokens=4)
    assert left != right
    assert vector(embeddings, input=long, truncate_prompt_tokens=-1)
    assert sum(x * x for x in vector(embeddings, normalize=False)) > 2


def test_conversations_go_through_the_template_where_there_is_one(embeddings):
    refused = embeddings.post("/v1/embeddings", {"messages": [{"role": "user", "content": "hello"}]})
    assert refused.status_code == 400
    assert "chat template" in refused.json()["error"]["message"]


BAD = {
    "input": [None, "", [], [""], [[]], 5, {"a": 1}, [1, "a"], [VOCABULARY], [-1], [[1], "a", None], ["a"] * 2049],
    "dimensions": [0, -1, 8, 33],
    "encoding_format": ["hex"],
    "embed_dtype": ["int8"],
    "endianness": ["middle"],
    "truncate_prompt_tokens": [0, -2, 1000],
    "truncation_side": ["both"],
    "padding": ["max_length", "longest"],
    "chat_template": ["{{ messages }}"],
    "messages": [[{"role": "user", "content": "a"}], [5], [[5]]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_fields_are_named(embeddings, field, value):
    response = embeddings.post("/v1/embeddings", {"input": "hello", field: value})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"] or response.json()["error"]["param"] == field


def test_each_kind_of_model_refuses_the_work_of_the_other(embeddings, server):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        refused = embeddings.post(path, body)
        assert refused.status_code == 400
        assert "makes embeddings" in refused.json()["error"]["message"]
    assert embeddings.post("/generate", {"inputs": "a"}).status_code == 422
    refused = server.post("/v1/embeddings", {"input": "a"})
    assert refused.status_code == 400
    assert "makes no embeddings" in refused.json()["error"]["message"]
