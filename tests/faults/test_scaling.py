"""Deployments scale, change and wake under load, and lose nothing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import grpc
import httpx
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests import calls
from tests.cluster import Cluster, Load
from tests.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 6, "temperature": 0}
TRITON = {"text_input": "What is the capital of France?", "parameters": {"max_tokens": 6, "temperature": 0}}

SERVICE = "/inference.GRPCInferenceService"
PROMPT = b"<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

pytestmark = pytest.mark.timeout(500)
"""Workers load a real model, several times, on whatever the machine has left."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    started = Cluster(tmp_path_factory.mktemp("scaling") / "var")
    try:
        started.start("reconcile")
        wait_until(lambda: "this reconciler leads" in started.log, 60, lambda: started.log)
        started.start_web()
        yield started
    finally:
        started.stop()


@pytest.mark.slow
def test_more_workers_and_fewer_again(cluster):
    cluster.deploy("grows", "--max-workers", "3")
    with Load(cluster.url, "grows").running() as load:
        load.more(5)
        cluster.run("scale", "grows", "3", "--wait", "180")
        load.more(30)
        busy = [worker["running"] for worker in cluster.deployment("grows")["workers"]]
        cluster.run("scale", "grows", "1", "--wait", "120")
        load.more(10)
    assert load.lost == {}
    assert len(busy) == 3
    cluster.run("delete", "grows", "--wait", "60")


@pytest.mark.slow
def test_new_options_replace_the_workers_without_loss(cluster):
    cluster.deploy("changes")
    before = cluster.deployment("changes")["workers"]
    with Load(cluster.url, "changes").running() as load:
        load.more(5)
        cluster.run("change", "changes", "--option", "max_num_seqs=5")

        def replaced() -> bool:
            workers = cluster.deployment("changes")["workers"]
            return [w["state"] for w in workers] == ["ready"] and workers[0]["process_id"] != before[0]["process_id"]

        wait_until(replaced, 120, lambda: json.dumps(cluster.status()))
        load.more(5)
    assert load.lost == {}
    cluster.run("delete", "changes", "--wait", "60")


def test_fifty_requests_of_every_dialect_wake_one_worker(cluster):
    cluster.deploy("sleeps", "--min-workers", "0", "--max-workers", "2", "--scale-to-zero", "--idle-timeout-s", "1")
    wait_until(lambda: cluster.deployment("sleeps")["state"] == "inactive", 60, lambda: json.dumps(cluster.status()))
    wait_until(lambda: not cluster.deployment("sleeps")["workers"])
    assert "sleeps" in {card["id"] for card in calls.get(f"{cluster.url}/v1/models").json()["data"]}
    assert calls.get(f"{cluster.url}/v2/models/sleeps/ready").status_code == 200
    assert calls.get(f"{cluster.url}/v1/models/unheard-of").status_code == 404
    answers = asyncio.run(_burst(cluster.url))
    assert Counter(answers) == {200: 50}
    launched = [line for line in cluster.log.splitlines() if "worker launched" in line and "sleeps/" in line]
    assert len(launched) == 2  # the first start, and one to wake it
    rules = [decision["rule"] for decision in cluster.deployment("sleeps")["decisions"]]
    assert rules[:2] in (["wake", "zero"], ["zero", "wake"])


@pytest.mark.slow
def test_calls_over_grpc_wake_a_deployment_and_are_answered(cluster):
    cluster.deploy("naps", "--min-workers", "0", "--max-workers", "1", "--scale-to-zero", "--idle-timeout-s", "1")
    for call in (_unary, _streamed):
        wait_until(lambda: cluster.deployment("naps")["state"] == "inactive", 60, lambda: json.dumps(cluster.status()))
        wait_until(lambda: not cluster.deployment("naps")["workers"])
        with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
            assert call(channel) == "The capital of France is Paris."
    launched = [line for line in cluster.log.splitlines() if "worker launched" in line and "naps/" in line]
    assert len(launched) == 3
    cluster.run("delete", "naps", "--wait", "60")


def _call() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="naps")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(PROMPT)
    request.parameters["max_tokens"].int64_param = 20
    request.parameters["temperature"].double_param = 0
    return request


def _text(response: pb.ModelInferResponse) -> str:
    return "".join(raw[4:].decode() for raw in response.raw_output_contents[:1])


def _unary(channel: grpc.Channel) -> str:
    call = channel.unary_unary(
        f"{SERVICE}/ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )
    return _text(call(_call(), timeout=120))


def _streamed(channel: grpc.Channel) -> str:
    call = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    request = _call()
    request.parameters["stream"].bool_param = True
    answers = list(call(iter([request]), timeout=120))
    assert not any(answer.error_message for answer in answers), answers
    return "".join(_text(answer.infer_response) for answer in answers)


async def _burst(url: str) -> list[int]:
    chat, triton = {**CHAT, "model": "sleeps"}, "/v2/models/sleeps/"
    calls = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
        ("/v1/completions", {"model": "sleeps", "prompt": "Hi", "max_tokens": 4}),
        (f"{triton}generate", TRITON),
        (f"{triton}generate_stream", {**TRITON, "stream": True}),
    ]

    async def one(client: httpx.AsyncClient, path: str, body: object) -> int:
        answer = await client.post(f"{url}{path}", json=body)
        complete = "error" not in answer.text
        return answer.status_code if complete else -1

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:
        return list(await asyncio.gather(*(one(client, *calls[n % len(calls)]) for n in range(50))))
