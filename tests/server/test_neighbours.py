"""What one interface deploys, loads or deletes changes nothing for the clients of another, over one model's directory."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations

import grpc
import pytest

from inference.dialects.torchserve.protocol import inference_pb2, management_pb2
from tests import calls
from tests.conftest import DEMO, ROOT
from tests.live import LiveServer
from tests.waiting import wait_until

ADAPTERS = ROOT / "models" / "demo-adapters"
PROMPT = "Question: What is the capital of France?\nAnswer:"
TOKENS = 32


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("neighbours") / "var").start()
    yield server
    assert server.stop() == 0, server.log


def torchserve(live, service, name, request, reply, port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            f"/org.pytorch.serve.grpc.{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return call(request, timeout=120)


def manage(live, name, **fields):
    request = getattr(management_pb2, f"{name}Request")(**fields)
    port = live.torchserve_management_port
    return torchserve(
        live, "management.ManagementAPIsService", name, request, management_pb2.ManagementResponse, port
    ).msg


def predict(live, **values):
    given = {"max_tokens": str(TOKENS), "temperature": "0", "data": PROMPT, **values}
    request = inference_pb2.PredictionsRequest(
        model_name="demo", input={name: text.encode() for name, text in given.items()}
    )
    port = live.torchserve_inference_port
    reply = torchserve(
        live, "inference.InferenceAPIsService", "Predictions", request, inference_pb2.PredictionResponse, port
    )
    return reply.prediction.decode()


def done(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def completion(live, **named):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **named}
    return done(live.post("/v1/completions", body))["choices"][0]["text"]


def generate(live, **parameters):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, **parameters}}
    return done(live.post("/generate", body))["generated_text"]


def triton(live, **named):
    body = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0, **named}
    return done(live.post("/v2/models/demo/generate", body))["text_output"]


def djl(live, **named):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}, **named}
    return done(calls.post(f"{live.djl_url}/invocations", json=body, timeout=120))["generated_text"]


def mindie(live, model):
    body = {"model": model, "messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": TOKENS, "temperature": 0}
    return done(calls.post(f"{live.mindie_url}/v1/chat/completions", json=body, timeout=120))["choices"][0]["message"]


def listed(live):
    return [card["id"] for card in done(live.get("/v1/models"))["data"]]


def scalegen(live):
    return done(calls.get(f"{live.admin_url}/sg_inf/list", timeout=120))


CLIENTS = {
    "completions": lambda live: [completion(live, **named) for named in ({}, {"model": "demo"}, {"model": "pirate"})],
    "generate": lambda live: [generate(live), generate(live, adapter_id="pirate")],
    "triton": lambda live: [triton(live), triton(live, lora_name="pirate")],
    "djl": lambda live: [djl(live), djl(live, adapters="pirate"), djl(live, model="json")],
    "djl's adapters": lambda live: [a["name"] for a in done(calls.get(f"{live.djl_url}/adapters"))["adapters"]],
    "torchserve": lambda live: [predict(live), predict(live, lora_adapter="pirate")],
    "mindie": lambda live: [mindie(live, "demo"), mindie(live, "pirate")],
    "models": lambda live: [name for name in listed(live) if name in ("demo", "json", "pirate")],
    "sg_inf": lambda live: [lora["name"] for d in scalegen(live) if d["name"] == "demo" for lora in d["llm_loras"]],
}
"""What the clients of each interface see; equal before and after what another does."""


def sg_create(live, name, **fields):
    body = {"name": name, "model": str(DEMO), **fields}
    found = done(calls.post(f"{live.admin_url}/sg_inf/create", json=body, timeout=120))
    return lambda: done(calls.delete(f"{live.admin_url}/sg_inf/{found['message']['inf_id']}", timeout=120))


def by_sg(live):
    return sg_create(live, "sg")


def by_sg_with_adapter(live):
    """Other content under the name of an adapter that clients use."""
    return sg_create(live, "sg-adapter", llm_loras=[{"name": "pirate", "src": str(ADAPTERS / "json")}])


def by_sg_named_as_adapter(live):
    return sg_create(live, "pirate")


def by_sg_embedding(live):
    return sg_create(live, "sg-embedding", inf_type="embedding")


def by_torchserve(live):
    manage(live, "RegisterModel", url=str(DEMO), model_name="ts", initial_workers=1)
    return lambda: manage(live, "UnregisterModel", model_name="ts")


def by_djl(live):
    done(calls.post(f"{live.djl_url}/models", params={"url": str(DEMO), "model_name": "lmi"}, timeout=120))
    return lambda: done(calls.delete(f"{live.djl_url}/models/lmi", timeout=120))


def by_command(live):
    def command(*arguments):
        program = [sys.executable, "-W", "ignore", "manage.py", *arguments]
        subprocess.run(program, cwd=ROOT, env=live.settings(), capture_output=True, timeout=120, check=True)

    command("deploy", str(DEMO), "--name", "cli", "--adapter", f"pirate={ADAPTERS / 'json'}")
    return lambda: command("delete", "cli")


def by_load(live):
    body = {"lora_name": "loaded", "lora_path": str(ADAPTERS / "json")}
    assert live.post("/v1/load_lora_adapter", body).status_code == 200
    # A success is one: the next request works.
    assert completion(live, model="loaded") == completion(live, model="json")
    return lambda: live.post("/v1/unload_lora_adapter", {"lora_name": "loaded"}).raise_for_status()


ACTIONS = (
    by_sg, by_sg_with_adapter, by_sg_named_as_adapter, by_sg_embedding, by_torchserve, by_djl, by_command, by_load,
)  # fmt: skip


def seen(live):
    names = listed(live)
    assert len(names) == len(set(names)), names
    found = {client: look(live) for client, look in CLIENTS.items()}
    for client in ("djl's adapters", "models", "sg_inf"):
        found[client] = [name for name in found[client] if name != "loaded"]
    return found


def test_every_pair_of_interfaces(live):
    """Each acts while all before it still are there, in two orders, so that each acts after each other one."""
    before = seen(live)
    assert before["completions"][0] == before["completions"][1] != before["completions"][2]
    tried = set()
    for order in (ACTIONS, ACTIONS[::-1]):
        undo = []
        for action in order:
            undo.append(action(live))
            assert seen(live) == before, action.__name__  # before there is a worker
            tried |= {(earlier, action) for earlier in order[: len(undo) - 1]}
        wanted = {d["name"]: d["status"] for d in scalegen(live) if d["status"] != "DELETED"}
        assert len(wanted) == len(ACTIONS)  # each but the loading one made a deployment, beside the first
        wait_until(lambda: {d["status"] for d in scalegen(live)} <= {"ACTIVE", "DELETING", "DELETED"}, 300,
                   lambda: json.dumps(scalegen(live)))  # fmt: skip
        assert seen(live) == before
        names = listed(live)
        assert {"sg", "sg-adapter", "ts", "lmi", "cli", "sg-adapter:pirate", "cli:pirate"} <= set(names)
        for name in ("sg-adapter:pirate", "cli:pirate"):
            assert completion(live, model=name) == completion(live, model="json")
        for back in undo:
            back()
            assert seen(live) == before
    assert tried == set(permutations(ACTIONS, 2))
