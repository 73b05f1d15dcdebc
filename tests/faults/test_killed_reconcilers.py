"""The reconciler is killed at random while a script creates, scales and deletes. On SQLite, and on PostgreSQL where one answers."""

from __future__ import annotations

import json
import os
import random
import signal
import threading

import psutil
import pytest

from tests.cluster import Cluster, Load
from tests.waiting import wait_until

KILLS = int(os.environ.get("TEST_KILLS", "4"))
LEADS = "this reconciler leads"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    """The settings that choose a database of the test's own."""
    if request.param == "sqlite":
        yield {}
        return
    with request.getfixturevalue("postgresql").database() as url:
        yield {"DRAGOMAN_DATABASE_URL": url}


def engines(cluster: Cluster) -> list[psutil.Process]:
    """The worker processes whose sockets are in the cluster's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][-2:] == ["-m", "engine"]:
            try:
                if any(str(cluster.runtime) in (each.laddr or "") for each in process.net_connections("unix")):
                    found.append(process)
            except psutil.Error:
                continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_is_left(tmp_path, database):
    cluster = Cluster(tmp_path / "var", {**database, "DRAGOMAN_WORKER_LEASE_S": "60"})
    chance = random.Random(7)
    stop = threading.Event()
    kills = 0

    def kill_and_restart() -> None:
        nonlocal kills
        reconciler, led = cluster.start("reconcile"), cluster.log.count(LEADS)
        while not stop.wait(chance.uniform(0.5, 5.0)):
            # On a busy machine a start takes longer than that. Every other one comes to lead, and renews the workers' leases.
            while kills % 2 and cluster.log.count(LEADS) == led and not stop.wait(chance.uniform(0.1, 2.0)):
                pass
            reconciler.kill()
            reconciler.wait()
            kills += 1
            reconciler, led = cluster.start("reconcile"), cluster.log.count(LEADS)

    killer = threading.Thread(target=kill_and_restart)
    try:
        first = cluster.start("reconcile")
        wait_until(lambda: LEADS in cluster.log, 90, lambda: cluster.log)
        cluster.start_web()
        cluster.deploy("steady")
        first.send_signal(signal.SIGTERM)
        first.wait(90)
        killer.start()
        with Load(cluster.url, "steady", threads=2).running() as load:
            rounds = 0
            while kills < KILLS:
                rounds += 1
                name = f"short{rounds}"
                cluster.run("deploy", "demo", "--name", name, "--max-workers", "2", "--wait", "240")
                cluster.run("delete", name, "--force")
                load.more(1)
            stop.set()
            killer.join()
            cluster.run("scale", "steady", "2", "--wait", "240")
            load.more(5)
        assert load.lost == {}

        def settled() -> bool:
            rows = cluster.status()["deployments"]
            return [row["name"] for row in rows] == ["steady"] and len(engines(cluster)) == 2

        wait_until(settled, 180, lambda: f"{json.dumps(cluster.status())} {engines(cluster)}")
        workers = cluster.deployment("steady")["workers"]
        assert len({(worker["worker"], worker["epoch"]) for worker in workers}) == len(workers) == 2
    finally:
        stop.set()
        if killer.ident is not None:
            killer.join()
        cluster.stop()
