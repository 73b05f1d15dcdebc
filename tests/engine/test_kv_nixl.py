"""NIXL alone: when it is refused, what its agents do with memory, and transfers that end in the middle of a read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import msgspec
import pytest

from engine.address import parse
from engine.config import EngineConfig
from engine.kv_transfer import nixl_agent, wire
from engine.kv_transfer.handle import TransferCode, new_transfer_id
from engine.kv_transfer.messages import Pull
from engine.kv_transfer.transports import transport_for
from engine.kv_transfer.wire import Declined
from engine.messages import PROTOCOL_VERSION, frame
from engine.models.files import ModelError
from tests.conftest import ROOT
from tests.engine.pairs import idle
from tests.engine.test_kv_faults import PROMPT, ends_as_alone, held
from tests.engine.test_kv_transfer import make

ASKED = {"model": "m", "kv_transport": "nixl"}
DEVICES = pytest.mark.parametrize("devices", ["", "lo"])
"""Shared memory, and TCP of a named device."""
COUNT = 3 << 20


def test_it_is_refused_beyond_one_host_without_a_named_device():
    config = EngineConfig(**ASKED, address="tcp://127.0.0.1:2000")
    with pytest.raises(ModelError, match=r"does not encrypt.*NIXL_DEVICES"):
        transport_for(config)


def test_it_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ModelError, match=r"install dragoman\[nixl\]"):
        transport_for(EngineConfig(**ASKED))


def test_a_device_that_is_not_there_is_refused():
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    with pytest.raises(ModelError, match="cannot use none0"):
        transport_for(EngineConfig(**ASKED, address="tcp://127.0.0.1:2000", nixl_devices="none0"))


def test_workers_with_different_transports_compute_the_prompt(tmp_path):
    """The sender says why; a receiver of an earlier release, which names no transport, means sockets."""
    prefill, door = make(tmp_path, "p")
    decode, other = make(tmp_path, "d")
    first, source = held(prefill, salt="other")
    decode.engine.transfers._transport.name = "another"
    ends_as_alone((prefill, decode), first, source, TransferCode.FOREIGN_TRANSPORT, salt="other")
    hold = prefill.engine.transfers.holds.find(source.transfer_id)
    pull = Pull(PROTOCOL_VERSION, "p", 1, source.transfer_id, hold.identity, source.num_tokens, 0, "nixl")
    with parse(source.address).dial(5.0, None) as connection:
        connection.sendall(frame(pull))
        body = wire.receive(connection, 100)
    assert msgspec.msgpack.decode(body, type=Declined).code is TransferCode.FOREIGN_TRANSPORT
    prefill.engine.transfers.release([source.transfer_id])
    for driver, each in ((prefill, door), (decode, other)):
        idle(driver.engine)
        driver.engine.close()
        each.close()


SENDER = f"""
import sys
from engine.kv_transfer.nixl_agent import Agent
agent = Agent(sys.argv[1])
with agent.slab({COUNT}) as slab:
    slab.data[:] = 7
    print(slab.address, slab.description.hex(), flush=True)
    while True:
        agent.progress()
