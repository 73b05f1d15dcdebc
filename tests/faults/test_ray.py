"""Workers that Ray places, while what they depend on is taken away: supervisors, machines, notices of that, and Ray's head."""

from __future__ import annotations

import contextlib
import subprocess
import time

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: dragoman[ray]")

from config.cluster_certificates import make
from tests import calls
from tests.cluster import Cluster, Load
from tests.faults.test_cut_links import Stream, undisturbed
from tests.faults.test_hosts import LEADS, settings
from tests.ray_cluster import RayCluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_S = 180


@pytest.fixture
def ray(tmp_path):
    """A head that keeps its state, and a spot machine."""
    made = RayCluster(storage=tmp_path / "gcs")
    try:
        made.start_head()
        made.add_node(labels={"market": "spot"})
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(tmp_path, ray):
    """Its reconciler and its web process, which knows nothing of Ray."""
    make(tmp_path / "tls", ["127.0.0.1"])
    made = Cluster(
        tmp_path / "var",
        {
            **settings(tmp_path / "tls", "127.0.0.1"),
            "DRAGOMAN_LAUNCHER": "ray",
            "DRAGOMAN_WORKER_PORTS": "12000-31999",
            "DRAGOMAN_REPLAY_WAIT_S": "150",
        },
    )
    made.environment |= ray.client
    try:
        made.start("reconcile")
        wait_until(lambda: LEADS in made.log, 90, lambda: made.log)
        made.environment = {name: value for name, value in made.environment.items() if name not in ray.client}
        made.start_web()
        made.deploy("demo", "--spot")
        yield made
    finally:
        made.stop()


def worker_of(cluster: Cluster) -> dict:
    (worker,) = [each for each in cluster.deployment()["workers"] if each["state"] == "ready"]
    return worker


def engines(node) -> list[psutil.Process]:
    """The workers on a machine of Ray's."""
    found = []
    for process in psutil.Process(node.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == ["-m", "engine"] and process.parent().cmdline()[1:] != ["-m", "engine"]:
                found.append(process)
    return found


def who(worker: dict) -> tuple[str, int]:
    return worker["worker"], worker["epoch"]


def replaced(cluster: Cluster, old: dict) -> dict:
    """The worker that has taken the place of the old one."""

    def ready() -> bool:
        return any(each["state"] == "ready" and who(each) != who(old) for each in cluster.deployment()["workers"])

    wait_until(ready, PATIENCE_S, lambda: cluster.log[-5000:])
    return worker_of(cluster)


def test_a_supervisor_that_is_killed_takes_its_worker_along_and_is_replaced(cluster, ray):
    old = worker_of(cluster)
    (engine,) = engines(ray.nodes[1])
    load = Load(cluster.url)
    with load.running():
        load.more(10)
        engine.parent().kill()
        psutil.wait_procs([engine], 10)
        assert not engine.is_running()
        load.more(10)
    assert replaced(cluster, old)["epoch"] == old["epoch"] + 1  # the place is the same
    assert load.lost == {}
    assert len(engines(ray.nodes[1])) == 1


def test_a_machine_that_is_lost_is_left_for_another_kind(cluster, ray):
    """Its worker had a spot machine; no other spot machine is there, so the next one is on demand."""
    ray.add_node(labels={"market": "ondemand"})
    old = worker_of(cluster)
    expected = undisturbed(cluster, range(1))
    load = Load(cluster.url)
    with load.running():
        load.more(10)
        stream = Stream(cluster, 0)
        wait_until(lambda: len(stream.pieces) > 20, 60)
        ray.nodes[1].kill()
        lost_at = time.monotonic()
        load.more(10)
        print(f"requests are answered again {time.monotonic() - lost_at:.1f} s after the machine was lost")
        assert [stream.text()] == expected
    assert load.lost == {}
    replaced(cluster, old)
    assert len(engines(ray.nodes[2])) == 1


def test_a_machine_that_will_be_taken_away_is_left_before(cluster, ray):
    """The notice comes 60 s before; the successor is ready first, and no request waits."""
    ray.add_node(labels={"market": "ondemand"})
    old = worker_of(cluster)
    expected = undisturbed(cluster, range(1))
    load = Load(cluster.url)
    with load.running():
        load.more(10)
        stream = Stream(cluster, 0)
        wait_until(lambda: len(stream.pieces) > 20, 60)
        given_at = time.monotonic()
        ray.ray(
            "drain-node", "--address", ray.address, "--node-id", node_with(ray, "spot"), "--reason",
            "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "60",
        )  # fmt: skip
        wait_until(lambda: "the worker's machine leaves" in cluster.log, 30, lambda: cluster.log)
        wait_until(lambda: not engines(ray.nodes[1]), 65, lambda: cluster.log[-5000:])
        print(f"the machine is empty {time.monotonic() - given_at:.1f} s after the notice of 60 s")
        ray.nodes[1].kill()
        load.more(20)
        assert [stream.text()] == expected
    assert load.lost == {}
    replaced(cluster, old)


def node_with(ray: RayCluster, market: str) -> str:
    """Ray's id of the machine with this label, from the session of a process that attaches and ends."""
    program = (
        "import os, ray; ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False, configure_logging=False); "
        f"print([n['NodeID'] for n in ray.nodes() if n['Alive'] and n['Labels'].get('market') == '{market}'][0])"
    )
    return ray.python(program).split()[-1]


def test_while_rays_head_is_away_requests_are_answered_and_after_it_workers_are_placed(cluster, ray):
    """The head comes back with its state. The reconciler goes on all the time, and so does the worker."""
    old = worker_of(cluster)
    (engine,) = engines(ray.nodes[1])
    head = ray.nodes[0].child("gcs_server")
    command, environment = head.cmdline(), head.environ()
    load = Load(cluster.url)
    with load.running():
        load.more(10)
        head.kill()
        lost_at = time.monotonic()
        load.more(50)
        while time.monotonic() - lost_at < 10:
            load.more(10)
        again = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            load.more(50)
            cluster.run("change", "demo", "--min-workers", "2", "--max-workers", "2")
            cluster.run("scale", "demo", "2", "--wait", "180")
            load.more(20)
            assert engine.is_running()
            epochs = sorted(each["epoch"] for each in cluster.deployment()["workers"] if each["state"] == "ready")
            assert epochs == [old["epoch"], 1]
            assert len(engines(ray.nodes[1])) == 2
        finally:
            again.kill()
            again.wait()
    assert load.lost == {}
    assert calls.get(f"{cluster.url}/health").status_code == 200


def test_the_next_leader_holds_workers_without_ray(cluster, ray):
    """Ray's head and the leader are lost at once."""
    old = worker_of(cluster)
    load = Load(cluster.url)
    with load.running():
        load.more(10)
        leader = cluster.processes[0]
        ray.nodes[0].child("gcs_server").kill()
        leader.kill()
        cluster.environment |= ray.client
        cluster.start("reconcile")
        wait_until(lambda: "worker taken over" in cluster.log, 60, lambda: cluster.log)
        load.more(20)
        assert who(worker_of(cluster)) == who(old)
    assert load.lost == {}
