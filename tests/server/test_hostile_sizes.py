"""Bodies made to be expensive: each is refused or served for what it is, and a neighbour's requests go on meanwhile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from inference.errors import MalformedBody
from inference.http.exchange import MAX_CONTAINERS, parse_json
from tests import calls
from tests.live import wait_until

WORDS = "once upon a time " * 110_000


def many(item: str, count: int) -> str:
    return "[" + ",".join([item] * count) + "]"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", f'{{"prompt":{many("[]", 650_000)}}}', 400),
        ("/v1/completions", f'{{"x":{many("{}", 650_000)},"prompt":"a"}}', 400),
        ("/generate", f'{{"inputs":"a","x":{many("[]", 650_000)}}}', 400),
        ("/v1/completions", f'{{"prompt":{many("1", 940_000)}}}', 400),
        ("/v2/models/demo/generate", f'{{"text_input":{many("1", 940_000)}}}', 400),
        ("/v1/chat/completions", f'{{"messages":{many(json.dumps({"role": "user", "content": "a"}), 48_000)}}}', 400),
        ("/v1/completions", json.dumps({"prompt": WORDS}), 400),
        ("/generate", json.dumps({"inputs": WORDS}), 422),
        ("/generate", json.dumps({"inputs": "a" * 1_900_000}), 422),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": WORDS}]}), 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_and_the_next_one_is_served(server, path, body, status):
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text[:300]
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_too_long_texts_are_not_tokenised_whole(server):
    process = psutil.Process(server.process.pid)
    for path, body in (("/v1/completions", {"prompt": WORDS}), ("/generate", {"inputs": WORDS})):
        server.post(path, body)
        before = process.memory_info().rss
        answer = server.post(path, body)
        assert answer.status_code in (400, 422)
        assert process.memory_info().rss - before < 50 << 20
    assert "contains at least" in server.post("/v1/completions", {"prompt": WORDS}).json()["error"]["message"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 7, 500])
def test_what_is_cut_is_cut_as_if_the_whole_had_been_tokenised(server, side, keep):
    text = " ".join(f"{n} words,  and\nlines;" for n in range(12_000))
    whole = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    body = {
        "prompt": text,
        "truncate_prompt_tokens": keep,
        "truncation_side": side,
        "max_tokens": 1,
        "return_token_ids": True,
    }
    kept = server.post("/v1/completions", body).json()["choices"][0]["prompt_token_ids"]
    assert kept == (whole[-keep:] if side == "left" else whole[:keep])


def test_the_limits_of_a_body():
    assert len(parse_json(f'{{"a":{many("[]", MAX_CONTAINERS - 1)}}}'.encode())["a"]) == MAX_CONTAINERS - 1
    with pytest.raises(MalformedBody, match="lists and objects"):
        parse_json(f'{{"a":{many("[]", MAX_CONTAINERS + 1)}}}'.encode())
    with pytest.raises(MalformedBody, match="elements"):
        parse_json(f'{{"a":{many("1", 2_000_001)}}}'.encode())
    text = "[{," * 300_000  # brackets in a text are no lists
    assert parse_json(json.dumps({"a": text}).encode()) == {"a": text}


def test_the_last_of_equal_keys_counts_at_every_level(server):
    twice = '{"prompt": 5, "max_tokens": 9, "prompt": "Hi", "pro\\u006dpt": "Once", "max_tokens": 1}'
    once = {"prompt": "Once", "max_tokens": 1, "temperature": 0}
    answer = server.post("/v1/completions", twice[:-1] + ', "temperature": 1, "temperature": 0}')
    assert answer.json()["choices"][0]["text"] == server.post("/v1/completions", once).json()["choices"][0]["text"]
    tgi = '{"inputs": "Once", "parameters": {"max_new_tokens": "x", "max_new_tokens": 1, "details": false, "details": true}}'
    assert server.post("/generate", tgi).json()["details"]["generated_tokens"] == 1
    tgi = (
        '{"inputs": "Once", "parameters": {"max_new_tokens": 3}, "parameters": {"max_new_tokens": 1, "details": true}}'
    )
    assert server.post("/generate", tgi).json()["details"]["generated_tokens"] == 1
    chat = '{"messages": [{"role": "x", "role": "user", "content": 5, "content": "Hi"}], "max_tokens": 1}'
    assert server.post("/v1/chat/completions", chat).status_code == 200
    triton = '{"text_input": "Hi", "parameters": {"max_tokens": 0, "max_tokens": 1}}'  # inputs of Triton's come once
    assert server.post("/v2/models/demo/generate", triton).status_code == 200
    mindie = '{"inputs": 5, "inputs": "Hi", "parameters": {"max_new_tokens": 0, "max_new_tokens": 1}}'
    assert calls.post(f"{server.mindie_url}/generate", content=mindie, timeout=60).status_code == 200
    schema = '{"prompt": "a", "max_tokens": 8, "guided_json": "{\\"type\\": \\"wrong\\", \\"type\\": \\"boolean\\"}"}'
    assert server.post("/v1/completions", schema).json()["choices"][0]["text"] in ("true", "false")


@pytest.mark.parametrize("path", ["x" * 100_000, "/" + "x/" * 50_000, "a\0b", "\ud800", "~nobody-of-this-name"])
def test_an_adapter_that_cannot_be_anywhere(server, path):
    answer = server.post("/v1/load_lora_adapter", json.dumps({"lora_name": "odd", "lora_path": path}))
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.text) < 5000


@pytest.mark.parametrize("target", ["/proc/self/mem", "/dev/zero", "/"])
def test_an_adapter_whose_files_are_none(server, tmp_path, target):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).symlink_to(target)
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "odd", "lora_path": str(tmp_path)})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.status_code != 405
    assert server.log.count("unhandled error") == 0


def test_a_socket_on_an_unknown_path_is_turned_away(server):
    before = server.log.count("Traceback")
    for path in ("/ws/x", "/ws/", "/ws/status/more"):
        assert calls.get(f"{server.admin_url}{path}").status_code == 404
        with pytest.raises(InvalidStatus) as refused:
            connect(f"{server.admin_url.replace('http', 'ws')}{path}", origin=server.admin_url, open_timeout=60)
        assert refused.value.response.status_code == 403
    assert server.log.count("Traceback") == before


def test_bytes_that_are_no_message_are_told_without_our_names(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for name in ("ModelInfer", "ModelMetadata", "RepositoryModelLoad"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(b"\xff\xff\xff", timeout=60)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "class" not in refused.value.details()
            assert "Error" not in refused.value.details()
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(method(iter([b"\xff\xff\xff"]), timeout=60))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "class" not in refused.value.details()


def test_many_at_once_leave_nothing_behind(server):
    body = f'{{"prompt":{many("1", 940_000)}}}'
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", body).status_code, range(16)))
    assert answers == [400] * 16
    wait_until(lambda: server.get("/health").status_code == 200)
