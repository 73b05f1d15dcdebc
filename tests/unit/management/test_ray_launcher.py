"""The launcher `ray` beside an agent that says what the test tells it to: what the reconciler sees of a cluster, without Ray."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from engine.config import EngineConfig
from engine.failures import ExitStatus
from engine.process import control as control_module
from management.launchers import LAUNCHERS
from management.launchers.base import LauncherError
from management.launchers.network import Network
from management.launchers.place import Place
from management.launchers.ray import launcher as launcher_module
from management.launchers.ray.launcher import RayLauncher
from management.launchers.ray.messages import Attached, Begin, End, Ended, Hold, Leaves, Placed, ToAgent
from tests.certificates import Authority, credentials
from tests.conftest import ROOT
from tests.live import OWN_PORTS
from tests.unit.management.test_remote_workers import Worker
from tests.waiting import wait_until

AGENT = """
import os, select, sys
commands, replies = open(sys.argv[1], "ab", buffering=0), os.open(sys.argv[2], os.O_RDONLY)
while True:
    for descriptor in select.select([0, replies], [], [])[0]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            sys.exit(1)
        os.write(1, data) if descriptor == replies else commands.write(data)
"""
"""Passes what the test writes to the launcher, and notes what the launcher writes; EOF on either side ends it."""
NAMES = ("RAY_AUTH_MODE", "RAY_ADDRESS")


@pytest.fixture
def network(tmp_path):
    authority = Authority()
    return Network("127.0.0.1", OWN_PORTS, credentials(tmp_path, authority, authority.issue()))


@pytest.fixture
def settings(monkeypatch):
    for name, value in zip(NAMES, ("token", "head:6379"), strict=True):
        monkeypatch.setenv(name, value)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "ray" else found(name))


class Agent:
    """The test's end of the agent."""

    def __init__(self, folder, monkeypatch) -> None:
        self.commands, self.replies = folder / "commands", folder / "replies"
        os.mkfifo(self.replies)
        command = (sys.executable, "-S", "-c", AGENT, str(self.commands), str(self.replies))
        monkeypatch.setattr(launcher_module, "COMMAND", command)
        monkeypatch.setattr(launcher_module, "PAUSE_S", 0.1)

    def connect(self) -> None:
        """Wait for the process."""
        self._pipe = self.replies.open("wb", buffering=0)

    def say(self, message: object) -> None:
        self._pipe.write(msgspec.json.encode(message) + b"\n")

    def end(self) -> None:
        self._pipe.close()

    def heard(self) -> list[Begin | Hold | End]:
        lines = self.commands.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=ToAgent) for line in lines]


@pytest.fixture
def agent(tmp_path, monkeypatch):
    return Agent(tmp_path, monkeypatch)


@pytest.fixture
def launcher(settings, agent, network):
    made = RayLauncher(network)
    agent.connect()
    yield made
    made.close()
    agent.end()


CONFIG = EngineConfig(model="/m", worker_id="demo/0", epoch=7, lease_s=30.0, threads=3)
NAME = "demo/0/7"
PLACE = Place(({"market": "spot"}, {"market": "ondemand"}), gpus=2)


def launched(launcher, agent, secrets=None):
    agent.say(Attached())
    wait_until(lambda: launcher.hear() or launcher._attached)
    handle = launcher.launch(CONFIG, secrets, PLACE)
    wait_until(lambda: len(agent.heard()) == 1)
    return handle


def heard_by(handle, wanted):
    """Statuses until one fulfils the condition; returns that."""
    found = []

    def arrived() -> bool:
        found.extend(each for each in handle.statuses() if wanted(each))
        return bool(found)

    wait_until(arrived)
    return found[0]


def test_what_is_missing_is_named_at_the_start(settings, network, monkeypatch, tmp_path):
    with pytest.raises(LauncherError, match="needs `reconcile`"):
        LAUNCHERS["ray"](None, network)
    with pytest.raises(LauncherError, match="CLUSTER_AUTHORITY, CLUSTER_CERTIFICATE and CLUSTER_KEY"):
        LAUNCHERS["ray"](tmp_path, Network())
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(LauncherError, match="RAY_ADDRESS, host:port"):
        RayLauncher(network)
    for mode in ("disabled", ""):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(LauncherError, match="RAY_AUTH_MODE=token"):
            RayLauncher(network)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LauncherError, match=r"install dragoman\[ray\]"):
        RayLauncher(network)


def test_the_reconciler_imports_no_ray():
    program = "import sys, management.launchers.ray.launcher; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_nothing_is_launched_before_ray_is_reached_or_where_no_machine_is_allowed(launcher, agent):
    with pytest.raises(OSError, match="head:6379 is not reached yet"):
        launcher.launch(CONFIG, None, PLACE)
    agent.say(Attached())
    wait_until(lambda: launcher.hear() or launcher._attached)
    with pytest.raises(OSError, match="no kind of machine is allowed"):
        launcher.launch(CONFIG, None, Place(()))
    assert not agent.commands.exists() or agent.heard() == []


