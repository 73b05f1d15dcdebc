"""Workers are killed at random while clients of every dialect generate; each text is that of an undisturbed run.

TEST_KILL_S sets for how many seconds workers are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter

import grpc
import httpx
import pytest

from inference.dialects.torchserve.protocol import inference_pb2
from inference.dialects.triton.protocol import grpc_service_pb2
from tests.cluster import Cluster
from tests.waiting import wait_until

SECONDS = float(os.environ.get("TEST_KILL_S", "20"))
WORKERS = 2
pytestmark = pytest.mark.timeout(600 + 2 * SECONDS)
SAMPLED = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.2}
TGI = {"max_new_tokens": 100, "do_sample": True, "temperature": 1.2}
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


class Clients:
    """One request of each kind; every method returns the whole text."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        self.front, self.http, self.cluster = cluster.url, http, cluster
        self.mindie = f"http://127.0.0.1:{cluster.other_ports['MINDIE_PORT']}"
        self.djl = f"http://127.0.0.1:{cluster.other_ports['DJL_PORT']}"

    async def openai_chat(self, seed: int) -> str:
        body = {"model": "demo", "messages": MESSAGES, **SAMPLED, "seed": seed, "stream": True}
        return chat_text(await self.post(f"{self.front}/v1/chat/completions", body))

    async def openai_two(self, seed: int) -> str:
        body = {"model": "demo", "prompt": "Once upon a time", "n": 2, **SAMPLED, "seed": seed, "logprobs": 1}
        choices = (await self.post(f"{self.front}/v1/completions", body)).json()["choices"]
        return json.dumps([(choice["text"], choice["logprobs"]["tokens"]) for choice in choices])

    async def openai_json(self, seed: int) -> str:
        schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 60}}, "required": ["a"]}
        body = {
            "model": "demo", "messages": MESSAGES, "seed": seed, "temperature": 1.2, "max_tokens": 100,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        }  # fmt: skip
        answer = await self.post(f"{self.front}/v1/chat/completions", body)
        return answer.json()["choices"][0]["message"]["content"]

    async def tgi(self, seed: int) -> str:
        body = {"inputs": "The sea is", "parameters": {**TGI, "seed": seed}}
        return (await self.post(f"{self.front}/generate", body)).json()["generated_text"]

    async def tgi_stream(self, seed: int) -> str:
        body = {"inputs": "The sea is", "parameters": {**TGI, "seed": seed}}
        return "".join(e["token"]["text"] for e in events(await self.post(f"{self.front}/generate_stream", body)))

    async def triton(self, seed: int) -> str:
        body = {"text_input": "Question: What", "parameters": {**SAMPLED, "seed": seed}}
        return (await self.post(f"{self.front}/v2/models/demo/generate", body)).json()["text_output"]

    async def triton_grpc(self, seed: int) -> str:
        request = grpc_service_pb2.ModelInferRequest(model_name="demo")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(b"Once there was")
        for name, value in {**SAMPLED, "seed": seed, "stream": True}.items():
            field = {bool: "bool_param", int: "int64_param", float: "double_param"}[type(value)]
            setattr(request.parameters[name], field, value)
        texts = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.cluster.grpc_port}") as channel:
            call = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                grpc_service_pb2.ModelInferRequest.SerializeToString,
                grpc_service_pb2.ModelStreamInferResponse.FromString,
            )
            async for answer in call(iter([request]), timeout=200):
                assert not answer.error_message, answer.error_message
                response = answer.infer_response
                for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
                    if output.name == "text_output":
                        texts.append(raw[4:])
        return b"".join(texts).decode(errors="replace")

    async def mindie_chat(self, seed: int) -> str:
        body = {"model": "demo", "messages": MESSAGES, **SAMPLED, "seed": seed, "stream": True}
        return chat_text(await self.post(f"{self.mindie}/v1/chat/completions", body))

    async def djl_stream(self, seed: int) -> str:
        body = {
            "inputs": "Name the",
            "stream": True,
            "parameters": {"max_new_tokens": 100, "do_sample": True, "seed": seed},
        }
        lines = (await self.post(f"{self.djl}/invocations", body)).text.splitlines()
        return json.loads(lines[-1])["generated_text"]

    async def torchserve_stream(self, seed: int) -> str:
        values = {"data": b"Who is the", "max_tokens": b"100", "temperature": b"1.2", "seed": str(seed).encode()}
        request = inference_pb2.PredictionsRequest(model_name="demo", input=values)
        port = self.cluster.other_ports["TORCHSERVE_GRPC_INFERENCE_PORT"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions",
                inference_pb2.PredictionsRequest.SerializeToString,
                inference_pb2.PredictionResponse.FromString,
            )
            return b"".join([piece.prediction async for piece in call(request, timeout=200)]).decode()

    async def post(self, url: str, body: object) -> httpx.Response:
        answer = await self.http.post(url, json=body, timeout=200)
        assert answer.status_code == 200, answer.text
        return answer


def events(answer: httpx.Response) -> list[dict]:
    found = [
        json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:") and "[DONE]" not in line
    ]
    assert not [event for event in found if "error" in event], answer.text[-500:]
    return found


def chat_text(answer: httpx.Response) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events(answer) if e["choices"])


async def run(cluster: Cluster) -> tuple[int, Counter[str], list[str]]:
    """Undisturbed once, then beside a killer: the kills, the identical answers by kind, and what else came."""
    same, other, kills = Counter(), [], 0
    async with httpx.AsyncClient() as http:
        clients = Clients(cluster, http)
        kinds = [getattr(clients, name) for name in dir(Clients) if not name.startswith("_") and name != "post"]
        expected = {(kind.__name__, seed): await kind(seed) for kind in kinds for seed in (1, 2)}
        until = time.monotonic() + SECONDS

        async def ask(kind, seed: int) -> None:
            while time.monotonic() < until:
                try:
                    got = await kind(seed)
                except (AssertionError, httpx.HTTPError, grpc.RpcError) as error:
                    other.append(f"{kind.__name__}: {error!r}"[:500])
                    continue
                if got == expected[kind.__name__, seed]:
                    same[kind.__name__] += 1
                else:
                    other.append(f"{kind.__name__}: {got[:200]!r}")

        asking = [asyncio.ensure_future(ask(kind, seed)) for kind in kinds for seed in (1, 2)]
        chance = random.Random(3)
        while time.monotonic() < until:
            await asyncio.sleep(chance.uniform(1, 4))
            workers = (await asyncio.to_thread(cluster.deployment))["workers"]
            ready = [worker["process_id"] for worker in workers if worker["state"] == "ready"]
            if ready and time.monotonic() < until:
                os.kill(chance.choice(ready), signal.SIGKILL)
                kills += 1
        await asyncio.gather(*asking)
    return kills, same, other


def test_clients_of_every_dialect_notice_nothing(tmp_path):
    cluster = Cluster(tmp_path / "var", {"DRAGOMAN_REPLAY_WAIT_S": "120"})
    try:
        cluster.start("reconcile")
        wait_until(lambda: "this reconciler leads" in cluster.log, 60, lambda: cluster.log)
        cluster.start_web()
        cluster.deploy("demo", "--min-workers", str(WORKERS), "--max-workers", str(WORKERS))
        cluster.run("scale", "demo", str(WORKERS), "--wait", "180")
        kills, same, other = asyncio.run(run(cluster))
    finally:
        cluster.stop()
    print(f"{kills} kills, identical answers: {dict(same)}")
    assert kills
    assert other == []
    assert len(same) == 10
