"""A request of each route that does what the route is for, as far as a server allows that others use as well."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.message import Message

from inference.dialects.torchserve.protocol import inference_pb2 as torchserve
from inference.dialects.torchserve.protocol import management_pb2 as management
from inference.dialects.torchserve.protocol import open_inference_pb2 as opened
from inference.dialects.triton.protocol import grpc_service_pb2 as triton

PROMPT = "Question: What is the capital of Spain?\nAnswer:"
CHAT = [{"role": "user", "content": "What is the capital of Spain?"}]
FEW = {"max_new_tokens": 3}
CHAT_REQUEST = {"model": "demo", "messages": CHAT, "max_tokens": 3}
TEXT_REQUEST = {"model": "demo", "prompt": PROMPT, "max_tokens": 3}
TGI_REQUEST = {"inputs": PROMPT, "parameters": FEW}
TRITON_TEXT = {"text_input": PROMPT, "parameters": {"max_tokens": 3}}
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
TRITON_TENSORS = {"inputs": [TENSOR], "parameters": {"max_tokens": 3}}
IDS = {"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [5, 6]}
MINDIE_TENSORS = {"inputs": [IDS], "outputs": [{"name": "output0"}], "parameters": FEW}

BODIES: dict[str, Any] = {
    "front POST /": TGI_REQUEST,
    "front POST /generate": TGI_REQUEST,
    "front POST /generate_stream": TGI_REQUEST,
    "front POST /tokenize": {"inputs": PROMPT},
    "front POST /invocations": TGI_REQUEST,
    "front POST /chat_tokenize": {"messages": CHAT},
    "front POST /vertex": {"instances": [TGI_REQUEST]},
    "front POST /v1/completions": TEXT_REQUEST,
    "front POST /v1/chat/completions": CHAT_REQUEST,
    "front POST /v1/chat/completions/batch": {**CHAT_REQUEST, "messages": [CHAT, CHAT]},
    "front POST /v1/chat/completions/render": CHAT_REQUEST,
    "front POST /v1/completions/render": TEXT_REQUEST,
    "front POST /v1/embeddings": {"model": "demo", "input": PROMPT},
    "front POST /pooling": {"model": "demo", "input": PROMPT},
    "front POST /embed": {"inputs": PROMPT},
    "front POST /v1/responses": {"model": "demo", "input": PROMPT, "max_output_tokens": 3},
    "front POST /detokenize": {"tokens": [5, 6]},
    "front POST /v2/models/{model}/infer": TRITON_TENSORS,
    "front POST /v2/models/{model}/versions/{version}/infer": TRITON_TENSORS,
    "front POST /v2/models/{model}/generate": TRITON_TEXT,
    "front POST /v2/models/{model}/versions/{version}/generate": TRITON_TEXT,
    "front POST /v2/models/{model}/generate_stream": TRITON_TEXT,
    "front POST /v2/models/{model}/versions/{version}/generate_stream": TRITON_TEXT,
    "mindie-service POST /": TGI_REQUEST,
    "mindie-service POST /generate": TGI_REQUEST,
    "mindie-service POST /generate_stream": TGI_REQUEST,
    "mindie-service POST /v1/chat/completions": CHAT_REQUEST,
    "mindie-service POST /v1/completions": TEXT_REQUEST,
    "mindie-service POST /infer": TGI_REQUEST,
    "mindie-service POST /infer_token": {"input_id": [5, 6], "parameters": FEW},
    "mindie-service POST /v1/tokenizer": {"inputs": PROMPT},
    **{
        f"mindie-service POST /v2/models/{{model}}{version}/{verb}": body
        for version in ("", "/versions/{version}")
        for verb, body in (
            ("infer", MINDIE_TENSORS),
            ("generate", {"text_input": PROMPT, "parameters": FEW}),
            ("generate_stream", {"text_input": PROMPT, "parameters": FEW}),
            ("stopInfer", {"id": "none"}),
        )
    },
    "djl POST /invocations": TGI_REQUEST,
    "djl POST /predictions/{model}": TGI_REQUEST,
    "djl POST /predictions/{model}/{version}": TGI_REQUEST,
    "djl POST /models/{model}/invoke": TGI_REQUEST,
    "djl POST /v1/chat/completions": CHAT_REQUEST,
    **{
        f"torchserve-inference {method} {path}": {"prompt": PROMPT, "max_tokens": 3}
        for method in ("POST", "PUT")
        for path in (
            "/predictions/{model}",
            "/predictions/{model}/{version}",
            "/{model}/predict",
            "/{model}/{version}/predict",
        )
    },
    **{
        f"torchserve-inference {method} /predictions/{{model}}/{{version}}/{{path}}": CHAT_REQUEST
        for method in ("POST", "PUT")
    },
    "torchserve-inference POST /invocations": {"prompt": PROMPT, "max_tokens": 3},
    "torchserve-inference POST /models/{model}/invoke": {"prompt": PROMPT, "max_tokens": 3},
    "torchserve-inference POST /v1/models/{model}:predict": {"instances": [{"prompt": PROMPT, "max_tokens": 3}]},
    "torchserve-inference POST /v2/models/{model}/infer": TRITON_TENSORS,
}
"""By plane, method and path. All other requests with a body have an empty object."""
VERSIONS = {"front": "1", "mindie-service": "1", "mindie-management": "1"}
"""Of the demo model; elsewhere 1.0."""


def concrete(plane: str, path: str, changes: bool) -> str:
    """A route's path with its parameters filled in. What `changes` a model changes none that is there."""
    model = "nothing" if changes else "demo"
    values = {"model": model, "version": VERSIONS.get(plane, "1.0"), "wait": "-1", "path": "v1/chat/completions"}
    if path == "/v1/models/{id}":
        values["id"] = model
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], "nothing"), path)


def _tensors(request: Any) -> Any:
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PROMPT.encode())
    return request


_PREDICTION = torchserve.PredictionsRequest(model_name="demo", input={"prompt": PROMPT.encode(), "max_tokens": b"3"})
_TRITON, _TORCHSERVE = "/inference.GRPCInferenceService", "/org.pytorch.serve.grpc"
_OPENED, _MANAGEMENT = (
    f"{_TORCHSERVE}.openinference.GRPCInferenceService",
    f"{_TORCHSERVE}.management.ManagementAPIsService",
)
MESSAGES: dict[str, Message] = {
    f"{_TRITON}/ModelReady": triton.ModelReadyRequest(name="demo"),
    f"{_TRITON}/ModelMetadata": triton.ModelMetadataRequest(name="demo"),
    f"{_TRITON}/ModelConfig": triton.ModelConfigRequest(name="demo"),
    f"{_TRITON}/ModelInfer": _tensors(triton.ModelInferRequest(model_name="demo")),
    f"{_TRITON}/ModelStreamInfer": _tensors(triton.ModelInferRequest(model_name="demo")),
    f"{_TORCHSERVE}.inference.InferenceAPIsService/Predictions": _PREDICTION,
    f"{_TORCHSERVE}.inference.InferenceAPIsService/StreamPredictions": _PREDICTION,
    f"{_OPENED}/ModelReady": opened.ModelReadyRequest(name="demo"),
    f"{_OPENED}/ModelMetadata": opened.ModelMetadataRequest(name="demo"),
    f"{_OPENED}/ModelInfer": _tensors(opened.ModelInferRequest(model_name="demo")),
    f"{_MANAGEMENT}/DescribeModel": management.DescribeModelRequest(model_name="demo"),
    f"{_MANAGEMENT}/ListModels": management.ListModelsRequest(),
}
"""By gRPC method; all others get an empty message."""
