"""The messages of Triton's gRPC service that the checks need, on the wire as KServe's Open Inference Protocol 2 has them.

Triton offers no reflection, and a client may not import the server's own messages.
"""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

PACKAGE = "inference"
SERVICE = "GRPCInferenceService"
TYPES = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}
MESSAGES = {
    "Empty": "",
    "Live": "live:bool=1",
    "Model": "name:string=1 version:string=2",
    "Ready": "ready:bool=1",
    "Tensor": "name:string=1 datatype:string=2 shape:int64*=3",
    "Metadata": "name:string=1 versions:string*=2 platform:string=3 inputs:Tensor*=4 outputs:Tensor*=5",
    "Parameter": "bool_param:bool=1 int64_param:int64=2 string_param:string=3",
    "Entry": "key:string=1 value:Parameter=2",  # of a map
    "Contents": "bytes_contents:bytes*=8",
    "Data": "name:string=1 datatype:string=2 shape:int64*=3 contents:Contents=5",
    "InferRequest": "model_name:string=1 id:string=3 parameters:Entry*=4 inputs:Data*=5",
    "InferResponse": "model_name:string=1 id:string=3 outputs:Data*=5 raw_output_contents:bytes*=6",
    "StreamResponse": "error_message:string=1 infer_response:InferResponse=2",
}
"""The fields of each message as name:type=number; * repeats."""
METHODS = {
    "ServerLive": ("Empty", "Live"),
    "ModelReady": ("Model", "Ready"),
    "ModelMetadata": ("Model", "Metadata"),
    "ModelInfer": ("InferRequest", "InferResponse"),
    "ModelStreamInfer": ("InferRequest", "StreamResponse"),
}


def pool() -> DescriptorPool:
    """The service and its messages. Fields have presence (proto2), so that a parameter may be 0."""
    file = FileDescriptorProto(name="triton.proto", package=PACKAGE, syntax="proto2")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, _, rest = text.partition(":")
            kind, _, number = rest.partition("=")
            label = FieldDescriptorProto.LABEL_REPEATED if "*" in kind else FieldDescriptorProto.LABEL_OPTIONAL
            added = message.field.add(name=field, number=int(number), label=label)
            if kind.strip("*") in TYPES:
                added.type = TYPES[kind.strip("*")]
                if kind == "int64*":  # as proto3 has it on the wire
                    added.options.packed = True
            else:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind.strip('*')}"
    service = file.service.add(name=SERVICE)
    for name, (asked, answered) in METHODS.items():
        service.method.add(name=name, input_type=f".{PACKAGE}.{asked}", output_type=f".{PACKAGE}.{answered}")
    made = DescriptorPool()
    made.Add(file)
    return made
