"""POST .../infer over HTTP: JSON, with tensors inside it or as binary data after it, in both directions."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.triton.embed import embed, embeds
from inference.dialects.triton.infer import Inference, prepare
from inference.dialects.triton.model import find
from inference.dialects.triton.shared_memory import check_tensor
from inference.dialects.triton.tensors import Tensor, from_bytes, from_json, to_bytes
from inference.errors import InvalidRequest, MalformedBody, NotServed
from inference.http.exchange import Response, parse_json
from inference.http.offload import encoded, in_thread

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

LENGTH = "inference-header-content-length"
MAX_DIGITS = 20
WBITS = {"gzip": 31, "deflate": 47}


async def infer(exchange: Exchange, services: Services) -> None:
    """Handle POST .../infer."""
    with services.admission.permit(exchange.permit_holder):
        path = exchange.parameters
        find(services.router, path["model"], path.get("version", ""))  # an unknown model is said before a wrong body
        request, raw = await _split(exchange, services.limits.max_body_bytes)
        inference, binary = await exchange.work(_parse, request, raw, path)
        if (target := embeds(inference, services)) is not None:
            tensors = await exchange.unless_gone(embed(inference, services, exchange))
            version = str(target.entry.version)
        else:
            prepared = await prepare(inference, services, exchange)
            if prepared.streams:
                raise InvalidRequest("infer answers once: use generate_stream, or ModelStreamInfer, for a stream")
            tensors, version = await exchange.unless_gone(prepared.run()), prepared.version
        await exchange.respond(await in_thread(_answer, inference, version, tensors, binary))


class Binary:
    """The outputs that the client wants as binary data."""

    def __init__(self, request: dict[str, Any]) -> None:
        parameters = request.get("parameters") or {}
        self._default = parameters.get("binary_data_output") is True
        self._named = {
            output["name"]: output["parameters"]["binary_data"] is True
            for output in request.get("outputs") or []
            if "binary_data" in (output.get("parameters") or {})
        }

    def wants(self, name: str) -> bool:
        """Whether this output is sent as binary data after the JSON."""
        return self._named.get(name, self._default)


async def _split(exchange: Exchange, max_bytes: int) -> tuple[dict[str, Any], bytes]:
    """The JSON and the binary data after it; the header gives the JSON's length before compression."""
    body = await exchange.body()
    encoding = (exchange.header("content-encoding") or "identity").lower()
    if encoding != "identity":  # a small body may decompress to a large one
        body = await in_thread(_decompressed, body, encoding, max_bytes)
        exchange.body_bytes = len(body)
    given = exchange.header(LENGTH)
    if given is None:
        return await exchange.work(parse_json, body), b""
    digits = given.isascii() and given.isdigit() and len(given) <= MAX_DIGITS
    if not digits or not 0 < int(given) <= len(body):
        raise InvalidRequest(f"{LENGTH} must be between 1 and {len(body)}, the length of the body, got {given[:20]}")
    length = int(given)
    return await exchange.work(parse_json, body[:length]), body[length:]


def _decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding in ("identity", ""):
        return body
    if encoding not in WBITS:
        raise InvalidRequest(f"Content-Encoding must be gzip, deflate or identity, got {encoding[:40]}")
    stream = zlib.decompressobj(WBITS[encoding])
    try:
        whole = stream.decompress(body, max_bytes)
    except zlib.error as error:
        raise MalformedBody(f"the body is no {encoding} data") from error
    if stream.unconsumed_tail:
        raise InvalidRequest(f"the body has more than {max_bytes} bytes when it is decompressed")
    return whole


def _parse(request: dict[str, Any], raw: bytes, path: dict[str, str]) -> tuple[Inference, Binary]:
    parameters = _object(request.get("parameters"), "parameters")
    inference = Inference(path["model"], path.get("version", ""), parameters=parameters)
    request_id = request.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequest("id must be a string", "id")
    inference.request_id = request_id
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest("inputs must be a non-empty list", "inputs")
    at = 0
    for given in inputs:
        tensor, size = _input(given, raw, at)
        inference.inputs.append(tensor)
        at += size
    if at != len(raw):
        raise InvalidRequest(f"the inputs name {at} bytes of binary data, the body holds {len(raw)}", "inputs")
    outputs = request.get("outputs") or []
    if not isinstance(outputs, list):
        raise InvalidRequest("outputs must be a list", "outputs")
    for output in outputs:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise InvalidRequest("every output must be an object with a name", "outputs")
        asked = _object(output.get("parameters"), "outputs.parameters")
        if asked.get("classification"):
            raise NotServed("the classification extension is not supported by this server", "outputs")
        check_tensor(asked, "outputs")
        inference.outputs.append(output["name"])
    return inference, Binary(request)


def _input(given: Any, raw: bytes, at: int) -> tuple[Tensor, int]:
    """One input, and the number of its bytes in the binary data."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or len(given["name"]) > 256:
        raise InvalidRequest("every input must be an object with a name of at most 256 characters", "inputs")
    name, datatype, shape = given["name"], given.get("datatype"), given.get("shape")
    asked = _object(given.get("parameters"), "inputs.parameters")
    check_tensor(asked, "inputs")
    if isinstance(shape, list):  # numbers may be strings, as in protobuf's JSON mapping
        shape = [int(d) if isinstance(d, str) and _is_dimension(d) else d for d in shape]
    size = asked.get("binary_data_size")
    if size is None:
        return from_json(name, datatype, shape, given.get("data")), 0
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw) - at:
        raise InvalidRequest(f"input '{name}': binary_data_size must be between 0 and {len(raw) - at}", "inputs")
    return from_bytes(name, datatype, shape, memoryview(raw)[at : at + size]), size


def _is_dimension(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _object(value: Any, field: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be an object", field)
    return value or {}


def _answer(inference: Inference, version: str, tensors: list[Tensor], binary: Binary) -> Response:
    outputs, parts = [], []
    for tensor in tensors:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if binary.wants(tensor.name):
            parts.append(to_bytes(tensor))
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = encoded(tensor.values)
        outputs.append(output)
    head: dict[str, Any] = {"model_name": inference.model, "model_version": version}
    if inference.request_id:
        head["id"] = inference.request_id
    body = msgspec.json.encode({**head, "outputs": outputs})
    if not parts:
        return Response(200, body)
    headers = [(b"Inference-Header-Content-Length", str(len(body)).encode())]
    return Response(200, body + b"".join(parts), b"application/octet-stream", headers)
