"""Sockets of this machine: which addresses a server binds, who can reach its workers, and what garbage does to them."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import re
import socket
import stat
import struct
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Embed,
    Heartbeat,
    Hello,
    Outputs,
    Ready,
    Refused,
    Stats,
    Submit,
    frame,
    to_client,
)
from engine.sampling.params import SamplingParams
from tests import calls
from tests.live import LiveServer
from tests.management.admin_login import log_in
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("sockets") / "var").start()
    yield server
    assert server.stop() == 0, server.log


def everything(live: LiveServer) -> list[psutil.Process]:
    process = psutil.Process(live.process.pid)
    return [process, *process.children(recursive=True)]


def test_nothing_listens_beyond_loopback(live):
    listeners = [
        (process.name(), connection.laddr)
        for process in everything(live)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    ports = {address.port for _, address in listeners}
    assert {live.front_port, live.control_port, live.mindie_port, live.grpc_port, live.djl_port} <= ports
    addresses = [ipaddress.ip_address(address.ip) for _, address in listeners]
    assert all((getattr(each, "ipv4_mapped", None) or each).is_loopback for each in addresses), addresses


def worker_socket(live: LiveServer) -> Path:
    (worker,) = live.workers()
    paths = {connection.laddr for connection in worker.net_connections(kind="unix") if connection.laddr}
    (path,) = {Path(path) for path in paths if path.endswith(".sock")}
    return path


def test_only_this_user_reaches_the_workers(live):
    path = worker_socket(live)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_other_users_find_nothing_in_shared_memory_or_temporary_folders(live):
    pids = {str(process.pid) for process in everything(live)}
    for folder in ("/dev/shm", "/tmp"):
        for entry in Path(folder).iterdir():
            if "dragoman" in entry.name and any(pid in entry.name for pid in pids):
                assert entry.stat().st_mode & 0o077 == 0, entry


def test_workers_hold_no_secrets_and_cannot_dump_core(live):
    for process in everything(live):
        assert process.rlimit(psutil.RLIMIT_CORE)[0] == 0, process
    (worker,) = live.workers()
    assert not any(name.startswith("DRAGOMAN_") for name in worker.environ())


def greeting() -> bytes:
    return frame(Hello(PROTOCOL_VERSION, "demo/0", 1))


def garbage(seed: int) -> bytes:
    """Bytes of one kind or another: noise, lengths that lie, good messages in the wrong place, and damaged ones."""
    chance = random.Random(seed)
    good = [
        greeting(),
        frame(Submit(1, [1, 2], SamplingParams(max_tokens=1))),
        frame(Embed(1, [[1]], None, True)),
        frame(Abort([1])),
        frame(Heartbeat(Stats(), False)),
        frame(Outputs([], Stats())),
    ]
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 4000))
    if kind == 1:
        return struct.pack("<I", chance.choice([0, 1, 2**28, 2**31, 2**32 - 1])) + chance.randbytes(50)
    if kind == 2:
        return b"\x80\x04\x95" + b"cos\nsystem\n(S'touch /tmp/x'\ntR." * 10
    if kind == 3:
        return greeting() + b"".join(chance.choices(good, k=3))
    damaged = bytearray(greeting() + chance.choice(good[1:]))
    for _ in range(chance.randrange(1, 6)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged) if kind == 4 else greeting() + chance.choice(good)[: chance.randrange(1, 20)]


def test_garbage_does_no_harm_to_a_worker(live):
    """Two thousand connections with garbage; requests are answered as before, and memory does not grow."""
    ask = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    expected = live.post("/v1/completions", ask).json()["choices"]
    (worker,) = live.workers()
    path, before = str(worker_socket(live)), worker.memory_info().rss
    with socket.socket(socket.AF_UNIX) as known:  # the greeting is the right one
        known.connect(path)
        known.sendall(greeting())
        assert isinstance(to_client.decode(known.recv(1 << 16)[4:]), Ready)
    for seed in range(2000):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(60)
            stranger.connect(path)
            try:
                stranger.sendall(garbage(seed))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
            except ConnectionError:
                continue
        if seed % 400 == 0:
            assert live.post("/v1/completions", ask).json()["choices"] == expected
    assert live.post("/v1/completions", ask).json()["choices"] == expected
    assert [each.pid for each in live.workers()] == [worker.pid]
    grown = worker.memory_info().rss - before
    print(f"\na worker grew by {grown >> 10} kB over 2000 connections with garbage")
    assert grown < 30 << 20
    live.wait_idle()


@pytest.mark.parametrize("hello", [Hello(PROTOCOL_VERSION + 1, "demo/0", 1), Hello(PROTOCOL_VERSION - 1, "demo/0", 1)])
def test_another_version_of_the_protocol_is_refused(live, hello):
    """A web process of another version, during an upgrade: it is told why, and never answered wrongly."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(str(worker_socket(live)))
        stranger.sendall(frame(hello))
        received = b""
        while data := stranger.recv(1 << 16):
            received += data
    told = to_client.decode(received[4:])
    assert isinstance(told, Refused)
    assert live.get("/health").status_code == 200


def test_a_stranger_is_not_listened_to_for_long(live):
    """Before it has said who it is, a connection may send no more than a greeting: a length of megabytes is not waited for."""
    (worker,) = live.workers()
    before = worker.memory_info().rss
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(str(worker_socket(live)))
        announced = struct.pack("<I", 200 << 20)
        with pytest.raises(ConnectionError):
            stranger.sendall(announced + bytes(200 << 20))
    assert worker.memory_info().rss - before < 20 << 20


def say_much(page: ClientConnection) -> None:
    """Messages of 8 MiB, then whatever comes."""
    for _ in range(50):
        page.send("x" * (8 << 20))
    while True:
        page.recv(timeout=60)


def test_a_websocket_has_limits(live):
    """Messages of megabytes end it; who has not logged in gets none at all."""
    address = f"{live.admin_url.replace('http', 'ws')}/ws/status"
    with contextlib.closing(log_in(live.admin_url, live.data_dir)) as browser:
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        with connect(address, origin=live.admin_url, additional_headers={"cookie": cookie}, max_size=None) as page:
            assert "deployments" in page.recv(timeout=60)
            process = psutil.Process(live.process.pid)
            before = process.memory_info().rss
            with pytest.raises(ConnectionClosed):
                say_much(page)
            assert process.memory_info().rss - before < 60 << 20
        with connect(address, origin=live.admin_url, additional_headers={"cookie": cookie}) as page:
            for text in ("{", "[]", "null", '{"type": "websocket.disconnect"}', "\u0000"):
                page.send(text)
            assert "deployments" in page.recv(timeout=60)
    assert live.healthy()
    assert calls.get(f"{live.admin_url}/sg_inf/openapi.json", timeout=60).status_code == 200
    assert not re.search("Traceback", live.log)
    wait_until(lambda: live.get("/health").status_code == 200)
