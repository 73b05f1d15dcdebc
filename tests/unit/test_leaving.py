"""A socket that ignores new connections keeps those that it has."""

from __future__ import annotations

import socket

import pytest

from inference.server.leaving import ignore_new_connections


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_new_connections_are_ignored_and_earlier_ones_served(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        address = listening.getsockname()[:2]
        with socket.create_connection(address) as accepted_later:
            assert ignore_new_connections(address[1])
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.2)
            with listening.accept()[0] as served:
                accepted_later.sendall(b"asked")
                assert served.recv(5) == b"asked"
                served.sendall(b"told")
                assert accepted_later.recv(4) == b"told"


def test_a_port_that_nobody_listens_on_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert not ignore_new_connections(port)
