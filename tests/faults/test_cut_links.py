"""A host of its own, as a network namespace that the test makes: its link is cut and healed while clients ask and streams run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import subprocess
import threading
import time
from contextlib import closing, suppress

import psutil
import pytest

from config.cluster_certificates import make
from engine.client import EngineClient, EngineDead
from engine.network.credentials import Credentials
from tests import calls
from tests.cluster import MANAGE, Cluster, Load
from tests.conftest import ROOT
from tests.faults.test_hosts import LEADS, settings
from tests.live import heed_interrupts
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONGER_THAN_IS_WAITED_S = 13.0


class Host:
    """A network namespace with one link to this one."""

    def __init__(self) -> None:
        number = random.SystemRandom().randrange(1, 250)
        self.here, self.there = f"10.231.{number}.1", f"10.231.{number}.2"
        self.name, self.link = f"dragoman-{os.getpid()}-{number}", f"dg{os.getpid() % 100000}-{number}"
        inside = ["-n", self.name]
        try:
            for command in (
                ["netns", "add", self.name],
                ["link", "add", self.link, "type", "veth", "peer", "name", "dg0", "netns", self.name],
                ["addr", "add", f"{self.here}/30", "dev", self.link],
                ["link", "set", self.link, "up"],
                [*inside, "addr", "add", f"{self.there}/30", "dev", "dg0"],
                [*inside, "link", "set", "dg0", "up"],
                [*inside, "link", "set", "lo", "up"],
            ):
                ip(*command)
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            pytest.skip("this machine lets nobody make network namespaces")

    def cut(self) -> None:
        ip("link", "set", self.link, "down")

    def heal(self) -> None:
        ip("link", "set", self.link, "up")

    def remove(self) -> None:
        for command in (["link", "del", self.link], ["netns", "del", self.name]):
            with suppress(OSError, subprocess.CalledProcessError):
                ip(*command)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def host():
    made = Host()
    yield made
    made.remove()


@pytest.fixture
def cluster(tmp_path, host):
    """Its web process is here; both hosts may have workers."""
    make(tmp_path / "tls", [host.here, host.there])
    made = Cluster(
        tmp_path / "var",
        {**settings(tmp_path / "tls", "client"), "DRAGOMAN_REPLAY_WAIT_S": "150", "DRAGOMAN_WORKER_LEASE_S": "60"},
    )
    yield made
    host.heal()
    made.stop()


def reconciler(cluster: Cluster, tmp_path, address: str, namespace: str = "") -> subprocess.Popen:
    """A reconciler on one of the hosts."""
    environment = {
        **cluster.settings(),
        **settings(tmp_path / "tls", address),
        "DRAGOMAN_WORKER_HOST": address,
        "DRAGOMAN_WORKER_PORTS": "12000-31999",
    }
    there = ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []
    with cluster.log_path.open("a") as log:
        process = subprocess.Popen(
            [*there, *MANAGE, "reconcile"],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=heed_interrupts,
        )
    cluster.processes.append(process)
    return process


def started(cluster: Cluster, tmp_path, host: Host) -> subprocess.Popen:
    first = reconciler(cluster, tmp_path, host.there, host.name)
    wait_until(lambda: LEADS in cluster.log, 90, lambda: cluster.log)
    cluster.start_web()
    cluster.deploy()
    return first


class Stream:
    """One long stream, in a thread, and the text that it ended with."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        body = {
            "model": "demo",
            "prompt": "Once",
            "max_tokens": 1500,
            "ignore_eos": True,
            "temperature": 1,
            "seed": seed,
        }
        self.pieces: list[str] = []
        self.thread = threading.Thread(target=self._read, args=(f"{cluster.url}/v1/completions", body))
        self.thread.start()

    def _read(self, url: str, body: dict) -> None:
        with calls.stream("POST", url, json={**body, "stream": True}, timeout=200) as answer:
            for line in answer.iter_lines():
                kind, _, data = line.partition(": ")  # others are comments, while nothing comes
                if kind == "data" and data != "[DONE]":
                    event = json.loads(data)
                    self.pieces.append(event["choices"][0]["text"] if "choices" in event else data)

    def text(self) -> str:
        self.thread.join()
        return "".join(self.pieces)


def undisturbed(cluster: Cluster, seeds: range) -> list[str]:
    return [Stream(cluster, seed).text() for seed in seeds]


def test_a_link_that_is_cut_for_a_while_costs_time_and_nothing_else(cluster, tmp_path, host):
    """Short of the deadline TCP goes on; beyond it the connection is given up, and made again when the link is back."""
    started(cluster, tmp_path, host)
    expected = undisturbed(cluster, range(2))
    load = Load(cluster.url, max_tokens=20)
    with load.running():
        load.more(10)
        for cut_s in (3.0, LONGER_THAN_IS_WAITED_S):
            streams = [Stream(cluster, seed) for seed in range(2)]
            wait_until(lambda streams=streams: all(len(stream.pieces) > 20 for stream in streams))
            host.cut()
            time.sleep(cut_s)
            assert all(stream.thread.is_alive() for stream in streams)
            host.heal()
            assert [stream.text() for stream in streams] == expected
            load.more(10)
    assert load.lost == {}
    assert "no heartbeat for 10 s" in cluster.log
    assert len(cluster.deployment()["workers"]) == 1


def test_a_leader_that_cannot_reach_a_worker_replaces_it_and_the_old_one_ends_itself(cluster, tmp_path, host):
    """Two workers live for a while, on either side of the cut: the old one serves nobody any more."""
    first = started(cluster, tmp_path, host)
    expected = undisturbed(cluster, range(2))
    (old,) = cluster.deployment()["workers"]
    address = address_of(cluster)
    reconciler(cluster, tmp_path, host.here)
    first.kill()
    wait_until(lambda: "worker taken over" in cluster.log, 90, lambda: cluster.log)
    load = Load(cluster.url, max_tokens=20)
    with load.running():
        load.more(10)
        streams = [Stream(cluster, seed) for seed in range(2)]
        wait_until(lambda: all(len(stream.pieces) > 20 for stream in streams))
        host.cut()
        cut_at = time.monotonic()
        load.more(10)  # the new worker's
        print(f"requests are answered again {time.monotonic() - cut_at:.1f} s after the cut")
        assert [stream.text() for stream in streams] == expected
        assert psutil.pid_exists(old["process_id"])
        host.heal()
        (new,) = [worker for worker in cluster.deployment()["workers"] if worker["state"] == "ready"]
        assert new["epoch"] > old["epoch"]
        with pytest.raises(EngineDead, match="protocol, worker, epoch"):
            connect(tmp_path, address, old["worker"], new["epoch"])
        wait_until(lambda: not alive(old["process_id"]), 90)
        print(f"the old worker has ended {time.monotonic() - cut_at:.1f} s after the cut")
        load.more(10)
    assert load.lost == {}
    assert undisturbed(cluster, range(2)) == expected


def connect(tmp_path, address: str, worker_id: str, epoch: int) -> None:
    folder = tmp_path / "tls"
    files = [str(folder / name) for name in ("authority.pem", "client.pem", "client.key")]
    client = EngineClient(address, worker_id, epoch, credentials=Credentials(*files))
    asyncio.run(client.connect())


def address_of(cluster: Cluster) -> str:
    """Where the newest worker listens, as the registry knows it."""
    with closing(sqlite3.connect(cluster.data_dir / "dragoman.sqlite3")) as registry:
        return registry.execute("select address from management_worker order by id desc limit 1").fetchone()[0]


def alive(process_id: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    return False
