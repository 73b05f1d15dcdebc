"""One of two workers becomes slow without dying: requests go to the other one, and none is lost."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager

import psutil
import pytest

from tests.cluster import Cluster, Load
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
"""Workers load a real model, several times, on whatever the machine has left."""

STOPPED_S, RUNNING_S = 1.5, 0.02
"""Of a slow worker's time. It is no outlier while everything on a busy machine takes as long, and none that is not heard of at all."""


@contextmanager
def slow(pid: int):
    """The process gets a small part of its time."""
    process, end = psutil.Process(pid), threading.Event()

    def run() -> None:
        while not end.wait(RUNNING_S):
            process.send_signal(signal.SIGSTOP)
            end.wait(STOPPED_S)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_slow_worker_gets_fewer_requests_and_loses_none(tmp_path):
    cluster = Cluster(tmp_path / "var")
    try:
        cluster.start("reconcile")
        wait_until(lambda: "this reconciler leads" in cluster.log, 90, lambda: cluster.log)
        cluster.start_web()
        cluster.deploy("demo", "--max-workers", "2")
        cluster.run("scale", "demo", "2", "--wait", "120")
        first, second = cluster.deployment()["workers"]
        with Load(cluster.url, threads=6, max_tokens=24).running() as load:
            load.more(400)  # both have shown how fast they are
            with slow(first["process_id"]):
                wait_until(
                    lambda: any("worker ejected" in line and "latency" in line for line in cluster.log.splitlines()),
                    180,
                    lambda: (load.counts, cluster.log[-3000:]),
                )
                load.more(100)
            load.more(20)
        assert load.lost == {}
        ejected = [line for line in cluster.log.splitlines() if "worker ejected" in line]
        assert all(first["worker"] in line for line in ejected)
        assert [w["process_id"] for w in cluster.deployment()["workers"]] == [first["process_id"], second["process_id"]]
    finally:
        cluster.stop()
