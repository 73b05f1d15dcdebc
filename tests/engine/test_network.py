"""TCP between hosts: who may connect, peers that vanish without a word, and readers that are too slow."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
from pathlib import Path

import msgspec
import pytest

from config.cluster_certificates import make, revoke
from engine import client as client_module
from engine import server as server_module
from engine.address import Channel, parse
from engine.client import EngineClient, EngineDead
from engine.messages import PROTOCOL_VERSION, Hello, Submit, frame
from engine.network import door as door_module
from engine.network.credentials import Credentials, CredentialsError, ServerContext
from engine.sampling.params import SamplingParams
from tests.certificates import Authority, credentials, replace
from tests.engine.network import Endless, Swallower, connected, serving
from tests.waiting import eventually


@pytest.fixture
def authority():
    return Authority()


@pytest.fixture
def files(tmp_path, authority):
    return credentials(tmp_path, authority, authority.issue())


async def test_who_is_of_another_authority_expired_or_of_another_name_is_refused(tmp_path, authority, files):
    stranger, expired = Authority("stranger"), authority.issue(begin=-3, end=-1)
    shown = {
        "foreign": credentials(tmp_path, authority, stranger.issue()),
        "expired": credentials(tmp_path, authority, expired),
        "none that it trusts": credentials(tmp_path, stranger, authority.issue()),
    }
    async with serving(files) as address:
        for name, other in shown.items():
            with pytest.raises(EngineDead, match="cannot be reached"):
                async with connected(address, other):
                    pytest.fail(f"{name} was let in")
        async with connected(address, files) as client:
            assert client.usable
    async with serving(shown["expired"]) as address:
        with pytest.raises(EngineDead, match="certificate has expired"):
            await EngineClient(address, "w", 3, credentials=files).connect()
    async with serving(files, host="127.0.0.2") as address:  # which its certificate does not name
        with pytest.raises(EngineDead, match=r"certificate is not valid for '127\.0\.0\.2'"):
            await EngineClient(address, "w", 3, credentials=files).connect()


async def test_a_clients_certificate_makes_no_worker(tmp_path):
    """`cluster-certificates` gives hosts one to serve and to call with, and clients one to call with."""
    make(tmp_path / "made", ["127.0.0.1"])
    host, client = (
        Credentials(
            authority=str(tmp_path / "made" / "authority.pem"),
            certificate=str(tmp_path / "made" / f"{name}.pem"),
            key=str(tmp_path / "made" / f"{name}.key"),
        )
        for name in ("127.0.0.1", "client")
    )
    async with serving(host) as address:
        for files in (host, client):
            async with connected(address, files) as made:
                assert made.usable
    async with serving(client) as address:
        with pytest.raises(EngineDead, match="certificate"):
            await EngineClient(address, "w", 3, credentials=client).connect()


async def test_a_revoked_certificate_lets_nobody_in_and_serves_nobody(tmp_path):
    """The list is picked up by new connections, without a restart; running ones go on."""
    made = tmp_path / "made"
    make(made, ["127.0.0.1", "host-b"])
    host, other = (
        Credentials(
            authority=str(made / "authority.pem"),
            certificate=str(made / f"{name}.pem"),
            key=str(made / f"{name}.key"),
            revoked=str(made / "revocations.pem"),
        )
        for name in ("127.0.0.1", "host-b")
    )
    async with serving(host) as address, connected(address, other) as before:
        revoke(made, ["host-b"])
        with pytest.raises(EngineDead, match="cannot be reached"):
            async with connected(address, other):
                pytest.fail("it was let in")
        assert await asyncio.to_thread(heard, address, other) == b""
        async with connected(address, host) as client:
            assert client.usable
        assert before.usable
        revoke(made, ["127.0.0.1"])
        with pytest.raises(EngineDead, match="certificate revoked"):
            await EngineClient(address, "w", 3, credentials=other).connect()
        (made / "revocations.pem").write_bytes(b"")  # what is damaged changes nothing for a server
        with pytest.raises(EngineDead, match="no readable revocation list"):
            await EngineClient(address, "w", 3, credentials=host).connect()


async def test_a_revocation_list_that_is_out_of_date_lets_nobody_in(tmp_path, authority):
    files = msgspec.structs.replace(
        credentials(tmp_path, authority, authority.issue()), revoked=str(tmp_path / "crl.pem")
    )
    replace(tmp_path / "crl.pem", authority.revoke(begin=-3, end=-1))
    async with serving(files) as address:
        with pytest.raises(EngineDead, match="CRL has expired"):
            await EngineClient(address, "w", 3, credentials=files).connect()


def heard(address: str, files: Credentials) -> bytes:
    """What a worker says to another one that wants blocks."""
    with contextlib.suppress(OSError), parse(address).dial(10, files) as connection:
        connection.sendall(frame(Hello(1, "w", 3)))
        return connection.recv(1)
    return b""


def context_of(files: Credentials, *, shown: bool = True, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3):
    context = ssl.create_default_context(cafile=files.authority)
    context.maximum_version = newest
    if shown:
        context.load_cert_chain(files.certificate, files.key)
    return context


@pytest.mark.parametrize(
    "options", [{"shown": False}, {"newest": ssl.TLSVersion.TLSv1_2}, {}], ids=["no certificate", "TLS 1.2", "no ALPN"]
)
async def test_a_handshake_needs_a_certificate_tls_1_3_and_a_purpose(files, options):
    def say() -> bytes:
        plain = socket.create_connection((place.host, place.port), timeout=60)
        with context_of(files, **options).wrap_socket(plain, server_hostname="127.0.0.1") as stream:
            stream.sendall(frame(Hello(PROTOCOL_VERSION, "w", 3)))  # whom it lets in it answers
            return stream.recv(10)

    async with serving(files) as address:
        place = parse(address)
        try:
            said = await asyncio.to_thread(say)
        except TimeoutError:
            raise
        except OSError:
            said = b""
        assert said == b""
        async with connected(address, files) as client:
            assert client.usable


async def test_plain_text_and_silence_at_the_door_hold_up_nobody(files, monkeypatch):
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(door_module, "MAX_HANDSHAKES", 4)
    async with serving(files) as address:
        place = parse(address)

        def closed(said: bytes) -> bool:
            with (
                socket.create_connection((place.host, place.port), timeout=60) as stranger,
                contextlib.suppress(ConnectionError),
            ):
                stranger.sendall(said)
                while stranger.recv(1000):
                    pass
            return True

        said = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x0b\0\0\0\x94\xa5Hello", b"\x16\x03\x01\xff\xff", bytes(100_000)]
        assert all(await asyncio.gather(*(asyncio.to_thread(closed, each) for each in said * 3)))
        monkeypatch.setattr(door_module, "HANDSHAKE_S", 60.0)
        async with connected(address, files) as client:
            assert client.usable


async def test_those_who_only_hold_a_place_keep_nobody_out(files, monkeypatch):
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 60.0)
    monkeypatch.setattr(door_module, "MAX_HANDSHAKES", 4)
    async with serving(files) as address:
        place = parse(address)
        with contextlib.ExitStack() as held:
            silent = [held.enter_context(socket.create_connection((place.host, place.port))) for _ in range(12)]
            for _ in range(3):
                async with connected(address, files) as client:
                    assert client.usable
            for each in silent[:8]:  # the first ones have lost their place
                each.settimeout(60)
                assert each.recv(1) == b""


async def test_one_that_speaks_as_it_loses_its_place_does_not_end_the_door(files, monkeypatch):
    """The door finds both at once: another connection, whose place is the oldest one's, and what the oldest one says."""
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 60.0)
    monkeypatch.setattr(door_module, "MAX_HANDSHAKES", 2)
    busy, goes_on = threading.Event(), threading.Event()
    goes_on.set()
    current = ServerContext.current

    def slowly(self: ServerContext) -> ssl.SSLContext:
        busy.set()
        assert goes_on.wait(60)
        return current(self)

    monkeypatch.setattr(ServerContext, "current", slowly)
    async with serving(files) as address:
        place = parse(address)
        with contextlib.ExitStack() as held:

            def knock() -> socket.socket:
                return held.enter_context(socket.create_connection((place.host, place.port), timeout=60))

            def accepted() -> socket.socket:
                busy.clear()
                made = knock()
                assert busy.wait(60)
                return made

            held.callback(goes_on.set)
            await asyncio.to_thread(accepted)
            oldest = await asyncio.to_thread(accepted)
            goes_on.clear()
            await asyncio.to_thread(accepted)  # in place of the first one; the door looks at nothing else meanwhile
            knock()
            oldest.sendall(b"GET / HTTP/1.1\r\n\r\n")
            goes_on.set()
            async with connected(address, files) as client:
                assert client.usable


