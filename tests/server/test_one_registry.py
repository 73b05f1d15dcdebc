"""Every API that registers adapters and models writes the same registry: what one registers, all list, serve and remove."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import grpc
import httpx
import pytest

from inference.dialects.torchserve.protocol import inference_pb2, management_pb2
from tests import calls
from tests.conftest import DEMO, ROOT
from tests.live import LiveServer
from tests.waiting import wait_until

SOURCE = ROOT / "models" / "demo-adapters" / "json"
ASK = {"prompt": "Question: What is the capital of France?\nAnswer:", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("registry") / "var").start()
    yield server
    assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def admin(live):
    with httpx.Client(base_url=live.admin_url, timeout=60, headers={"referer": f"{live.admin_url}/admin/"}) as client:
        token = form_token(client, "/admin/login/")
        password = (live.data_dir / "admin-password").read_text().strip()
        login = {"username": "admin", "password": password, "csrfmiddlewaretoken": token}
        assert client.post("/admin/login/?next=/admin/", data=login).status_code == 302
        yield client


def form_token(client, path):
    return re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', client.get(path).text)[1]


def by_vllm(live, admin, name):
    return live.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(SOURCE)})


def by_mindie(live, admin, name):
    body = {"lora_name": name, "lora_path": str(SOURCE)}
    return calls.post(f"{live.management_url}/v1/load_lora_adapter", json=body, timeout=60)


def by_djl(live, admin, name):
    return calls.post(f"{live.djl_url}/models/demo/adapters", params={"name": name, "src": str(SOURCE)}, timeout=60)


def by_admin(live, admin, name):
    page = admin.get("/admin/management/adapter/add/").text
    owner = re.search(r'<option value="(\d+)"[^>]*>demo</option>', page)[1]
    inline = {"versions-TOTAL_FORMS": "0", "versions-INITIAL_FORMS": "0"}
    form = {"name": name, "deployment": owner, "source": str(SOURCE), "workers": "0", **inline}
    token = form_token(admin, "/admin/management/adapter/add/")
    answer = admin.post("/admin/management/adapter/add/", data={**form, "csrfmiddlewaretoken": token})
    assert answer.status_code == 302, answer.text
    return answer


def by_scalegen(live, admin, name):
    (deployment,) = calls.get(f"{live.admin_url}/sg_inf/list", timeout=60).json()
    body = {"llm_loras": [{"name": name, "src": str(SOURCE)}]}
    return calls.post(f"{live.admin_url}/sg_inf/{deployment['id']}/update", json=body, timeout=60)


WAYS = {"vllm": by_vllm, "mindie": by_mindie, "djl": by_djl, "admin": by_admin, "scalegen": by_scalegen}


def shown(live):
    """The adapters in every list."""
    (deployment,) = calls.get(f"{live.admin_url}/sg_inf/list", timeout=60).json()
    models = live.get("/v1/models").json()["data"]
    listed = calls.get(f"{live.djl_url}/adapters", timeout=60).json()["adapters"]
    return [
        {card["id"] for card in models if card["parent"]},
        {adapter["name"] for adapter in listed},
        {lora["name"] for lora in deployment["llm_loras"]},
    ]


def chat(live, model):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    return live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


def test_an_adapter_is_everybodys(live, admin):
    for way, register in WAYS.items():
        assert register(live, admin, f"by-{way}").status_code in (200, 302), way
    expected = {"json", "pirate", *(f"by-{way}" for way in WAYS)}
    wait_until(lambda: shown(live) == [expected] * 3, 60, lambda: str(shown(live)))
    answers = {name: chat(live, name) for name in (*expected, "demo")}
    assert {answers[f"by-{way}"] for way in WAYS} == {answers["json"]}
    assert answers["json"] != answers["demo"]
    assert len(list((live.data_dir / "adapters").iterdir())) == 2  # one content for six names
    for name, by_other in (("by-vllm", "djl"), ("by-djl", "vllm"), ("by-mindie", "djl"), ("by-admin", "mindie"),
                           ("by-scalegen", "vllm")):  # fmt: skip
        if by_other == "djl":
            gone = calls.delete(f"{live.djl_url}/models/demo/adapters/{name}", timeout=60)
        else:
            plane = live.url if by_other == "vllm" else live.management_url
            gone = calls.post(f"{plane}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)
        assert gone.status_code == 200, gone.text
        assert live.post("/v1/completions", {**ASK, "model": name}).status_code == 404
    assert shown(live) == [{"json", "pirate"}] * 3
    trail = admin.get("/admin/management/auditevent/?q=by-").text
    for way in WAYS:
        assert trail.count(f"by-{way}") >= 2, way  # registered and removed


def test_unknown_adapters_are_errors_everywhere(live):
    texts = {"inputs": "Hello", "parameters": {"adapter_id": "nobody", "max_new_tokens": 2}}
    assert live.post("/generate", texts).status_code == 422
    assert live.post("/v1/completions", {**ASK, "model": "nobody"}).status_code == 404
    assert live.post("/v1/chat/completions", {"model": "demo:nobody", "messages": []}).status_code in (400, 404)
    for options in ({"json": {"inputs": "Hello", "adapters": "nobody"}},
                    {"params": {"adapter": "nobody"}, "json": {"inputs": "Hello"}}):  # fmt: skip
        assert calls.post(f"{live.djl_url}/predictions/demo", timeout=60, **options).status_code == 424
    with pytest.raises(grpc.RpcError):
        predict(live, "demo", data=b"Hello", lora_adapter=b"nobody")
    with pytest.raises(grpc.RpcError):
        predict(live, "nobody", data=b"Hello")


def predict(live, model, **values):
    with grpc.insecure_channel(f"127.0.0.1:{live.torchserve_inference_port}") as channel:
        call = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
            request_serializer=inference_pb2.PredictionsRequest.SerializeToString,
            response_deserializer=inference_pb2.PredictionResponse.FromString,
        )
        return call(inference_pb2.PredictionsRequest(model_name=model, input=values), timeout=60).prediction.decode()


def manage(live, name, **fields):
    with grpc.insecure_channel(f"127.0.0.1:{live.torchserve_management_port}") as channel:
        call = channel.unary_unary(
            f"/org.pytorch.serve.grpc.management.ManagementAPIsService/{name}",
            request_serializer=getattr(management_pb2, f"{name}Request").SerializeToString,
            response_deserializer=management_pb2.ManagementResponse.FromString,
        )
        return call(getattr(management_pb2, f"{name}Request")(**fields), timeout=120).msg


def test_a_model_is_everybodys(live):
    manage(live, "RegisterModel", url=str(DEMO), model_name="second", initial_workers=1, synchronous=True)
    assert predict(live, "second", data=ASK["prompt"].encode(), max_tokens=b"4", temperature=b"0")
    assert live.post("/v1/completions", {**ASK, "model": "second"}).status_code == 200
    assert "second" in {card["id"] for card in live.get("/v1/models").json()["data"]}
    assert "second" in {model["modelName"] for model in calls.get(f"{live.djl_url}/models").json()["models"]}
    index = live.post("/v2/repository/index", {}).json()
    assert ("second", "READY") in {(entry["name"], entry["state"]) for entry in index}
    assert "second" in {d["name"] for d in calls.get(f"{live.admin_url}/sg_inf/list").json()}
    status = subprocess.run(
        [sys.executable, "-W", "ignore", "manage.py", "status", "--json"],
        cwd=ROOT, env=live.settings(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "second" in {deployment["name"] for deployment in json.loads(status.stdout)["deployments"]}
    assert calls.delete(f"{live.djl_url}/models/second", timeout=60).status_code == 200
    assert "second" not in manage(live, "ListModels", limit=100)
    assert live.post("/v1/completions", {**ASK, "model": "second"}).status_code == 404
