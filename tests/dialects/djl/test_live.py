"""DJL Serving's plane of a real server: adapters that compute, models that start, and the documentation's commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests import calls
from tests.conftest import DEMO, ROOT
from tests.live import LiveServer

pytestmark = [pytest.mark.full, pytest.mark.live]

ADAPTERS = ROOT / "models" / "demo-adapters"
PAGE = (ROOT / "docs" / "djl.md").read_text()
COMMANDS = re.findall(r"^\$ (curl .*)$", PAGE, re.M)
PROMPT = "Question: What is the capital of France?\nAnswer:"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("djl") / "var").start()
    yield server
    assert server.stop() == 0, server.log


def call(live, method, path, status=200, **options):
    answer = calls.request(method, live.djl_url + path, timeout=120, **options)
    assert answer.status_code == status, answer.text
    return answer


def text(live, adapter="", **parameters):
    body = {"inputs": PROMPT, "adapters": adapter, "parameters": {"max_new_tokens": 24, **parameters}}
    return call(live, "POST", "/invocations", json=body).json()["generated_text"]


def test_the_commands_of_the_documentation(live):
    assert len(COMMANDS) == 6
    for command in COMMANDS:
        run = command.replace("http://127.0.0.1:8085", live.djl_url).replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        json.loads(done.stdout)


def test_adapters_compute_and_the_base_does_not_change(live):
    base = text(live)
    for name in ("json", "pirate"):
        query = f"name=x-{name}&src={ADAPTERS / name}&pin=true"
        call(live, "POST", f"/models/demo/adapters?{query}")
    outputs = [text(live), text(live, "x-json"), text(live, "x-pirate")]
    assert outputs[0] == base
    assert text(live, "x-pirate") == outputs[2] != base
    prediction = call(live, "POST", "/predictions/demo?adapter=x-pirate", json={"inputs": PROMPT}).json()
    assert prediction["generated_text"].startswith(outputs[2][:10])
    call(live, "DELETE", "/adapters/x-json")
    call(live, "POST", "/invocations?adapter=x-json", 424, json={"inputs": PROMPT})
    assert (text(live), text(live, "x-pirate")) == (base, outputs[2])
    call(live, "DELETE", "/adapters/x-pirate")


def test_pins_are_limited_and_a_refused_one_is_not_registered(live):
    names = [f"pin-{number}" for number in range(9)]
    statuses = []
    for name in names:
        folder = live.data_dir.parent / name
        shutil.copytree(ADAPTERS / "json", folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1 + int(name[-1])}))
        url = f"{live.djl_url}/adapters?name={name}&src={folder}&pin=true"
        statuses.append(calls.post(url, timeout=60).status_code)
    refused = statuses.index(507)
    assert statuses[:refused] == [200] * refused
    listed = [each["name"] for each in call(live, "GET", "/adapters").json()["adapters"]]
    assert names[refused] not in listed
    for name in set(names) & set(listed):
        call(live, "DELETE", f"/adapters/{name}")


def test_broken_adapters_leave_nothing(live, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(ADAPTERS / "json", folder)
    (folder / "adapter_model.safetensors").write_bytes(b"no")
    answer = call(live, "POST", f"/adapters?name=broken&src={folder}", 424).json()
    assert (answer["code"], answer["type"]) == (424, "BadRequestException")
    assert str(tmp_path) not in answer["message"]
    call(live, "GET", "/adapters/broken", 404)


def test_a_model_with_adapters_beside_it(live, tmp_path):
    model = tmp_path / "travel"
    shutil.copytree(DEMO, model)
    shutil.copytree(ADAPTERS / "pirate", model / "adapters" / "captain")
    answer = call(live, "POST", f"/models?url={model}&model_name=travel")
    assert answer.json() == {"status": 'Model "travel" registered.'}
    names = [each["name"] for each in call(live, "GET", "/models/travel/adapters").json()["adapters"]]
    assert names == ["captain"]
    (described,) = call(live, "GET", "/models/travel").json()
    assert described["models"][0]["status"] == "Healthy"
    body = {"inputs": PROMPT, "adapters": "captain"}
    assert call(live, "POST", "/predictions/travel", json=body).json()["generated_text"]
    call(live, "POST", "/predictions/demo", 424, json=body)
    call(live, "POST", f"/models?url={model}&model_name=travel", 409)
    assert call(live, "POST", "/invocations", json={"inputs": PROMPT}).json()  # demo is the only startup model
    call(live, "DELETE", "/models/travel")
    call(live, "POST", "/predictions/travel", 404, json=body)


def test_an_adapter_survives_scaling(live):
    call(live, "POST", f"/adapters?name=stays&src={ADAPTERS / 'pirate'}")
    call(live, "PUT", "/models/demo?min_worker=1&max_worker=2")
    assert call(live, "GET", "/adapters/stays").json()["preload"] is True
    assert text(live, "stays")
    call(live, "DELETE", "/adapters/stays")


def test_a_header_with_an_underscore_names_the_model(live):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
    assert call(live, "POST", "/invocations", json=body, headers={"model_name": "demo"}).json()["generated_text"]
    assert "no-such" in call(live, "POST", "/invocations", 404, json=body, headers={"model_name": "no-such"}).text
    assert (
        "demo:7"
        in call(live, "POST", "/invocations", 404, json=body, headers={"model_name": "demo", "model_version": "7"}).text
    )
