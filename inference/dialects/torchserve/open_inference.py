"""KServe's Open Inference Protocol in TorchServe's words, for REST and gRPC: the front plane's `infer` answers."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.torchserve.delegated import chunks_of

if TYPE_CHECKING:
    from inference.dialects.torchserve.versions import Served
    from inference.generation.caller import Caller
    from inference.services import Services

BINARY = frozenset({"binary_data_output", "binary_data", "binary_data_size"})
"""Parameters of Triton's extension for binary data. TorchServe does not have it, and ignores parameters that it does not know."""


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An answer; `outputs` is a list of tensors as JSON."""

    model_name: str
    model_version: str
    id: str = ""
    outputs: msgspec.Raw


async def answer_of(services: Services, caller: Caller, served: Served, model: str, body: dict[str, Any]) -> Answer:
    """The answer, under the client's name of the `model` and TorchServe's label of the version. The caller holds a permit, and the
    body has no `BINARY` parameters. Raises the handler's errors.
    """
    path = f"/v2/models/{served.model}/infer"
    async with aclosing(chunks_of(services, caller, path, body, served.entry.public_id)) as chunks:
        told = b"".join([chunk async for chunk in chunks])
    answer = msgspec.json.decode(told, type=Answer)
    answer.model_name, answer.model_version = model, served.entry.label
    return answer


def without_binary(body: dict[str, Any]) -> dict[str, Any]:
    """A request without the parameters in `BINARY`: its own, and those of its inputs and outputs."""
    plain = _plain(body)
    for name in ("inputs", "outputs"):
        if isinstance(plain.get(name), list):
            plain[name] = [_plain(tensor) if isinstance(tensor, dict) else tensor for tensor in plain[name]]
    return plain


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    parameters = value.get("parameters")
    if not isinstance(parameters, dict):
        return dict(value)
    return {**value, "parameters": {name: given for name, given in parameters.items() if name not in BINARY}}
