"""Triton's and TorchServe's gRPC services. TorchServe's messages are those that the server's reflection describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from config.conformance import triton_messages
from config.conformance.session import PROMPT, TOKENS, Broken, Session, Skipped, require, same

if TYPE_CHECKING:
    from collections.abc import Iterator

TRITON_SERVICE = f"{triton_messages.PACKAGE}.{triton_messages.SERVICE}"
TORCHSERVE_SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
NOT_ALLOWED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class Service:
    """A service by its name, with the messages of a pool, or those that the server describes."""

    def __init__(self, session: Session, address: str, name: str, pool: DescriptorPool | None = None) -> None:
        """Raises Broken if the server does not describe it."""
        self._session, self._name = session, name
        self._channel = session.channel(address)
        try:
            described = pool or DescriptorPool(ProtoReflectionDescriptorDatabase(self._channel))
            self._methods = described.FindServiceByName(name).methods_by_name
        except KeyError as error:
            raise Broken(f"{address} does not describe {name}") from error
        except grpc.RpcError as error:
            raise Broken(f"{address}: {error.code().name}: {error.details()}") from error

    def request(self, method: str, **fields: Any) -> Any:
        """A message for a method."""
        return GetMessageClass(self._methods[method].input_type)(**fields)

    def call(self, method: str, request: Any) -> Any:
        """The answer to one message. Raises Broken or Skipped."""
        with _Statuses():
            return self._stub("unary_unary", method)(
                request, metadata=self._session.metadata, timeout=self._session.timeout_s
            )

    def stream(self, method: str, request: Any, *, stream_in: bool = False) -> list[Any]:
        """The answers of a stream. Raises Broken or Skipped."""

        def requests() -> Iterator[Any]:
            yield request

        kind = "stream_stream" if stream_in else "unary_stream"
        with _Statuses():
            return list(
                self._stub(kind, method)(
                    requests() if stream_in else request,
                    metadata=self._session.metadata,
                    timeout=self._session.timeout_s,
                )
            )

    def refusal(self, method: str, request: Any) -> grpc.StatusCode:
        """The status of a call that must be refused. Raises Broken if it is not."""
        try:
            self._stub("unary_unary", method)(request, metadata=self._session.metadata, timeout=self._session.timeout_s)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        raise Broken(f"{method} was not refused")

    def _stub(self, kind: str, method: str) -> Any:
        output = GetMessageClass(self._methods[method].output_type)
        return getattr(self._channel, kind)(
            f"/{self._name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=output.FromString,
        )


class _Statuses:
    """Turns statuses into the outcomes of a check."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, grpc.RpcError):
            if error.code() in NOT_ALLOWED:
                raise Skipped(f"{error.code().name}: the key may not call it") from error
            raise Broken(f"{error.code().name}: {error.details()}") from error


def _triton(session: Session) -> Service:
    return Service(session, session.addresses.triton_grpc, TRITON_SERVICE, triton_messages.pool())


def triton_ready(session: Session) -> None:
    """Health, and the model's metadata."""
    service = _triton(session)
    require(service.call("ServerLive", service.request("ServerLive")).live, "the server is not live")
    require(service.call("ModelReady", service.request("ModelReady", name=session.model)).ready, "not ready")
    metadata = service.call("ModelMetadata", service.request("ModelMetadata", name=session.model))
    require("text_input" in [each.name for each in metadata.inputs], "there is no input text_input")


def _triton_request(service: Service, session: Session, method: str) -> Any:
    request = service.request(method, model_name=session.model, id="one")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(PROMPT.encode())
    for name, value in (("max_tokens", TOKENS), ("temperature", 0)):
        request.parameters.add(key=name).value.int64_param = value
    return request


def _text(answer: Any) -> str:
    """The text of the first output: BYTES have a length of four bytes before them."""
    raw = answer.raw_output_contents
    return (raw[0][4:] if raw else answer.outputs[0].contents.bytes_contents[0]).decode()


def triton_infer(session: Session) -> None:
    """ModelInfer, and its stream, with the same text."""
    service = _triton(session)
    answer = service.call("ModelInfer", _triton_request(service, session, "ModelInfer"))
    same((answer.id, _text(answer)), ("one", session.expected), "the answer")
    answers = service.stream("ModelStreamInfer", _triton_request(service, session, "ModelStreamInfer"), stream_in=True)
    errors = [each.error_message for each in answers if each.error_message]
    require(not errors, f"the stream has errors: {errors}")
    texts = [_text(each.infer_response) for each in answers if each.infer_response.outputs]
    same("".join(texts), session.expected, "the streamed text")


def triton_refusals(session: Session) -> None:
    """An unknown model is refused."""
    service = _triton(session)
    request = service.request("ModelMetadata", name="there-is-no-such-model")
    code = service.refusal("ModelMetadata", request)
    require(code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT), f"the status is {code.name}")


def torchserve_ping(session: Session) -> None:
    """Ping."""
    service = Service(session, session.addresses.torchserve_grpc, TORCHSERVE_SERVICE)
    require("Healthy" in service.call("Ping", service.request("Ping")).health, "not healthy")


def torchserve_predictions(session: Session) -> None:
    """Predictions, and their stream, with the same text."""
    service = Service(session, session.addresses.torchserve_grpc, TORCHSERVE_SERVICE)
    values = {"data": PROMPT.encode(), "max_new_tokens": str(TOKENS).encode(), "temperature": b"0"}

    def request(method: str) -> Any:
        return service.request(method, model_name=session.model, input=values)

    whole = service.call("Predictions", request("Predictions")).prediction.decode()
    same(whole, session.expected, "the prediction")
    parts = service.stream("StreamPredictions", request("StreamPredictions"))
    same("".join(part.prediction.decode() for part in parts), session.expected, "the streamed prediction")


def torchserve_refusals(session: Session) -> None:
    """An unknown model is refused."""
    service = Service(session, session.addresses.torchserve_grpc, TORCHSERVE_SERVICE)
    request = service.request("Predictions", model_name="there-is-no-such-model", input={"data": b"a"})
    code = service.refusal("Predictions", request)
    require(code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL), f"the status is {code.name}")


TRITON = (triton_ready, triton_infer, triton_refusals)
TORCHSERVE = (torchserve_ping, torchserve_predictions, torchserve_refusals)
