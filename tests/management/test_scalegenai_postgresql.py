"""`/sg_inf` on a real PostgreSQL: several writers at once, text that it cannot store, and a database that goes away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import DEMO, ROOT
from tests.control_plane import ControlPlane
from tests.postgresql import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.full

WRITERS = 6
PIRATE = ROOT / "models" / "demo-adapters" / "pirate"


@pytest.fixture
def cluster():
    running = Cluster()
    yield running
    running.remove()


@pytest.fixture
def client(cluster, tmp_path):
    plane = ControlPlane(tmp_path / "var", {"DRAGOMAN_DATABASE_URL": cluster.url}).start()
    with httpx.Client(base_url=plane.url, timeout=60) as client:
        yield client
    plane.stop()


def test_writers_at_once(client):
    body = {"name": "chat", "model": str(DEMO), "llm_loras": [{"name": "pirate", "hf_repo": str(PIRATE)}]}
    with ThreadPoolExecutor(WRITERS) as pool:
        created = list(pool.map(lambda _: client.post("/sg_inf/create", json=body), range(WRITERS)))
        assert [answer.status_code for answer in created] == [200] * WRITERS, [answer.text for answer in created]
        ids = [answer.json()["message"]["inf_id"] for answer in created]
        found = client.get("/sg_inf/list").json()
        assert {each["id"] for each in found} == set(ids)
        assert len({each["metadata"]["deployment"] for each in found}) == WRITERS
        assert len(client.get("/sg_inf/supported_models").json()) == 1
        deleted = list(pool.map(lambda _: client.delete(f"/sg_inf/{ids[0]}"), range(WRITERS)))
        assert sorted(answer.json()["message"] for answer in deleted)[-1] == "deleting"
        assert [answer.json()["message"] for answer in deleted].count("deleting") == 1
        updates = [{"max_price_per_hour": 7}, {"extra_one": 1}, {"extra_two": 2}, {"allow_spot_instances": True}]
        answers = list(pool.map(lambda change: client.put(f"/sg_inf/{ids[1]}", json=change), updates))
        assert [answer.status_code for answer in answers] == [200] * 4
    changed = client.get(f"/sg_inf/{ids[1]}").json()
    assert (changed["max_price_per_hour"], changed["allow_spot_instances"]) == (7.0, True)
    assert changed["metadata"]["extra"] == {"extra_one": 1, "extra_two": 2}


def test_text_that_cannot_be_stored(client):
    for body in ('{"name": "a\\u0000", "model": "m"}', '{"name": "a", "model": "m", "x": "\\ud800"}'):
        assert client.post("/sg_inf/create", content=body).status_code == 422
    assert client.get("/sg_inf/a%00b").status_code == 204
    assert client.get("/secret/AUTH_ENDPOINT_KEY_%00").status_code == 404


def test_a_database_that_goes_away_and_comes_back(client, cluster):
    assert client.get("/sg_inf/list").status_code == 204
    cluster.stop()
    for method, path in (("GET", "/sg_inf/list"), ("POST", "/sg_inf/create"), ("DELETE", "/sg_inf/x")):
        answer = client.request(method, path, json={"name": "n", "model": str(DEMO)})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["success"] is False
    cluster.start()
    wait_until(lambda: client.get("/sg_inf/list").status_code == 204)
