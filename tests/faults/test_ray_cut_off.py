"""A machine of Ray's behind a link that is cut: its worker is replaced while it lives, and serves nobody any more."""

from __future__ import annotations

import shutil
import time

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: dragoman[ray]")

from config.cluster_certificates import make
from engine.client import EngineDead
from tests.cluster import Cluster, Load
from tests.faults.test_cut_links import Host, Stream, address_of, alive, connect, undisturbed
from tests.faults.test_hosts import LEADS, settings
from tests.faults.test_ray import engines, replaced, worker_of
from tests.ray_cluster import RayCluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FILES = ("pem", "key")


@pytest.fixture
def host():
    made = Host()
    yield made
    made.remove()


@pytest.fixture
def tls(tmp_path, host):
    """Each machine has its own certificate at the same path, which is this one's here."""
    folder = tmp_path / "tls"
    make(folder, [host.here, host.there])
    for end in FILES:
        shutil.copy(folder / f"{host.here}.{end}", folder / f"host.{end}")
    return folder


@pytest.fixture
def ray(host, tls):
    """The head here, without CPUs, and a spot machine behind the link."""
    mounts = " && ".join(f"mount --bind {tls}/{host.there}.{end} {tls}/host.{end}" for end in FILES)
    inside = [
        "nsenter",
        f"--net=/run/netns/{host.name}",
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'{mounts} && exec "$@"',
        "sh",
    ]
    made = RayCluster(host=host.here)
    try:
        made.start_head(labels={"worker-host": host.here})
        made.add_node(labels={"market": "spot", "worker-host": host.there}, host=host.there, inside=inside)
        yield made
    finally:
        host.heal()
        made.stop()


@pytest.fixture
def cluster(tmp_path, ray, tls):
    made = Cluster(
        tmp_path / "var",
        {
            **settings(tls, "host"),
            "DRAGOMAN_LAUNCHER": "ray",
            "DRAGOMAN_WORKER_PORTS": "12000-31999",
            "DRAGOMAN_REPLAY_WAIT_S": "150",
            "DRAGOMAN_WORKER_LEASE_S": "60",
        },
    )
    made.environment |= ray.client
    try:
        made.start("reconcile")
        wait_until(lambda: LEADS in made.log, 90, lambda: made.log)
        made.start_web()
        made.deploy("demo", "--spot")
        yield made
    finally:
        made.stop()


def test_a_worker_behind_a_cut_link_is_replaced_and_serves_nobody(cluster, ray, host, tmp_path):
    ray.add_node(labels={"market": "ondemand", "worker-host": host.here})
    (engine,) = engines(ray.nodes[1])
    old, address = worker_of(cluster), address_of(cluster)
    assert address.startswith(f"tcp://{host.there}:")
    expected = undisturbed(cluster, range(1))
    load = Load(cluster.url)
    with load.running():
        load.more(10)
        stream = Stream(cluster, 0)
        wait_until(lambda: len(stream.pieces) > 20, 60)
        host.cut()
        cut_at = time.monotonic()
        load.more(10)
        print(f"requests are answered again {time.monotonic() - cut_at:.1f} s after the cut")
        still_lives = psutil.pid_exists(engine.pid)
        new = replaced(cluster, old)
        assert stream.text() == expected[0]
        host.heal()
        assert new["epoch"] > old["epoch"]
        if still_lives and alive(engine.pid):
            with pytest.raises((EngineDead, OSError)):
                connect(tmp_path, address, old["worker"], new["epoch"])
        wait_until(lambda: not alive(engine.pid), 90)
        print(f"the old worker has ended {time.monotonic() - cut_at:.1f} s after the cut")
        load.more(10)
    assert load.lost == {}
    assert len(engines(ray.nodes[2])) == 1
