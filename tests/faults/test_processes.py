"""Web processes and reconcilers come and go; workers and requests stay."""

from __future__ import annotations

import os
import signal
import time

import grpc
import psutil
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests import postgresql
from tests.cluster import Cluster, Load
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
"""Workers load a real model, several times, on whatever the machine has left."""


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def cluster(tmp_path):
    started = Cluster(tmp_path / "var", {"DRAGOMAN_WORKER_LEASE_S": "20", "DRAGOMAN_LINGER_S": "3"})
    try:
        yield started
    finally:
        started.stop()


def test_web_processes_restart_one_after_another_and_no_request_is_refused(cluster):
    cluster.start("reconcile")
    wait_until(lambda: (cluster.data_dir / "admin-password").exists(), 60, lambda: cluster.log)
    webs = [cluster.start_web(), cluster.start_web()]
    cluster.deploy()
    with Load(cluster.url).running() as load:
        load.more(20)
        for old in webs:
            cluster.start_web()
            load.more(10)
            old.send_signal(signal.SIGTERM)
            assert old.wait(60) == 0
            load.more(10)
    assert load.lost == {}


def test_web_processes_end_one_after_another_and_refuse_no_call_over_grpc(cluster):
    cluster.start("reconcile")
    wait_until(lambda: (cluster.data_dir / "admin-password").exists(), 60, lambda: cluster.log)
    webs = [cluster.start_web() for _ in range(3)]  # now, because who uses gRPC should not fork
    cluster.deploy()
    with GrpcLoad(cluster.grpc_port).running() as load:
        load.more(20)
        for old in webs[:2]:
            old.send_signal(signal.SIGTERM)
            assert old.wait(60) == 0
            load.more(20)
    assert set(load.counts) == {"ok"}, load.counts


class GrpcLoad(Load):
    """Threads that make short calls over Triton's gRPC, each on a connection of its own, and count their ends."""

    def __init__(self, port: int) -> None:
        super().__init__("")
        self._port = port

    def more(self, count: int) -> None:
        """Wait until so many further calls have ended well."""
        goal = self.counts["ok"] + count
        wait_until(lambda: self.counts["ok"] >= goal, 120, lambda: str(self.counts))

    def _run(self, number: int) -> None:
        request = pb.ModelInferRequest(model_name="demo")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Count")
        request.parameters["max_tokens"].int64_param = 2
        while not self._stop.is_set():
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(f"127.0.0.1:{self._port}", options) as channel:
                call = channel.stream_stream(
                    "/inference.GRPCInferenceService/ModelStreamInfer",
                    pb.ModelInferRequest.SerializeToString,
                    pb.ModelStreamInferResponse.FromString,
                )
                try:
                    errors = [a.error_message for a in call(iter([request]), timeout=60) if a.error_message]
                    self.counts[errors[0] if errors else "ok"] += 1
                except grpc.RpcError as error:
                    self.counts[error.code().name] += 1


def test_a_killed_reconciler_leaves_its_workers_to_the_next_one(cluster):
    first = cluster.start("reconcile")
    wait_until(lambda: (cluster.data_dir / "admin-password").exists(), 60, lambda: cluster.log)
    cluster.start_web()
    cluster.deploy()
    (before,) = cluster.deployment()["workers"]
    with Load(cluster.url).running() as load:
        load.more(5)
        first.kill()
        first.wait()
        load.more(20)
        cluster.start("reconcile")
        wait_until(lambda: "worker taken over" in cluster.log, 60, lambda: cluster.log)
        cluster.run("scale", "demo", "2", "--wait", "120")
        load.more(5)
    assert load.lost == {}
    workers = cluster.deployment()["workers"]
    assert (workers[0]["process_id"], workers[0]["epoch"]) == (before["process_id"], before["epoch"])
    assert len(workers) == 2
    cluster.run("stop", "demo", "--wait", "60")
    wait_until(lambda: has_ended(before["process_id"]))


def test_of_two_reconcilers_one_leads_and_the_other_takes_over(cluster):
    first = cluster.start("reconcile")
    wait_until(lambda: "this reconciler leads" in cluster.log, 60, lambda: cluster.log)
    cluster.start("reconcile")
    cluster.deploy()
    (before,) = cluster.deployment()["workers"]
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: cluster.log.count("this reconciler leads") == 2, 60, lambda: cluster.log)
    cluster.run("scale", "demo", "2", "--wait", "120")
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: "another reconciler leads" in cluster.log, 60, lambda: cluster.log)
    workers = cluster.deployment()["workers"]
    assert [(w["worker"], w["state"]) for w in workers] == [("demo/0", "ready"), ("demo/1", "ready")]
    assert workers[0]["process_id"] == before["process_id"]


def test_workers_outlive_a_database_that_is_away_for_longer_than_their_lease(tmp_path):
    lease_s = 15
    database = postgresql.Cluster()
    cluster = Cluster(
        tmp_path / "var", {"DRAGOMAN_WORKER_LEASE_S": str(lease_s), "DRAGOMAN_DATABASE_URL": database.url}
    )
    try:
        cluster.start("reconcile")
        wait_until(lambda: "this reconciler leads" in cluster.log, 90, lambda: cluster.log)
        cluster.start_web()
        cluster.deploy()
        (before,) = cluster.deployment()["workers"]
        with Load(cluster.url, threads=2).running() as load:
            database.pause()
            back = time.monotonic() + 2.5 * lease_s
            while time.monotonic() < back and not load.lost:
                load.more(1)
            database.resume()
            wait_until(lambda: "registry reachable again" in cluster.log, 120, lambda: cluster.log)
            cluster.run("scale", "demo", "2", "--wait", "240")
        assert load.lost == {}
        workers = cluster.deployment()["workers"]
        assert workers[0]["process_id"] == before["process_id"]
        assert len(workers) == 2
    finally:
        cluster.stop()
        database.remove()


def test_without_a_reconciler_workers_end_with_their_lease(tmp_path):
    cluster = Cluster(tmp_path / "var", {"DRAGOMAN_WORKER_LEASE_S": "15"})
    try:
        reconciler = cluster.start("reconcile")
        wait_until(lambda: "this reconciler leads" in cluster.log, 60, lambda: cluster.log)
        cluster.deploy()
        (worker,) = cluster.deployment()["workers"]
        os.kill(reconciler.pid, signal.SIGKILL)
        assert not has_ended(worker["process_id"])
        wait_until(lambda: has_ended(worker["process_id"]), 60, lambda: cluster.log)
        assert "the lease has expired" in cluster.log
    finally:
        cluster.stop()
