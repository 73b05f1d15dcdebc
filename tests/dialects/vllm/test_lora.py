"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import json
import shutil
import threading

import pytest

from tests.conftest import ROOT
from tests.live import LiveServer

pytestmark = pytest.mark.live

ADAPTERS = ROOT / "models" / "demo-adapters"
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 40,
}


def load(server, **body):
    return server.post("/v1/load_lora_adapter", body)


def unload(server, name):
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def answer(server, model):
    return server.post("/v1/chat/completions", {**QUESTION, "model": model}).json()["choices"][0]["message"]["content"]


def test_load_use_replace_and_unload(server):
    told = load(server, lora_name="fresh", lora_path=str(ADAPTERS / "json"))
    assert (told.status_code, told.text) == (200, "Success: LoRA adapter 'fresh' added successfully.")
    card = server.get("/v1/models/fresh").json()
    assert (card["parent"], card["max_model_len"]) == ("demo", None)
    assert answer(server, "fresh") == answer(server, "json") != answer(server, "demo")
    again = load(server, lora_name="fresh", lora_path=str(ADAPTERS / "pirate"))
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert "has already been loaded" in again.json()["error"]["message"]
    assert load(server, lora_name="fresh", lora_path=str(ADAPTERS / "pirate"), load_inplace=True).status_code == 200
    assert answer(server, "fresh") == answer(server, "pirate")
    told = unload(server, "fresh")
    assert (told.status_code, told.text) == (200, "Success: LoRA adapter 'fresh' removed successfully.")
    assert server.post("/v1/chat/completions", {**QUESTION, "model": "fresh"}).status_code == 404


def test_refusals(server, tmp_path):
    for body, status, kind, text in (
        ({"lora_name": "", "lora_path": "/x"}, 400, "InvalidUserInput", "must be provided"),
        ({"lora_name": "x", "lora_path": ""}, 400, "InvalidUserInput", "must be provided"),
        ({"lora_name": "x"}, 400, "BadRequestError", "lora_path"),
        (
            {"lora_name": "demo", "lora_path": str(ADAPTERS / "json")},
            400,
            "InvalidUserInput",
            "conflicts with a served base",
        ),
        ({"lora_name": "my adapter", "lora_path": str(ADAPTERS / "json")}, 400, "InvalidUserInput", "name: "),
        ({"lora_name": "tgi", "lora_path": str(ADAPTERS / "json")}, 400, "InvalidUserInput", "name: "),
        ({"lora_name": "x", "lora_path": str(tmp_path)}, 404, "NotFoundError", "No adapter found for"),
        ({"lora_name": "x", "lora_path": "/\0"}, 404, "NotFoundError", "No adapter found for"),
        (
            {"lora_name": "x", "lora_path": str(ADAPTERS / "json"), "base_model_name": "none"},
            404,
            "NotFoundError",
            "none",
        ),
    ):
        told = load(server, **body)
        assert (told.status_code, told.json()["error"]["type"]) == (status, kind), told.text
        assert text in told.json()["error"]["message"]
    assert unload(server, "never").status_code == 404
    assert unload(server, "").status_code == 400


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"r": 512}, "LoRA rank 512 is greater than max_lora_rank"),
        ({"modules_to_save": ["lm_head"]}, "Unsupported modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"bias": "all"}, "bias"),
        ("{", "PEFT"),
    ],
)
def test_broken_adapters_are_never_registered(server, tmp_path, changes, text):
    directory = tmp_path / "broken"
    shutil.copytree(ADAPTERS / "json", directory)
    path = directory / "adapter_config.json"
    path.write_text(changes if isinstance(changes, str) else json.dumps({**json.loads(path.read_text()), **changes}))
    told = load(server, lora_name="broken", lora_path=str(directory))
    assert (told.status_code, told.json()["error"]["type"]) == (500, "InternalServerError")
    assert text in told.json()["error"]["message"]
    assert "broken" not in [card["id"] for card in server.get("/v1/models").json()["data"]]


def test_loads_at_once_and_while_requests_run(server):
    names = [f"many-{i}" for i in range(6)]
    statuses = []

    def one(name):
        statuses.append(load(server, lora_name=name, lora_path=str(ADAPTERS / "json")).status_code)
        statuses.append(server.post("/v1/chat/completions", {**QUESTION, "model": name}).status_code)
        statuses.append(unload(server, name).status_code)

    threads = [threading.Thread(target=one, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * 18


def test_a_configuration_without_weights_is_a_broken_adapter_and_not_an_absent_one(server, tmp_path):
    (tmp_path / "adapter_config.json").write_text("this is not json")
    answer = load(server, lora_name="broken", lora_path=str(tmp_path))
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert "adapter_model.safetensors is missing" in answer.json()["error"]["message"]


@pytest.mark.full
def test_only_from_the_allowed_folders(tmp_path):
    allowed = tmp_path / "allowed"
    shutil.copytree(ADAPTERS / "json", allowed / "mine")
    (allowed / "link").symlink_to(ADAPTERS / "json")
    server = LiveServer(tmp_path / "var", environment={"DRAGOMAN_ADAPTER_ROOTS": json.dumps([str(allowed)])}).start()
    assert load(server, lora_name="a", lora_path=str(allowed / "mine")).status_code == 200
    for path in (ADAPTERS / "json", allowed / "link", allowed / ".." / ".." / "etc"):
        assert load(server, lora_name="b", lora_path=str(path)).status_code == 404
    assert server.stop() == 0
