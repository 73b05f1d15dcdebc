"""Addresses of workers: one form, and refusals that name what is wrong."""

from __future__ import annotations

import os

import pytest

from engine.address import AddressError, Channel, TcpAddress, UnixAddress, parse
from engine.client import EngineClient, EngineDead
from engine.config import EngineConfig
from tests.live import free_port


def test_a_unix_address_is_a_private_socket_and_leaves_nothing(tmp_path):
    path = tmp_path / "w.sock"
    address = parse(f"unix:{path}")
    assert address == UnixAddress(str(path))
    address.listen(Channel.REQUESTS).close()
    assert os.stat(path).st_mode & 0o077 == 0
    listener = address.listen(Channel.REQUESTS)  # what an earlier worker left there is no obstacle
    listener.close()
    address.release(Channel.REQUESTS)
    assert not path.exists()
    address.release(Channel.REQUESTS)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("udp://host:1", "'udp'"),
        ("tcp:host:1", "tcp://host:port"),
        ("tcp://host", "tcp://host:port"),
        ("tcp://host:0", "from 1 to 65535"),
        ("tcp://host:65536", "from 1 to 65535"),
        ("tcp://host:1/path", "tcp://host:port"),
        ("tcp://user@host:1", "tcp://host:port"),
        ("tcp://::1:1", "tcp://host:port"),
        ("/run/w.sock", "no address"),
        ("unix:", "no address"),
        ("", "no address"),
    ],
)
async def test_what_is_no_address_is_refused_by_name(address, text):
    with pytest.raises(AddressError, match=text):
        parse(address)
    if address:
        with pytest.raises(ValueError, match=text):
            EngineConfig(model="x", address=address)
    with pytest.raises(EngineDead, match=text):
        await EngineClient(address, "w", 1).connect()


@pytest.mark.parametrize(
    ("text", "host"), [("tcp://worker-1.example:21000", "worker-1.example"), ("tcp://[fd00::1]:21000", "fd00::1")]
)
def test_a_tcp_address_has_a_host_and_a_port(text, host):
    assert parse(text) == TcpAddress(host, 21000)
    assert str(parse(text)) == text


async def test_a_tcp_address_is_never_used_in_plain_text():
    """On loopback too: what to set is said where it is bound and where it is called."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(AddressError, match="CLUSTER_AUTHORITY, CLUSTER_CERTIFICATE and CLUSTER_KEY"):
        parse(address).endpoint(None)
    with pytest.raises(EngineDead, match="CLUSTER_AUTHORITY, CLUSTER_CERTIFICATE and CLUSTER_KEY"):
        await EngineClient(address, "w", 1).connect()
