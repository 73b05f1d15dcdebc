"""Adapters of `/sg_inf` from a hub: only their two kinds of files, with the right token, and within the limit of size."""

from __future__ import annotations

import shutil

import pytest

from tests import calls
from tests.conftest import DEMO, ROOT
from tests.control_plane import ControlPlane
from tests.hub import Hub

pytestmark = pytest.mark.full

PIRATE = ROOT / "models" / "demo-adapters" / "pirate"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(PIRATE, folder / "pirate")
    (folder / "pirate" / "adapter_model.bin").write_bytes(b"pickled code")
    (folder / "pirate" / "README.md").write_text("readme")
    (folder / "large").mkdir()
    (folder / "large" / "adapter_config.json").write_text("{}")
    (folder / "large" / "adapter_model.safetensors").write_bytes(bytes(2 << 20))
    names = {"org/pirate": folder / "pirate", "org/gated": folder / "pirate", "org/large": folder / "large"}
    running = Hub(names, tokens={"org/gated": "hf_right"})
    yield running
    running.close()


@pytest.fixture(scope="module")
def plane(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("control")
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"),
                   "DRAGOMAN_MAX_ADAPTER_BYTES": str(1 << 20)}  # fmt: skip
    running = ControlPlane(folder / "var", environment).start()
    yield running
    running.stop()


@pytest.fixture
def create(plane):
    def send(*loras, **fields):
        body = {"name": "n", "model": str(DEMO), "llm_loras": list(loras), **fields}
        return calls.post(f"{plane.url}/sg_inf/create", json=body, timeout=60)

    return send


def test_an_adapter_from_the_hub(create, hub, plane):
    answer = create({"name": "pirate", "hf_repo": "org/pirate"})
    assert answer.status_code == 200, answer.text + plane.log
    fetched = {asked.rpartition("/")[2] for asked, _ in hub.asked if asked.startswith("GET /org/pirate/resolve/")}
    assert fetched == {"adapter_config.json", "adapter_model.safetensors"}


def test_the_token_of_the_adapter_or_of_the_deployment(create, plane):
    lora = {"name": "pirate", "hf_repo": "org/gated"}
    refused = [
        create(lora),
        create({**lora, "hf_token": "hf_wrong"}),
        create({**lora, "hf_token": "hf_wrong"}, hf_token="hf_right"),
    ]
    for answer in refused:
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == ["body", "llm_loras", 0, "hf_repo"]
        assert "hf_" not in answer.text.replace("hf_repo", "")
    assert create({**lora, "hf_token": "hf_right"}).status_code == 200
    again = create(lora, hf_token="hf_right")
    assert again.status_code == 200
    inf_id = create().json()["message"]["inf_id"]
    assert calls.put(f"{plane.url}/sg_inf/{inf_id}", json={"llm_loras": [lora]}).status_code == 422
    inf_id = again.json()["message"]["inf_id"]
    more = {"llm_loras": [{"name": "second", "hf_repo": "org/gated"}]}
    assert calls.put(f"{plane.url}/sg_inf/{inf_id}", json=more).status_code == 200  # with the deployment's stored token
    for secret in ("hf_right", "hf_wrong"):
        assert secret not in plane.log


def test_what_is_too_large_is_not_fetched(create, hub):
    answer = create({"name": "large", "hf_repo": "org/large"})
    assert "must have at most 1048576 bytes" in answer.text
    assert not [asked for asked, _ in hub.asked if asked.startswith("GET /org/large/resolve/")]


def test_what_the_hub_does_not_have(create):
    answer = create({"name": "a", "hf_repo": "org/none"}, {"name": "b", "hf_repo": "no hub id"})
    assert [each["loc"][2] for each in answer.json()["detail"]] == [0, 1]
