"""The settings of Triton's dialect."""

from __future__ import annotations

from pydantic import Field

from inference.planes.declaration import DialectSettings


class TritonSettings(DialectSettings):
    """DRAGOMAN_GRPC_* and DRAGOMAN_TRITON_*."""

    grpc_port: int = Field(8001, ge=0, le=65535, description="Port of Triton's gRPC service; 0 switches it off.")
    grpc_max_message_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, description="Largest message over gRPC.")
    grpc_max_connections: int = Field(256, ge=1, le=65536, description="Connections to the gRPC port at once.")
    triton_metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of Triton's metrics plane; 0 switches it off."
    )
    triton_server_name: str = Field(
        "dragoman", min_length=1, max_length=128, description="Name in the server's metadata; Triton's own is triton."
    )
    triton_exclude_input_in_output: bool = Field(
        True,
        description="Whether an answer that is no stream leaves the prompt out where the request does not say; vLLM's and "
        "TensorRT-LLM's backends repeat it.",
    )
