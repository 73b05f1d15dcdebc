"""A cluster whose processes reach each other's workers over TCP alone: it serves, and loses nothing with a worker or a leader."""

from __future__ import annotations

import os
import signal

import httpx
import psutil
import pytest

from config.cluster_certificates import make
from tests import calls
from tests.cluster import Cluster, Load
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
LEADS = "this reconciler leads"


def settings(folder, host: str) -> dict[str, str]:
    """What a host with this certificate sets."""
    return {
        "DRAGOMAN_CLUSTER_AUTHORITY": str(folder / "authority.pem"),
        "DRAGOMAN_CLUSTER_CERTIFICATE": str(folder / f"{host}.pem"),
        "DRAGOMAN_CLUSTER_KEY": str(folder / f"{host}.key"),
    }


@pytest.fixture
def cluster(tmp_path):
    make(tmp_path / "tls", ["127.0.0.1"])
    made = Cluster(
        tmp_path / "var",
        {**settings(tmp_path / "tls", "client"), "DRAGOMAN_WORKER_LEASE_S": "60", "DRAGOMAN_REPLAY_WAIT_S": "120"},
    )
    yield made
    made.stop()


def start_reconciler(cluster: Cluster, tmp_path):
    """With the certificate of a host that has workers."""
    others, cluster.environment = (
        cluster.environment,
        {
            **cluster.environment,
            **settings(tmp_path / "tls", "127.0.0.1"),
            "DRAGOMAN_WORKER_HOST": "127.0.0.1",
            "DRAGOMAN_WORKER_PORTS": "12000-31999",
        },
    )
    try:
        return cluster.start("reconcile")
    finally:
        cluster.environment = others


@pytest.mark.slow
def test_workers_are_reached_held_and_taken_over_over_tcp(cluster, tmp_path):
    first = start_reconciler(cluster, tmp_path)
    wait_until(lambda: LEADS in cluster.log, 60, lambda: cluster.log)
    cluster.start_web()
    cluster.deploy("demo", "--min-workers", "2", "--max-workers", "2")
    cluster.run("scale", "demo", "2", "--wait", "180")
    pids = [worker["process_id"] for worker in cluster.deployment()["workers"]]
    for pid in pids:
        found = psutil.Process(pid).net_connections(kind="all")
        listening = [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
        assert [address.ip for address in listening] == ["127.0.0.1"]
        assert not [each.laddr for each in found if str(each.laddr).endswith((".sock", ".control"))]
    load = Load(cluster.url)
    with load.running():
        load.more(20)
        os.kill(pids[0], signal.SIGKILL)
        load.more(20)
        wait_until(lambda: ready(cluster) == 2, 120, lambda: cluster.log)
        kept = {worker["process_id"] for worker in cluster.deployment()["workers"] if worker["state"] == "ready"}
        assert pids[1] in kept
        first.kill()
        start_reconciler(cluster, tmp_path)
        wait_until(lambda: cluster.log.count("worker taken over") == 2, 90, lambda: cluster.log)
        load.more(20)
        cluster.run("scale", "demo", "1", "--wait", "60")  # the one that is drained was taken over
        wait_until(lambda: sum(psutil.pid_exists(pid) for pid in kept) == 1, 60, lambda: cluster.log)
        load.more(20)
    assert load.lost == {}, cluster.log[-5000:]
    assert {worker["process_id"] for worker in cluster.deployment()["workers"]} < kept
    assert "Traceback" not in cluster.log
    assert calls.get(f"{cluster.url}/health").status_code == 200


def ready(cluster: Cluster) -> int:
    return sum(worker["state"] == "ready" for worker in cluster.deployment()["workers"])


def test_a_process_of_another_cluster_reaches_no_worker(cluster, tmp_path):
    """A web process with another authority says why its requests find no worker; one beside it serves."""
    start_reconciler(cluster, tmp_path)
    wait_until(lambda: LEADS in cluster.log, 60, lambda: cluster.log)
    make(tmp_path / "other", ["127.0.0.1"])
    own = cluster.environment
    cluster.environment = {**own, **settings(tmp_path / "other", "client")}
    cluster.deploy()
    stranger = cluster.start("web")
    wait_until(lambda: "worker not reachable" in cluster.log, 60, lambda: cluster.log)
    assert "certificate" in cluster.log
    ask = {"model": "demo", "prompt": "Count:", "max_tokens": 4}
    with pytest.raises(httpx.TimeoutException):  # it waits for a worker
        calls.post(f"{cluster.url}/v1/completions", json=ask, timeout=2)
    stranger.send_signal(signal.SIGTERM)
    stranger.wait(60)
    cluster.environment = own
    cluster.start_web()
    assert calls.post(f"{cluster.url}/v1/completions", json=ask, timeout=60).status_code == 200
