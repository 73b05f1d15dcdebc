"""What only Ray can do: the machines that a worker is given, and who may attach."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("ray", reason="Ray is not installed: dragoman[ray]")

from engine.config import EngineConfig
from management.launchers.place import Place
from management.launchers.ray.launcher import RayLauncher
from tests.conftest import DEMO
from tests.launchers.test_contract import process_of, retried
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NOWHERE = {"market": "nowhere"}


@dataclasses.dataclass
class At:
    """Where a worker is."""

    address: str
    node: str
    labels: dict[str, str]


@pytest.fixture
def launcher(cluster, network):
    made = RayLauncher(network)
    yield made
    made.close()


@pytest.fixture
def launch(launcher):
    handles = []

    def start(number: int, *choices: dict[str, str], gpus: int = 0):
        config = EngineConfig(model=str(DEMO), worker_id="placed/0", epoch=number, lease_s=60.0, threads=1)
        handles.append(retried(lambda: launcher.launch(config, None, Place(choices, gpus))))
        return handles[-1]

    yield start
    for each in handles:
        if each.exit_code() is None:
            each.kill()
        each.release()


def placed(handle) -> At:
    found = []

    def arrived() -> bool:
        found.extend(each for each in handle.statuses() if each.address)
        return bool(found)

    wait_until(arrived, 90, handle.exit_code)
    return At(found[0].address, found[0].node, found[0].labels)


def test_labels_and_fallbacks_choose_the_machine(launch):
    at = placed(launch(1, NOWHERE, {"market": "onprem"}, {"market": "spot", "accelerator": "in(A10G,L4)"}))
    assert (at.node, at.labels["market"], at.labels["accelerator"]) == ("127.0.0.1", "spot", "L4")


def test_a_worker_gets_all_its_accelerators_on_one_machine_and_another_waits_for_them(launch):
    first = launch(2, {"market": "spot"}, gpus=2)
    at = placed(first)
    wait_until(lambda: listens(at), 90)
    assert process_of(at).environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
    second = launch(3, {"market": "spot"}, gpus=1)
    assert [each.doing for each in second.statuses()] == ["waiting for a machine"]
    first.kill()
    assert placed(second).labels["market"] == "spot"


def listens(at: At) -> bool:
    try:
        process_of(at)
    except AssertionError:
        return False
    return True


def test_a_worker_for_which_there_is_no_machine_waits_and_can_be_taken_back(launch, cluster):
    handle = launch(4, NOWHERE)
    other = launch(5, {"market": "spot"})  # is placed beside it
    placed(other)
    assert handle.exit_code() is None
    handle.drain()
    assert handle.exit_code() == 0
    names = "import os, ray; ray.init(address=os.environ['RAY_ADDRESS'], namespace='dragoman', log_to_driver=False, configure_logging=False); print('names', ray.util.list_named_actors())"  # fmt: skip
    wait_until(lambda: "placed/0/4" not in cluster.python(names), 60)
    assert "placed/0/5" in cluster.python(names)


def test_with_another_token_nobody_attaches(cluster, network, monkeypatch, capfd):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    stranger = RayLauncher(network)
    agent = stranger._agent
    wait_until(lambda: agent.poll() is not None, 90)
    assert agent.returncode == 1
    with pytest.raises(OSError, match="is not reached yet"):
        stranger.launch(EngineConfig(model="/m"), None, Place())
    assert "no connection to Ray" in capfd.readouterr().err
    stranger.close()
