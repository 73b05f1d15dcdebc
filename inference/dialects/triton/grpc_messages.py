"""Converts between protobuf messages and an `Inference` with its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.triton.infer import Inference
from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from inference.dialects.triton.tensors import Tensor, from_bytes, from_json, to_bytes
from inference.errors import InvalidRequest

if TYPE_CHECKING:
    pass

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
        if raws:
            if given.HasField("contents"):
                raise InvalidRequest("contents must be empty where raw_input_contents is used", "inputs")
            tensors.append(from_bytes(given.name, given.datatype, shape, raws[index]))
        else:
            tensors.append(from_json(given.name, given.datatype, shape, _contents(given)))
    return Inference(
        model=request.model_name,
        version=request.model_version,
        request_id=request.id,
        parameters={name: _value(parameter) for name, parameter in request.parameters.items()},
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


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)
