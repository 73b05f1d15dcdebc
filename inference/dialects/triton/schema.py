"""The body schemas of this dialect, for the documentation; bodies are checked where they are parsed."""

from __future__ import annotations

from typing import Any

import msgspec


class InputTensor(msgspec.Struct):
    """One input: `data` flat or nested, or `parameters.binary_data_size` bytes after the JSON."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class OutputTensor(msgspec.Struct):
    """A requested output."""

    name: str
    parameters: dict[str, Any] | None = None


class InferBody(msgspec.Struct):
    """POST .../infer."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[OutputTensor] | None = None


class GenerateBody(msgspec.Struct):
    """POST .../generate and .../generate_stream; parameters may be at the top level too."""

    text_input: str
    id: str | None = None
    parameters: dict[str, Any] | None = None
    stream: bool | None = None


class IndexBody(msgspec.Struct):
    """POST /v2/repository/index."""

    ready: bool | None = None


class LoadBody(msgspec.Struct):
    """POST /v2/repository/models/{model}/load and .../unload."""

    parameters: dict[str, Any] | None = None


class TraceSettings(msgspec.Struct):
    """POST .../trace/setting."""

    trace_level: list[str] | None = None
    trace_rate: str | None = None
    trace_count: str | None = None
    log_frequency: str | None = None


class LogSettings(msgspec.Struct):
    """POST /v2/logging."""

    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: int | None = None
    log_format: str | None = None
