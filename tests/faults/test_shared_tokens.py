"""TorchServe's keys with several web processes: any of them accepts a key that any of them replaced."""

from __future__ import annotations

import json
import signal

import grpc
import pytest

from inference.dialects.torchserve.protocol import management_pb2 as manage
from tests import calls
from tests.cluster import Cluster
from tests.live import free_port

LIST = "/org.pytorch.serve.grpc.management.ManagementAPIsService/ListModels"
ATTEMPTS = 12
"""Connections, which the kernel distributes among the processes; each process gets one of so many almost certainly."""


@pytest.fixture
def cluster(tmp_path):
    environment = {
        "DRAGOMAN_TORCHSERVE_TOKEN_AUTHORIZATION": "on",
        "DRAGOMAN_TORCHSERVE_MANAGEMENT_PORT": str(free_port()),
    }
    started = Cluster(tmp_path / "var", environment)
    started.run("migrate")
    yield started
    started.stop()


def keys_of(cluster):
    return json.loads((cluster.data_dir / "key_file.json").read_text())


def statuses(cluster, key):
    """The distinct statuses of a call over many connections."""
    port = cluster.settings()["DRAGOMAN_TORCHSERVE_GRPC_MANAGEMENT_PORT"]
    found = set()
    for _ in range(ATTEMPTS):
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(
                LIST, manage.ListModelsRequest.SerializeToString, manage.ManagementResponse.FromString
            )
            try:
                call(manage.ListModelsRequest(), timeout=60, metadata=(("authorization", f"Bearer {key}"),))
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)
    return found


def test_keys_of_several_processes(cluster):
    first, second = cluster.start_web(), cluster.start_web()
    keys = keys_of(cluster)
    assert statuses(cluster, keys["management"]["key"]) == {"OK"}
    assert statuses(cluster, keys["inference"]["key"]) == {"PERMISSION_DENIED"}
    answer = calls.get(
        f"http://127.0.0.1:{cluster.environment['DRAGOMAN_TORCHSERVE_MANAGEMENT_PORT']}/token?type=management",
        headers={"authorization": f"Bearer {keys['API']['key']}"},
    )
    assert answer.json() == keys_of(cluster)["management"] != keys["management"]
    assert statuses(cluster, keys["management"]["key"]) == {"PERMISSION_DENIED"}
    assert statuses(cluster, answer.json()["key"]) == {"OK"}
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, cluster.log
    assert statuses(cluster, answer.json()["key"]) == {"OK"}
    cluster.start_web()
    assert statuses(cluster, answer.json()["key"]) == {"OK"}
    second.kill()
    second.wait(60)
    last = cluster.processes[-1]
    last.send_signal(signal.SIGTERM)
    assert last.wait(60) == 0, cluster.log
    assert not list(cluster.data_dir.glob("*key_file*"))
    assert not any(entry["key"] in cluster.log for entry in (*keys.values(), answer.json()))
