"""How a process stops listening on a port that others serve too (SO_REUSEPORT), so that no connection is reset.

The kernel gives each such socket a queue of its own, and resets what is in it when the socket is closed. So the socket first
ignores new connections, with a packet filter, while its owner accepts what has come. A client whose SYN is ignored sends it
again a second later, and another process gets it. It never closes a socket.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

import psutil

SO_ATTACH_FILTER = 26
"""Linux's number of the option, which Python does not name."""
TCP_FLAGS_AT, SYN, ACK = 13, 0x02, 0x10
"""The offset of the flags in a TCP header, and two of the flags (RFC 9293)."""
LOAD_BYTE, AND, JUMP_IF_EQUAL, RETURN = 0x30, 0x54, 0x15, 0x06
"""Operations of the classic packet filter (linux/bpf_common.h)."""
KEEP_WHOLE = 0xFFFFFFFF
IGNORE_SYN = (
    (LOAD_BYTE, 0, 0, TCP_FLAGS_AT),
    (AND, 0, 0, SYN | ACK),
    (JUMP_IF_EQUAL, 0, 1, SYN),
    (RETURN, 0, 0, 0),
    (RETURN, 0, 0, KEEP_WHOLE),
)
"""Drops packets that ask for a connection, and keeps those of handshakes that have begun."""


def ignore_new_connections(port: int) -> bool:
    """Let the sockets of this process that listen on a TCP port ignore new connections; False if the system cannot."""
    try:
        listening = [
            connection.fd
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
        for descriptor in listening:
            with socket.socket(fileno=os.dup(descriptor)) as same:
                _attach(same)
    except (OSError, psutil.Error):  # another kernel than Linux, or a sandbox that hides /proc
        return False
    return bool(listening)


def _attach(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *operation) for operation in IGNORE_SYN))
    described = struct.pack("HP", len(IGNORE_SYN), ctypes.addressof(program))
    listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)
