"""POST .../infer over HTTP: JSON and bytes, both ways, and every refusal."""

from __future__ import annotations

import gzip
import json
import struct
import zlib

import pytest

PROMPT = "Question: What is the capital of Spain?\nAnswer:"
LINE = " The capital of Spain is Madrid."
PATH = "/v2/models/demo/infer"
GREEDY = {"max_tokens": 7, "temperature": 0}


def text_tensor(text=PROMPT):
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}


def ask(**fields):
    return {"inputs": [text_tensor()], "parameters": GREEDY, **fields}


@pytest.mark.live
def test_json(server):
    answer = server.post(PATH, ask(id="a"))
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == (
        '{"model_name":"demo","model_version":"1","id":"a","outputs":[{"name":"text_output","datatype":"BYTES",'
        f'"shape":[1],"data":["{LINE}"]}}]}}'
    )
    assert "id" not in server.post("/v2/models/demo/versions/1/infer", ask()).json()


@pytest.mark.live
def test_tokens(server):
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    for shape, data in (([len(ids)], ids), ([1, len(ids)], [ids])):
        tensor = {"name": "input0", "shape": shape, "datatype": "UINT32", "data": data}
        output = server.post(PATH, ask(inputs=[tensor])).json()["outputs"][0]
        assert (output["name"], output["datatype"], output["shape"]) == ("output0", "UINT32", [1, 7])
        assert server.post("/detokenize", {"tokens": output["data"]}).json() == {"prompt": LINE}


def binary(request, raw):
    head = json.dumps(request).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


@pytest.mark.live
@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
def test_bytes_both_ways(server, encoding):
    raw = struct.pack("<I", len(PROMPT)) + PROMPT.encode()
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    body, headers = binary(ask(inputs=[tensor], parameters={**GREEDY, "binary_data_output": True}), raw)
    if encoding:
        body = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        headers["content-encoding"] = encoding
    answer = server.post(PATH, body, headers=headers)
    length = int(answer.headers["Inference-Header-Content-Length"])
    head = json.loads(answer.content[:length])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert head["outputs"][0]["parameters"] == {"binary_data_size": len(answer.content) - length}
    assert answer.content[length:] == struct.pack("<I", len(LINE)) + LINE.encode()


@pytest.mark.live
def test_outputs_decide_over_the_default(server):
    outputs = [{"name": "text_output", "parameters": {"binary_data": False}}, {"name": "output0"}]
    answer = server.post(PATH, ask(outputs=outputs, parameters={**GREEDY, "binary_data_output": True}))
    head = json.loads(answer.content[: int(answer.headers["Inference-Header-Content-Length"])])
    assert head["outputs"][0]["data"] == [LINE]
    assert head["outputs"][1]["parameters"] == {"binary_data_size": 28}


@pytest.mark.live
def test_parameters_as_tensors(server):
    inputs = [
        text_tensor(),
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [7]},
        {"name": "temperature", "shape": [1], "datatype": "FP32", "data": [0.0]},
        {"name": "exclude_input_in_output", "shape": [1], "datatype": "BOOL", "data": [False]},
        {"name": "return_finish_reason", "shape": [1], "datatype": "BOOL", "data": [True]},
        {"name": "return_num_output_tokens", "shape": [1], "datatype": "BOOL", "data": [True]},
        {"name": "return_num_input_tokens", "shape": [1], "datatype": "BOOL", "data": [True]},
        {"name": "return_cumulative_logprob", "shape": [1], "datatype": "BOOL", "data": [True]},
    ]
    found = {o["name"]: o["data"][0] for o in server.post(PATH, {"inputs": inputs}).json()["outputs"]}
    assert found["text_output"] == PROMPT + LINE
    assert (found["finish_reason"], found["num_output_tokens"], found["num_input_tokens"]) == ("length", 7, 12)
    assert -1 < found["cumulative_logprob"] < 0


@pytest.mark.live
def test_sampling_parameters_as_text(server):
    inputs = [text_tensor(), {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES",
                              "data": ['{"max_tokens": "7", "temperature": "0"}']}]  # fmt: skip
    assert server.post(PATH, {"inputs": inputs}).json()["outputs"][0]["data"] == [LINE]


@pytest.mark.live
def test_adapters(server):
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    body = {"inputs": [text_tensor(chat)], "parameters": {"max_tokens": 30, "temperature": 0}}
    base = server.post(PATH, body).json()["outputs"][0]["data"]
    named = server.post("/v2/models/json/infer", body).json()["outputs"][0]["data"]
    assert named != base
    body["parameters"]["lora_name"] = "json"
    assert server.post(PATH, body).json()["outputs"][0]["data"] == named


