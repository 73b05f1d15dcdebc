"""The settings of TorchServe's services."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from inference.planes.declaration import DialectSettings

MAX_MESSAGE_BYTES = 6_553_500
"""TorchServe's max_request_size."""
MAX_EXPIRATION_MIN = 52_560_000
"""A hundred years."""


class TorchServeSettings(DialectSettings):
    """DRAGOMAN_TORCHSERVE_*."""

    torchserve_grpc_inference_port: int = Field(
        7070, ge=0, le=65535, description="Port of TorchServe's inference service; 0 switches it off."
    )
    torchserve_grpc_management_port: int = Field(
        7071, ge=0, le=65535, description="Port of TorchServe's management service; 0 switches it off."
    )
    torchserve_inference_port: int = Field(0, ge=0, le=65535, description="Port of TorchServe's REST inference plane.")
    torchserve_management_port: int = Field(0, ge=0, le=65535, description="Port of its REST management plane.")
    torchserve_metrics_port: int = Field(0, ge=0, le=65535, description="Port of its REST metrics plane.")
    torchserve_max_message_bytes: int = Field(
        MAX_MESSAGE_BYTES, ge=1024, le=1 << 30, description="Largest gRPC message, and largest body."
    )
    torchserve_model_api: bool = Field(True, description="Whether clients may register and unregister models.")
    torchserve_allowed_urls: list[str] = Field(
        ["file://.*|http(s)?://.*"], description="Regular expressions; a URL to register must match one as a whole."
    )
    torchserve_model_store: Path | None = Field(None, description="Folder of models and archives to register.")
    torchserve_token_authorization: Literal["auto", "on", "off"] = Field(
        "auto", description="Whether TorchServe's keys are asked for; auto: if bound beyond loopback."
    )
    torchserve_token_expiration_min: float = Field(
        60.0, gt=0, le=MAX_EXPIRATION_MIN, description="Minutes until a key expires."
    )
    torchserve_key_folder: Path | None = Field(
        None, description="Folder of key_file.json; unset is the server's data folder."
    )
    torchserve_strict_statuses: bool = Field(
        False, description="Whether statuses say what happened where TorchServe's say INTERNAL."
    )
    torchserve_open_inference_protocol: bool = Field(
        False,
        description="Whether its copy of KServe's Open Inference Protocol is served beside the inference service.",
    )
    torchserve_max_tokens: int = Field(
        256, ge=1, description="Tokens of an answer whose request gives no limit, unless it is OpenAI's."
    )

    @field_validator("torchserve_allowed_urls")
    @classmethod
    def _compiles(cls, values: list[str]) -> list[str]:
        for value in values:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return values
