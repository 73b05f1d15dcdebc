"""Addresses of workers: one form, and refusals that name what is wrong."""

from __future__ import annotations

import os

import pytest

from engine.address import AddressError, UnixAddress, parse
from engine.client import EngineClient, EngineDead
from engine.config import EngineConfig


def test_a_unix_address_is_a_private_socket_and_leaves_nothing(tmp_path):
    path = tmp_path / "w.sock"
    address = parse(f"unix:{path}")
    assert address == UnixAddress(str(path))
    address.listen().close()
    assert os.stat(path).st_mode & 0o077 == 0
    listener = address.listen()  # what an earlier worker left there is no obstacle
    listener.close()
    address.release()
    assert not path.exists()
    address.release()


@pytest.mark.parametrize(
    ("address", "text"),
    [("tcp:host:1", "'tcp'"), ("/run/w.sock", "no address"), ("unix:", "no address"), ("", "no address")],
)
async def test_what_is_no_address_is_refused_by_name(address, text):
    with pytest.raises(AddressError, match=text):
        parse(address)
    if address:
        with pytest.raises(ValueError, match=text):
            EngineConfig(model="x", address=address)
    with pytest.raises(EngineDead, match="AddressError"):
        await EngineClient(address, "w", 1).connect()