def test_a_worker_is_asked_for_placed_held_and_ends(launcher, agent, network, monkeypatch):
    handle = launched(launcher, agent, {"HF_TOKEN": "hf_x"})
    (begin,) = agent.heard()
    assert (begin.name, begin.place, begin.secrets) == (NAME, PLACE, {"HF_TOKEN": "hf_x"})
    assert (begin.first_port, begin.last_port) == (OWN_PORTS[0], OWN_PORTS[-1])
    assert (begin.config.tls, begin.config.threads, begin.config.lease_s) == (network.credentials, 3, 30.0)
    assert [each.doing for each in handle.statuses()] == ["waiting for a machine"]
    assert handle.exit_code() is None
    worker = Worker(network.address(), network.credentials, monkeypatch)
    agent.say(Placed(NAME, worker.address, "host-a", {"market": "spot"}))
    placed = heard_by(handle, lambda each: each.address)
    assert (placed.state, placed.address, placed.node, placed.labels) == (
        "loading",
        worker.address,
        "host-a",
        {"market": "spot"},
    )
    worker.report("ready")
    heard_by(handle, lambda each: each.state == "ready")
    agent.say(Leaves(NAME, 25.0))
    assert heard_by(handle, lambda each: each.leaves_in_s is not None).leaves_in_s == 25.0
    handle.renew(5)
    handle.drain()
    wait_until(lambda: worker.signals == [signal.SIGTERM])
    worker.report("exited", reason="stopped")
    heard_by(handle, lambda each: each.state == "exited")
    agent.say(Ended(NAME, 0))
    worker.close()
    wait_until(lambda: handle.exit_code() == ExitStatus.STOPPED)
    handle.release()


def test_a_worker_that_does_not_listen_yet_is_not_taken_for_dead(launcher, agent, network, monkeypatch):
    handle = launched(launcher, agent)
    address = network.address()
    agent.say(Placed(NAME, address, "host-a", {}))
    heard_by(handle, lambda each: each.address)
    wait_until(lambda: handle._remote._link.refused)
    assert handle.exit_code() is None
    worker = Worker(address, network.credentials, monkeypatch)
    worker.report("loading")
    heard_by(handle, lambda each: each.state == "loading" and not each.address)
    worker.close()
    wait_until(lambda: handle.exit_code() == -signal.SIGKILL)
    handle.release()


def test_a_machine_that_is_lost_ends_its_worker_and_says_so(launcher, agent, network):
    handle = launched(launcher, agent)
    agent.say(Placed(NAME, network.address(), "host-a", {}))
    agent.say(Ended(NAME, -9, "Ray: the node died"))
    wait_until(lambda: handle.exit_code() == -signal.SIGKILL)
    assert heard_by(handle, lambda each: each.state == "failed").reason == "Ray: the node died"
    handle.release()


def test_what_waits_for_a_machine_is_taken_back(launcher, agent):
    handle = launched(launcher, agent)
    handle.drain()
    assert handle.exit_code() == ExitStatus.STOPPED
    wait_until(lambda: agent.heard()[1:] == [End(NAME)])
    handle.release()


def test_a_killed_worker_is_ended_by_ray_too(launcher, agent, network, monkeypatch):
    handle = launched(launcher, agent)
    worker = Worker(network.address(), network.credentials, monkeypatch)
    agent.say(Placed(NAME, worker.address, "host-a", {}))
    worker.report("ready")
    heard_by(handle, lambda each: each.state == "ready")
    handle.renew(5)
    handle.kill()
    assert handle.exit_code() == -signal.SIGKILL
    wait_until(lambda: worker.signals == [signal.SIGKILL])
    wait_until(lambda: agent.heard()[1:] == [End(NAME)])
    worker.close()
    handle.release()


def test_without_an_agent_workers_go_on_and_another_agent_is_started(launcher, agent, network, monkeypatch):
    """As when Ray's head is away: who runs is held on, who waited is given up, and the next launch waits for the head."""
    monkeypatch.setattr(control_module, "LAUNCHER_SILENT_S", 60.0)
    runs = launched(launcher, agent)
    worker = Worker(network.address(), network.credentials, monkeypatch)
    agent.say(Placed(NAME, worker.address, "host-a", {}))
    worker.report("ready")
    heard_by(runs, lambda each: each.state == "ready")
    waits = launcher.launch(msgspec.structs.replace(CONFIG, epoch=8), None, PLACE)
    agent.end()
    wait_until(lambda: waits.exit_code() == ExitStatus.FAULT)
    assert "Ray's head was lost" in heard_by(waits, lambda each: each.state == "failed").reason
    assert runs.exit_code() is None
    with pytest.raises(OSError, match="not reached yet"):
        launcher.launch(CONFIG, None, PLACE)
    worker.report("alive")
    heard_by(runs, lambda each: each.state == "alive")
    wait_until(lambda: launcher.hear() or launcher._agent is not None)
    agent.connect()
    agent.say(Attached())
    wait_until(lambda: launcher.hear() or Hold(NAME) in agent.heard())
    agent.say(Leaves(NAME, 25.0))
    heard_by(runs, lambda each: each.leaves_in_s == 25.0)
    worker.close()
    wait_until(lambda: runs.exit_code() == -signal.SIGKILL)
    for each in (runs, waits):
        each.release()


def test_workers_are_taken_over_without_ray(launcher, agent, network, monkeypatch):
    assert launcher.adopt("", "demo/0/1") is None
    assert launcher.adopt(network.address(), "demo/0/1") is None
    worker = Worker(network.address(), network.credentials, monkeypatch)
    handle = launcher.adopt(worker.address, "demo/0/1")
    worker.report("ready")
    heard_by(handle, lambda each: each.state == "ready")
    agent.say(Attached())  # later, it is watched by Ray too
    wait_until(lambda: launcher.hear() or (agent.commands.exists() and agent.heard() == [Hold("demo/0/1")]))
    agent.say(Ended("demo/0/1", 4))
    worker.close()
    wait_until(lambda: handle.exit_code() == 4)
    handle.release()
