"""Converts between protobuf messages and an `Inference` with its tensors."""

from __future__ import annotations

from typing import Any

from inference.dialects.triton.infer import Inference
from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from inference.dialects.triton.shared_memory import check_tensor
from inference.dialects.triton.tensors import Tensor, from_bytes, from_json, to_bytes
from inference.errors import InvalidRequest, NotServed

EMPTY_FINAL = "triton_enable_empty_final_response"
"""What clients of streams send; it asks for nothing, since the last response is marked in any case."""
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def inference_of(request: Any) -> Inference:
    """Parse a request; raises InvalidRequest."""
    raws = list(request.raw_input_contents)
    if raws and len(raws) != len(request.inputs):
        raise InvalidRequest(f"raw_input_contents has {len(raws)} entries for {len(request.inputs)} inputs", "inputs")
    tensors = []
    for index, given in enumerate(request.inputs):
        shape = list(given.shape)
        check_tensor(_values(given.parameters), "inputs")
        if raws:
            if given.HasField("contents"):
                raise InvalidRequest("contents must be empty where raw_input_contents is used", "inputs")
            tensors.append(from_bytes(given.name, given.datatype, shape, raws[index]))
        else:
            tensors.append(from_json(given.name, given.datatype, shape, _contents(given)))
    for output in request.outputs:
        asked = _values(output.parameters)
        check_tensor(asked, "outputs")
        if asked.get("classification"):
            raise NotServed("the classification extension is not supported by this server", "outputs")
    return Inference(
        model=request.model_name,
        version=request.model_version,
        request_id=request.id,
        parameters={name: value for name, value in _values(request.parameters).items() if name != EMPTY_FINAL},
        inputs=tensors,
        outputs=[output.name for output in request.outputs],
    )


def response_of(inference: Inference, version: str, tensors: list[Tensor], final: bool | None = None) -> Any:
    """The response message; `final` marks responses of a stream."""
    response = pb.ModelInferResponse(
        model_name=inference.model,
        model_version=version,
        id=inference.request_id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(name=t.name, datatype=t.datatype, shape=t.shape) for t in tensors
        ],
        raw_output_contents=[to_bytes(tensor) for tensor in tensors],
    )
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    return response


def trace_settings_of(request: Any) -> dict[str, Any]:
    """The settings of a TraceSettingRequest as over HTTP: the level is a list, any other a text, null without a value."""
    found: dict[str, Any] = {}
    for name, setting in request.settings.items():
        values = list(setting.value)
        if len(values) > 1 and name != "trace_level":
            raise InvalidRequest(f"expect only 1 value for '{name[:100]}'", name[:100])
        found[name] = None if not values else values if name == "trace_level" else values[0]
    return found


def log_settings_of(request: Any) -> dict[str, Any]:
    """The settings of a LogSettingsRequest."""
    return _values(request.settings)


def trace_response(settings: dict[str, Any]) -> Any:
    """The trace settings as a message."""
    response = pb.TraceSettingResponse()
    for name, value in settings.items():
        response.settings[name].value.extend(value if isinstance(value, list) else [value])
    return response


def log_response(settings: dict[str, Any]) -> Any:
    """The logging settings as a message."""
    response = pb.LogSettingsResponse()
    for name, value in settings.items():
        kind = "bool_param" if isinstance(value, bool) else "uint32_param" if isinstance(value, int) else "string_param"
        setattr(response.settings[name], kind, value)
    return response


def _contents(given: Any) -> list[Any]:
    field = CONTENTS.get(given.datatype)
    if field is None:
        text = f"input '{given.name[:100]}': datatype {given.datatype[:40]} needs raw_input_contents"
        raise InvalidRequest(text, "inputs")
    values = list(getattr(given.contents, field))
    if given.datatype == "BYTES":
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"input '{given.name[:100]}': an element is not valid UTF-8", "inputs") from error
    return values


def _values(parameters: Any) -> dict[str, Any]:
    return {name: _value(parameter) for name, parameter in parameters.items()}


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)
