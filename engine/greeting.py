"""The beginning of a connection to a worker, as its client sees it: address, handshake, greetings. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from engine import messages
from engine.address import AddressError, Channel, cause_of, parse
from engine.messages import MALFORMED, PROTOCOL_VERSION, Hello, Ready, Refused, frame, version_of
from engine.network.credentials import CredentialsError

if TYPE_CHECKING:
    from engine.network.credentials import Credentials

CONNECT_TIMEOUT_S = 5.0


class NotGreeted(Exception):
    """There is no connection to the expected worker; the message says why, for a person."""


async def greet(
    address: str, hello: Hello, credentials: Credentials | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Ready]:
    """Connect, and exchange greetings; raises NotGreeted, and leaves nothing behind."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await parse(address).connect(Channel.REQUESTS, credentials)
            writer.write(frame(hello))
            greeting = await read_frame(reader)
            # Of another version only that is known.
            version = version_of(greeting)
            answer = messages.to_client.decode(greeting) if version == PROTOCOL_VERSION else None
        if isinstance(answer, Ready):
            made, writer = writer, None
            return reader, made, answer
        raise NotGreeted(_refusal(answer, version))
    except (OSError, AddressError, CredentialsError, asyncio.IncompleteReadError, *MALFORMED) as error:
        raise NotGreeted(f"the worker at {address} cannot be reached: {cause_of(error)}") from error
    finally:
        if writer is not None:
            writer.transport.abort()  # TLS would wait for the peer's farewell, and nothing is left to say
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame. Raises OSError, IncompleteReadError or one of MALFORMED."""
    return await reader.readexactly(messages.frame_length(await reader.readexactly(4)))


def _refusal(answer: messages.ToClient | None, version: int) -> str:
    if answer is None:
        return f"the worker speaks version {version} of the protocol, this process {PROTOCOL_VERSION}"
    if not isinstance(answer, Refused):
        return "the worker did not greet"
    return f"this is protocol, worker, epoch {(answer.protocol, answer.worker_id, answer.epoch)}"