def tensor(**changes):
    return ask(inputs=[{**text_tensor(), **changes}])


REFUSED = [
    (b"{", "not valid JSON"),
    (b"[]", "object"),
    ({}, "inputs"),
    ({"inputs": []}, "inputs"),
    ({"inputs": [5]}, "input"),
    (tensor(datatype="STRING"), "datatype"),
    (tensor(datatype="FP16"), "FP16"),
    (tensor(shape=[2]), "expected 2"),
    (tensor(shape=[-1]), "shape"),
    (tensor(shape="x"), "shape"),
    (tensor(shape=[1 << 40]), "elements"),
    (tensor(shape=[10**18] * 300), "dimensions"),
    (tensor(shape=[10**18] * 16), "elements"),
    (tensor(shape=["9" * 5000]), "shape"),
    (tensor(data=[5]), "is no BYTES"),
    (tensor(data=None), "data"),
    (tensor(name="other", data=["a", "b"], shape=[2]), "other"),
    (tensor(parameters={"binary_data_size": 5}), "binary_data_size"),
    (ask(outputs=[{"name": "nothing"}]), "unexpected inference output 'nothing'"),
    (ask(outputs=[{"name": "text_output", "parameters": {"classification": 3}}]), "classification"),
    (ask(outputs="x"), "outputs"),
    (ask(id=5), "id"),
    (ask(parameters=5), "parameters"),
    (ask(parameters={"temperature": -1}), "temperature"),
    (ask(parameters={"top_p": 2}), "top_p"),
    (ask(parameters={"max_tokens": 0}), "max_tokens"),
    (ask(parameters={"max_tokens": "x"}), "max_tokens"),
    (ask(parameters={"stream": True}), "generate_stream"),
    (ask(parameters={"sequence_id": 7}), "sequence"),
    (ask(parameters={"lora_name": "none"}), "none"),
    (ask(parameters={"timeout": -1}), "timeout"),
    ({"inputs": [{"name": "input0", "shape": [1], "datatype": "UINT32", "data": [10**6]}]}, "out of vocabulary"),
    ({"inputs": [{"name": "input0", "shape": [1], "datatype": "UINT32", "data": [-1]}]}, "is no UINT32"),
    (tensor(data=["a " * 5000]), "maximum context length"),
]


@pytest.mark.parametrize(("body", "text"), REFUSED)
def test_refused(server, body, text):
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert text in answer.json()["error"]


def test_broken_bytes(server):
    raw = struct.pack("<I", 100) + b"short"
    given = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    body, headers = binary(ask(inputs=[given]), raw)
    assert "end inside an element" in server.post(PATH, body, headers=headers).json()["error"]
    for value in ("0", "-1", "x", str(len(body) + 1), "9" * 30):
        assert server.post(PATH, body, headers={"Inference-Header-Content-Length": value}).status_code == 400
    body, headers = binary(ask(), b"extra")
    assert "5" in server.post(PATH, body, headers=headers).json()["error"]
    assert server.post(PATH, b"not gzip", headers={"content-encoding": "gzip"}).status_code == 400
    assert server.post(PATH, b"{}", headers={"content-encoding": "br"}).status_code == 400


@pytest.mark.parametrize("filling", [b" " * (200 << 20), b"[],[]," * 400_000 + b"[]", b"[" * 1_000_000])
def test_a_bomb_is_not_blown_up(server, filling):
    bomb = gzip.compress(b'{"inputs":[' + filling + b"]}")
    assert server.post(PATH, bomb, headers={"content-encoding": "gzip"}).status_code == 400


@pytest.mark.live
def test_objects_among_sampling_parameters(server):
    given = {"max_tokens": 3, "temperature": 0, "logit_bias": {"300": 100}}
    inputs = [
        text_tensor(),
        {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES", "data": [json.dumps(given)]},
    ]
    outputs = [{"name": "output0"}]
    assert server.post(PATH, {"inputs": inputs, "outputs": outputs}).json()["outputs"][0]["data"] == [300] * 3


def test_unknown_models_and_versions(server):
    answer = server.post("/v2/models/org/none/infer", ask())
    assert (answer.status_code, answer.json()) == (404, {"error": "Request for unknown model: 'org/none' is not found"})
    assert server.post("/v2/models/demo/versions/9/infer", ask()).status_code == 404


@pytest.mark.live
def test_timeout_is_in_microseconds(server):
    slow = ask(parameters={"max_tokens": 2000, "ignore_eos": True, "timeout": 20_000})
    answer = server.post(PATH, slow)
    assert answer.status_code == 503
    server.wait_idle()
