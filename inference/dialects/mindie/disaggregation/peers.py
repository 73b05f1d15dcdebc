"""Calls to other instances: one gRPC channel for each, with mutual TLS if there are files for it. It serves nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.protobuf import empty_pb2

from inference.dialects.mindie.protocol import prefill_and_decode_pb2 as pb
from inference.server.rotation import ServerTls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inference.server.tls import TlsFiles

PACKAGE = "prefillAndDecodeCommunication"
DECODE = f"/{PACKAGE}.DecodeService/DecodeRequestChannel"
RELEASE = f"/{PACKAGE}.PrefillService/ReleaseKVCacheChannel"
CALL_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0
logger = structlog.get_logger(__name__)


class PeerError(Exception):
    """A call to another instance failed; `code` is gRPC's number of its status."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Peers:
    """Other instances by their address."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        """Without `files` nothing is encrypted. Raises TlsError."""
        self._tls = None if files is None else ServerTls(files)
        self._credentials = None if self._tls is None else self._tls.channel_credentials()
        self._channels: dict[tuple[str, int], Any] = {}

    async def decode(self, host: str, port: int, parameters: Any, metadata: Mapping[str, str]) -> None:
        """Hand a request over; raises PeerError where the instance cannot be reached or does not take it."""
        answer = await self._call(host, port, DECODE, parameters, pb.DecodeRequestResponse, metadata, CALL_TIMEOUT_S)
        if not answer.isValidDecodeParameters:
            raise PeerError(grpc.StatusCode.INVALID_ARGUMENT.value[0], answer.errorMessage)

    async def release(self, host: str, port: int, request_id: str) -> None:
        """Say that a request's KV blocks are not needed any more; raises PeerError."""
        await self._call(host, port, RELEASE, pb.RequestId(reqId=request_id), empty_pb2.Empty, {}, CALL_TIMEOUT_S)

    async def probe(self, host: str, port: int) -> int:
        """0 if the instance answers, else gRPC's number of the failure. It asks for the release of nothing."""
        try:
            await self._call(host, port, RELEASE, pb.RequestId(), empty_pb2.Empty, {}, PROBE_TIMEOUT_S)
        except PeerError as error:
            return error.code
        return 0

    async def refresh(self) -> None:
        """Use changed TLS files for new channels."""
        if self._tls is None:
            return
        await asyncio.to_thread(self._tls.reload)
        current = self._tls.channel_credentials()
        if current is not self._credentials:
            self._credentials = current
            await self.close()

    async def close(self) -> None:
        """Close all channels; running calls end first."""
        await self.keep(())

    async def keep(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Close the channels of all other addresses; running calls end first."""
        closing = [self._channels.pop(address) for address in self._channels.keys() - set(addresses)]
        await asyncio.gather(*(channel.close(CALL_TIMEOUT_S) for channel in closing))

    async def _call(
        self,
        host: str,
        port: int,
        method: str,
        message: Any,
        answer: Any,
        metadata: Mapping[str, str],
        timeout_s: float,
    ) -> Any:
        call = self._channel(host, port).unary_unary(
            method, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer.FromString
        )
        try:
            # The time is not told: the instance would end the request with it, which outlives this call.
            async with asyncio.timeout(timeout_s):
                return await call(message, metadata=tuple(metadata.items()))
        except TimeoutError as error:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise PeerError(code.value[0], "the instance did not answer in time") from error
        except grpc.aio.AioRpcError as error:
            logger.warning("call to another instance failed", method=method, code=error.code().name)
            raise PeerError(error.code().value[0], error.details() or error.code().name) from error

    def _channel(self, host: str, port: int) -> Any:
        channel = self._channels.get((host, port))
        if channel is None:
            options = [("grpc.max_receive_message_length", 1 << 20), ("grpc.max_send_message_length", -1),
                       ("grpc.enable_retries", 0), ("grpc.max_reconnect_backoff_ms", 2000)]  # fmt: skip
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(f"{host}:{port}", options)
            else:
                channel = grpc.aio.secure_channel(f"{host}:{port}", self._credentials, options)
            self._channels[host, port] = channel
        return channel
