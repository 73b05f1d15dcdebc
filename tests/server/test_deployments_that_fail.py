"""Deployments that cannot serve what was asked for say so at once, with the reason: no request waits for them or finds
out.
"""

from __future__ import annotations

import json

import pytest

from tests import calls
from tests.conftest import DEMO, ROOT
from tests.engine.encoders import encoder
from tests.live import LiveServer
from tests.models.random_models import make_model
from tests.waiting import wait_until

PIRATE = ROOT / "models" / "demo-adapters" / "pirate"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("failing") / "var").start()
    yield server
    assert server.stop() == 0, server.log


def create(live, name, model, status=200, **fields):
    body = {"name": name, "model": str(model), **fields}
    answer = calls.post(f"{live.admin_url}/sg_inf/create", json=body, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def ask(live, model):
    return live.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1}, timeout=60)


def shown(live, public_id):
    return calls.get(f"{live.admin_url}/sg_inf/{public_id}", timeout=60).json()


def failed(live, created):
    """The reason, once the deployment has failed."""
    public_id = created["message"]["inf_id"]
    wait_until(lambda: shown(live, public_id)["status"] == "FAILED", 120, lambda: json.dumps(shown(live, public_id)))
    return shown(live, public_id)["metadata"]["last_error"]


def test_an_adapter_that_does_not_fit_its_model(live, tmp_path):
    other = make_model(tmp_path / "other", "llama")
    loras = [{"name": "misfit", "src": str(PIRATE)}]
    reason = failed(live, create(live, "misfit-base", other, llm_loras=loras))
    assert reason.startswith("its adapter misfit cannot be served: ")
    assert ask(live, "misfit-base").status_code == 503


def test_an_embedding_model_is_no_language_model(live, tmp_path):
    embedder = encoder(tmp_path / "embedder", "bert")
    assert "language-model head" in failed(live, create(live, "no-llm", embedder, inf_type="llm"))
    refused = create(
        live, "no-adapters", embedder, 422, inf_type="embedding", llm_loras=[{"name": "a", "src": str(PIRATE)}]
    )
    assert "embedding models take no adapters" in json.dumps(refused)


def test_a_price_that_no_machine_has(live):
    workers = {"initial_workers_gpu": "A100", "initial_workers_gpu_num": 1}
    created = create(live, "too-cheap", DEMO, max_price_per_hour=0.001, initial_worker_config=workers)
    (warning,) = shown(live, created["message"]["inf_id"])["metadata"]["warnings"]
    assert warning == "max_price_per_hour: no worker can be started: the cheapest machine for it costs 1.5"
    answer = ask(live, "too-cheap")
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert "max_price_per_hour" in answer.json()["error"]["message"]


def test_what_was_just_created_is_known(live):
    """Its first worker is waited for."""
    workers = {"min_workers": 1, "max_workers": 1}
    made = create(live, "fresh", DEMO, initial_worker_config=workers)
    assert ask(live, "fresh").status_code == 200
    deleted = calls.delete(f"{live.admin_url}/sg_inf/{made['message']['inf_id']}", timeout=60)
    assert deleted.status_code == 200
    assert ask(live, "fresh").status_code == 404