async def test_a_connection_that_cannot_be_taken_keeps_no_other_out(files, monkeypatch, caplog):
    current, failures = ServerContext.current, iter([MemoryError()])

    def failing(self: ServerContext) -> ssl.SSLContext:
        for failure in failures:
            raise failure
        return current(self)

    monkeypatch.setattr(ServerContext, "current", failing)
    async with serving(files) as address:
        place = parse(address)
        with socket.create_connection((place.host, place.port), timeout=60) as refused:
            assert await asyncio.to_thread(refused.recv, 1) == b""
        async with connected(address, files) as client:
            assert client.usable
    assert "MemoryError" in caplog.text


def test_a_stream_that_is_full_goes_on_where_it_was(files):
    """What TLS has not taken comes first in the next call, also if more has been added to it."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setblocking(False)
    server = files.server_context(["x"]).wrap_socket(ends[0], server_side=True, do_handshake_on_connect=False)
    client = files.client_context("x").wrap_socket(ends[1], server_hostname="127.0.0.1", do_handshake_on_connect=False)
    for _ in range(10):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert server.selected_alpn_protocol() == "x"
    chance, sent, unsent, received, full = random.Random(1), bytearray(), bytearray(), bytearray(), 0
    while len(received) < 2_000_000:
        if len(sent) < 2_000_000:
            added = chance.randbytes(chance.choice((1, 100, 5_000, 40_000)))
            sent += added
            unsent += added
        try:
            del unsent[: server.send(unsent)]
        except BlockingIOError:
            full += 1
        with contextlib.suppress(ssl.SSLWantReadError):
            received += client.recv(chance.choice((10, 10_000, 100_000)))
    assert bytes(received) == bytes(sent[: len(received)])
    assert full > 10
    server.close()
    client.close()


def test_a_key_that_others_may_read_and_files_that_do_not_fit_are_named(tmp_path, authority):
    issued = authority.issue()
    good = credentials(tmp_path, authority, issued)
    good.check()
    Path(good.key).chmod(0o640)
    with pytest.raises(CredentialsError, match="its mode is 0640"):
        good.check()
    Path(good.key).chmod(0o600)
    other = credentials(tmp_path, authority, authority.issue())
    for wrong in ({"key": other.key}, {"authority": "/nowhere.pem"}, {"certificate": good.key}, {"key": "/nowhere"}):
        with pytest.raises(CredentialsError):
            msgspec.structs.replace(good, **wrong).check()


async def test_an_encrypted_key_needs_its_password(tmp_path, authority):
    issued = authority.issue()
    plain = credentials(tmp_path, authority, issued)
    certificate, key = issued.write(tmp_path, "locked", b"secret")
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text("secret\n")
    locked = msgspec.structs.replace(plain, certificate=str(certificate), key=str(key))
    with pytest.raises(CredentialsError, match="no file with its password"):
        locked.check()
    async with (
        serving(msgspec.structs.replace(locked, password=str(password))) as address,
        connected(address, plain) as client,
    ):
        assert client.usable


async def test_a_replaced_certificate_is_shown_to_the_next_client(tmp_path, authority):
    """A worker may run for longer than its certificate lasts."""
    old, new = authority.issue(), authority.issue()
    files = credentials(tmp_path, authority, old)

    async def serial(address: str) -> int:
        _, writer = await parse(address).connect(Channel.REQUESTS, files)
        shown = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return int(shown, 16)

    async with serving(files) as address:
        assert await serial(address) == old.serial
        new.write(Path(files.key).parent, Path(files.key).stem)
        assert await serial(address) == new.serial
        replace(Path(files.certificate), b"no certificate")
        with pytest.raises(CredentialsError):
            files.check()
        good = credentials(tmp_path, authority, authority.issue())
        async with connected(address, good) as client:  # the earlier one stays in use
            assert client.usable


async def test_a_link_that_swallows_everything_is_noticed_on_both_sides(files, monkeypatch):
    """Neither side hears of it from TCP. A connection on which nothing happens otherwise stays."""
    monkeypatch.setattr(client_module, "TICK_S", 0.1)
    monkeypatch.setattr(client_module, "VANISHED_AFTER_S", 2.0)
    monkeypatch.setattr(server_module, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(server_module, "CLIENT_SILENT_BEATS", 20)
    core = Endless()
    async with serving(files, core) as address, Swallower(address) as between:
        async with connected(f"tcp://127.0.0.1:{between.port}", files) as client:
            for _ in range(30):  # both deadlines pass without a request
                await asyncio.sleep(0.1)
            assert client.usable
            outputs = client.generate([1], SamplingParams(max_tokens=9))
            assert (await anext(outputs)).token_ids
            assert core.has_work
            between.swallows = True
            with pytest.raises(EngineDead, match="no heartbeat"):
                async for _ in outputs:
                    pass
            assert not client.usable
            await eventually(lambda: not core.has_work)  # its request is not computed further
        async with connected(address, files) as client:
            assert client.usable


async def test_a_client_that_reads_too_slowly_does_not_fill_the_workers_memory(files, monkeypatch):
    """It reads all the time, so it does not count as one that has stopped; its outputs come faster."""
    monkeypatch.setattr(server_module, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(server_module, "CLIENT_SILENT_BEATS", 1000)
    core = Endless(output_bytes=1 << 18)
    async with serving(files, core) as address, connected(address, files) as other:
        place = parse(address)
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect((place.host, place.port))
        context = files.client_context(Channel.REQUESTS)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as slow:
            slow.settimeout(60)
            slow.sendall(frame(Hello(PROTOCOL_VERSION, "w", 3)) + frame(Submit(1, [1], SamplingParams(max_tokens=9))))
            await eventually(lambda: core.has_work)

            def sip() -> None:
                with contextlib.suppress(OSError):
                    while slow.recv(100):
                        threading.Event().wait(0.01)

            reading = asyncio.ensure_future(asyncio.to_thread(sip))
            await eventually(lambda: not core.has_work)
            plain.close()
            slow.close()
            await reading
        assert other.usable
