"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.conftest import ROOT

JSON_ADAPTER = ROOT / "models" / "demo-adapters" / "json"


def load(mindie, **body):
    answer = mindie.post("/v1/load_lora_adapter", body, management=True)
    return answer.status_code, answer.text


def unload(mindie, name):
    answer = mindie.post("/v1/unload_lora_adapter", {"lora_name": name}, management=True)
    return answer.status_code, answer.text


@pytest.mark.live
@pytest.mark.parametrize("key", ["master_model", "master_mode"])
def test_load_use_and_unload(mindie, key):
    name = f"mine-{key}"
    assert load(mindie, lora_name=name, lora_path=str(JSON_ADAPTER), **{key: "demo"}) == (
        200, f"Success: LoRA adapter '{name}' added successfully."
    )  # fmt: skip
    assert load(mindie, lora_name=name, lora_path="/nowhere") == (
        200, f"The LoRA adapter '{name}' has already been added."
    )  # fmt: skip
    assert name in [card["id"] for card in mindie.get("/v1/models").json()["data"]]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": name, "messages": question, "max_tokens": 40}
    assert "{" in mindie.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert unload(mindie, name) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
    assert unload(mindie, name) == (200, f"The LoRA adapter '{name}' cannot be found.")
    mindie.refused("/v1/chat/completions", body, "Model not found")


@pytest.mark.live
def test_no_adapter_there(mindie, tmp_path):
    assert load(mindie, lora_name="x", lora_path=str(tmp_path)) == (
        200, f"Call to load LoRA method failed: Loading LoRA 'x' failed: No adapter found for '{tmp_path}'."
    )  # fmt: skip


@pytest.mark.live
def test_a_broken_adapter(mindie, tmp_path):
    directory = tmp_path / "broken"
    shutil.copytree(JSON_ADAPTER, directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["lm_head"]}))
    assert load(mindie, lora_name="x", lora_path=str(directory)) == (
        200, "Call to load LoRA method failed: The LoRA adapter 'x' is invalid."
    )  # fmt: skip


def test_unknown_base_model(mindie):
    text = "Failed to execute load LoRA request."
    assert load(mindie, lora_name="x", lora_path=str(JSON_ADAPTER), master_model="none") == (200, text)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 257, None, 5])
def test_bad_names(mindie, name):
    assert load(mindie, lora_name=name, lora_path=str(JSON_ADAPTER)) == (503, "Input invalid lora name")
    assert unload(mindie, name) == (503, "Input invalid lora name")


@pytest.mark.parametrize("path", ["/a/../b", "a b", "/a//\x00", 5, "~x"])
def test_bad_paths(mindie, path):
    assert load(mindie, lora_name="x", lora_path=path) == (503, "Input invalid lora path")


def test_bad_json(mindie):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = mindie.post(path, b"{", management=True)
        assert (answer.status_code, answer.text) == (200, "Req body converts to json fail.")