"""


class Sender:
    """A process with an agent, and a connection that ends with it."""

    def __init__(self, devices: str) -> None:
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-c", SENDER, devices]
        os.set_inheritable(theirs.fileno(), True)
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, close_fds=False, env={**os.environ, "UCX_TLS": "tcp"}
        )
        theirs.close()
        address, description = self.process.stdout.readline().split()
        self.address, self.description = int(address), bytes.fromhex(description)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.connection.close()


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch):
    """UCX would find that both processes are on one host."""
    monkeypatch.setattr(nixl_agent, "NETWORK", "tcp")


@pytest.fixture
def sender(devices):
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    sender = Sender(devices)
    yield sender
    sender.end()


@pytest.fixture
def agent(devices):
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    return nixl_agent.Agent(devices)


@DEVICES
def test_it_reads_what_was_registered_and_nothing_else(sender, agent):
    with agent.slab(COUNT) as slab, agent.peer(sender.description) as peer:
        for count in (1, 4096, COUNT):
            slab.data[:] = 0
            agent.read(sender.connection, peer, sender.address, slab, count)
            assert (slab.data[:count] == 7).all()
            assert not slab.data[count:].any()
        with pytest.raises(OSError, match="NIXL"):
            agent.read(sender.connection, peer, sender.address + COUNT, slab, 1)
        assert not agent.broken
    with agent.slab(COUNT) as again:
        assert again is slab
    assert not agent._peers


@DEVICES
def test_descriptions_that_are_none(agent):
    with agent.slab(10) as slab:
        for text in (b"", b"x", slab.description[:-20]):
            with pytest.raises(OSError, match="NIXL"), agent.peer(text):
                pass


@DEVICES
def test_a_peer_that_ends_while_it_is_read(sender, agent):
    """The read ends, and no other one uses the memory into which the lost one may still write."""
    with agent.slab(COUNT) as slab, agent.peer(sender.description) as peer:
        agent.read(sender.connection, peer, sender.address, slab, COUNT)
        sender.process.send_signal(signal.SIGSTOP)
        sender.process.kill()
        sender.process.wait()
        with pytest.raises(OSError, match=r"NIXL|hung up"):
            agent.read(sender.connection, peer, sender.address, slab, COUNT)
    if agent.broken:
        with agent.slab(COUNT) as other:
            assert other is not slab


def test_a_peer_that_stops_while_it_is_read(monkeypatch):
    """Over TCP somebody must answer. The transport then takes another agent."""
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    nixl = transport_for(EngineConfig(**ASKED, address="tcp://127.0.0.1:2000", nixl_devices="lo"))
    monkeypatch.setattr(wire, "STALL_S", 0.5)
    agent, sender = nixl._usable(), Sender("lo")
    with agent.slab(COUNT) as slab, agent.peer(sender.description) as peer:
        agent.read(sender.connection, peer, sender.address, slab, COUNT)
        sender.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            agent.read(sender.connection, peer, sender.address, slab, COUNT)
    assert agent.broken
    assert nixl._usable() is not agent
    sender.end()


@pytest.mark.parametrize("change", ["window", "lost"])
def test_memory_that_changes_or_goes_between_two_pieces(tmp_path, monkeypatch, change):
    """Bytes are read that are not those of the digest; or the sender ends its hold."""
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    monkeypatch.setattr(wire, "PIECE_BYTES", 1)
    prefill, door = make(tmp_path, "p", kv_transport="nixl")
    decode, other = make(tmp_path, "d", kv_transport="nixl")
    first, source = held(prefill, salt=change)
    agent = decode.engine.transfers._transport._usable()
    read, reads = type(agent).read, []

    def changed(self, connection, peer, address, into, count):
        reads.append(address)
        read(self, connection, peer, address, into, count)
        if len(reads) == 4 and change == "window":
            into.data[count // 2] ^= 1
        elif len(reads) == 4:
            prefill.engine.transfers.holds.find(source.transfer_id).end()

    monkeypatch.setattr(type(agent), "read", changed)
    expected = TransferCode.DAMAGED if change == "window" else TransferCode.LOST
    ends_as_alone((prefill, decode), first, source, expected, salt=change)
    assert len(set(reads)) == 3, "the places of the window are used again"
    monkeypatch.undo()
    prefill.engine.transfers.release([source.transfer_id])
    for driver, each in ((prefill, door), (decode, other)):
        idle(driver.engine)
        driver.engine.close()
        each.close()


def test_many_transfers_at_once(tmp_path):
    """They share two agents, and none gets another one's bytes."""
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    prefill, door = make(tmp_path, "p", kv_transport="nixl", max_num_seqs=32)
    decode, other = make(tmp_path, "d", kv_transport="nixl", max_num_seqs=32)
    asked = [[*PROMPT[: 40 + i], i + 5] for i in range(12)]
    whole = [prefill.alone(prompt, salt="alone")[0] for prompt in asked]
    for i, prompt in enumerate(asked):
        prefill.ask(prompt, hold=new_transfer_id(), request_id=i, salt="x")
    prefill.run()
    for i, prompt in enumerate(asked):
        first, _, end = prefill.whole(i)
        decode.ask(prompt, generated=first, source=end.source, request_id=i, salt="x")
        whole[i] = whole[i][len(first) :]
    decode.run()
    assert [decode.tokens(i) for i in range(len(asked))] == whole
    assert not decode.engine.transfers.failures
    assert not decode.engine.transfers._transport._usable()._peers
    for driver, each in ((prefill, door), (decode, other)):
        idle(driver.engine)
        driver.engine.close()
        each.close()


def test_it_says_nothing():
    """A worker's stdout is for its launcher, also when something fails."""
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    code = (
        "from engine.kv_transfer.nixl_agent import Agent, AgentError\n"
        "try: Agent('none0')\n"
        "except AgentError: pass\n"
        "agent = Agent('lo')\n"
        "with agent.slab(100): agent.progress()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout == ""
