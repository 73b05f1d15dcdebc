"""`/sg_inf` with real workers: what its fields say is what clients of the deployments' links see."""

from __future__ import annotations

import json
import os
import signal

import httpx
import numpy as np
import pytest

from tests import calls
from tests.cluster import Cluster
from tests.conftest import DEMO
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
"""Workers load a real model, several times, on whatever the machine has left."""

ASK = {"max_tokens": 12, "temperature": 0}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    started = Cluster(tmp_path_factory.mktemp("scalegenai") / "var")
    try:
        started.start("reconcile")
        wait_until(lambda: "this reconciler leads" in started.log, 60, lambda: started.log)
        started.start_web()
        yield started
    finally:
        started.stop()


class Created:
    """A deployment that the API created, and a client of its link."""

    def __init__(self, cluster: Cluster, name: str, **fields) -> None:
        self._cluster = cluster
        body = {"name": name, "model": str(DEMO), **fields}
        answer = calls.post(f"{cluster.control_url}/sg_inf/create", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        self.id = answer.json()["message"]["inf_id"]
        # A web process looks at the registries twice a second.
        wait_until(lambda: self._get("/health") != 404)

    @property
    def shown(self) -> dict:
        return calls.get(f"{self._cluster.control_url}/sg_inf/{self.id}").json()

    @property
    def workers(self) -> list[dict]:
        return next(row for row in self._cluster.status()["deployments"] if row["id"] == self.id)["workers"]

    def ready(self, count: int = 1) -> None:
        """Wait until so many workers serve."""
        wait_until(
            lambda: self.shown["metadata"]["ready_workers"] == count,
            120,
            lambda: (self.shown, self._cluster.log[-5000:]),
        )

    def post(self, path: str, body: dict) -> httpx.Response:
        key = calls.get(f"{self._cluster.control_url}/secret/AUTH_ENDPOINT_KEY_{self.id}").json()
        headers = {"authorization": f"Bearer {secret_of(key)}"}
        return calls.post(f"{self._link}{path}", json=body, timeout=120, headers=headers)

    def _get(self, path: str) -> int:
        return calls.get(f"{self._link}{path}").status_code

    @property
    def _link(self) -> str:
        return f"{self._cluster.url}/deployments/{self.id}/inference"

    def delete(self) -> None:
        calls.delete(f"{self._cluster.control_url}/sg_inf/{self.id}", params={"force": "true"})
        wait_until(lambda: self.shown["status"] == "DELETED", 60, lambda: self.shown)


def secret_of(answer) -> str:
    """The key in the vendor's answer."""
    while isinstance(answer, dict):
        answer = next(value for name, value in answer.items() if name != "success")
    return answer


def test_a_chat_template_of_its_own(cluster):
    made = Created(cluster, "templated", custom_chat_template="{{ messages[0]['content'] }}")
    chat = {"messages": [{"role": "user", "content": PROMPT}], **ASK}
    first = made.post(
        "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    )  # waits for the first worker
    assert first.status_code == 200, first.text
    answer = made.post("/v1/chat/completions", chat)
    assert answer.status_code == 200, answer.text
    plain = made.post("/v1/completions", {"prompt": PROMPT, **ASK})
    assert answer.json()["choices"][0]["message"]["content"].strip() == plain.json()["choices"][0]["text"].strip()
    assert answer.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    made.delete()


def test_embeddings(cluster):
    rules = {"autoscaling_strategy": "rps_per_worker", "upper_allowed_threshold": 10, "lower_allowed_threshold": 1}
    made = Created(cluster, "vectors", inf_type="embedding", autoscaling_config=rules)
    made.ready()
    answer = made.post("/v1/embeddings", {"input": [PROMPT, "The capital"]})
    assert answer.status_code == 200, answer.text
    vectors = [each["embedding"] for each in answer.json()["data"]]
    assert [len(vector) for vector in vectors] == [192, 192]
    assert vectors[0] != vectors[1]
    other = made.post("/embed", {"inputs": [PROMPT, "The capital"]})
    assert other.status_code == 200, other.text
    assert np.allclose(other.json(), vectors, atol=1e-6)
    assert made.post("/v1/completions", {"prompt": PROMPT}).status_code == 400
    made.delete()


def test_a_deployment_that_starts_shares_the_workers_of_another(cluster):
    first = Created(cluster, "first")
    first.ready()
    second = Created(cluster, "second", autoscaling_config={"enable_speedup_shared": True, "scale_to_zero": True})
    second.ready()
    (worker,) = second.workers
    calls.post(f"{cluster.control_url}/sg_inf/{second.id}/scale/zero", params={"force": "true"})
    wait_until(lambda: not second.workers, 60, lambda: json.dumps(second.workers))
    answer = second.post("/v1/completions", {"prompt": PROMPT, **ASK})
    assert answer.status_code == 200, answer.text
    assert second.shown["metadata"]["ready_workers"] == 0  # the other one has answered
    second.ready()  # and this one was woken all the same
    assert second.workers[0]["process_id"] != worker["process_id"]
    first.delete()
    second.delete()


def test_a_spare_takes_the_place_of_a_worker_that_dies(cluster):
    made = Created(
        cluster, "fast", autoscaling_config={"enable_fast_autoscaling": True}, initial_worker_config={"max_workers": 2}
    )
    made.ready()

    def workers() -> list[tuple[str, int]]:
        return [(worker["state"], worker["process_id"]) for worker in made.workers]

    wait_until(lambda: [state for state, _ in workers()] == ["ready", "ready"], 120, lambda: cluster.log[-3000:])
    (_, serving), (_, spare) = workers()
    os.kill(serving, signal.SIGKILL)
    answer = made.post("/v1/completions", {"prompt": PROMPT, **ASK})
    assert answer.status_code == 200, answer.text
    wait_until(lambda: serving not in dict((pid, state) for state, pid in workers()))
    assert spare in {pid for _, pid in workers()}
    made.delete()
