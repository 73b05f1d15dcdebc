"""The answers of Triton's HTTP routes, for the documentation. They are built where they are sent, and a test compares
both.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ServerLive(msgspec.Struct):
    """Whether the server runs."""

    live: bool


class ServerReady(msgspec.Struct):
    """Whether any model can take a request."""

    ready: bool


class ModelReady(msgspec.Struct):
    """Whether the model can take a request."""

    name: str
    ready: bool


class ServerMetadata(msgspec.Struct):
    """The server and Triton's extensions that it has."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(msgspec.Struct):
    """An input or output; -1 stands for any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """A model with its inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class LatestVersions(msgspec.Struct):
    """How many of the newest versions are served."""

    num_versions: int


class VersionPolicy(msgspec.Struct):
    """Which versions are served."""

    latest: LatestVersions


class TensorConfig(msgspec.Struct, omit_defaults=True):
    """An input or output in a model's configuration; the sizes are numbers as text."""

    name: str
    data_type: str
    dims: list[str]
    format: str | None = None
    optional: bool | None = None


class TransactionPolicy(msgspec.Struct):
    """Whether a request may have several responses."""

    decoupled: bool


class ConfigParameter(msgspec.Struct):
    """A value of the configuration."""

    string_value: str


class InstanceGroup(msgspec.Struct):
    """Workers of one kind."""

    name: str
    kind: Literal["KIND_CPU", "KIND_GPU"]
    count: int


class ModelConfig(msgspec.Struct):
    """Triton's ModelConfig."""

    name: str
    platform: str
    backend: str
    version_policy: VersionPolicy
    max_batch_size: int
    input: list[TensorConfig]
    output: list[TensorConfig]
    model_transaction_policy: TransactionPolicy
    parameters: dict[str, ConfigParameter]
    instance_group: list[InstanceGroup]


class StatisticDuration(msgspec.Struct):
    """How often something happened, and nanoseconds in all."""

    count: int
    ns: int


class ModelStatistics(msgspec.Struct):
    """What a model did since the server started; `last_inference` in milliseconds since 1970."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: dict[str, StatisticDuration]
    response_stats: dict[str, Any]
    batch_stats: list[dict[str, Any]]
    memory_usage: list[dict[str, Any]]


class ModelsStatistics(msgspec.Struct):
    """Of one model, or of all."""

    model_stats: list[ModelStatistics]


class RepositoryEntry(msgspec.Struct):
    """A deployment; the reason is empty while it is ready."""

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str


class OutputParameters(msgspec.Struct):
    """The length in bytes of an output that follows the JSON."""

    binary_data_size: int


class InferOutput(msgspec.Struct, omit_defaults=True):
    """An output: its values in order, or where they are."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: OutputParameters | None = None


class InferResponse(msgspec.Struct, omit_defaults=True):
    """The outputs of an inference, with the request's id."""

    model_name: str
    model_version: str
    outputs: list[InferOutput]
    id: str | None = None


class GeneratedToken(msgspec.Struct):
    """A token with its log-probability; `special` ones are left out of texts."""

    id: int
    text: str
    logprob: float
    special: bool


class GenerateDetails(msgspec.Struct, omit_defaults=True):
    """Why the text ended, once that is known, and its tokens; in a stream those of the step, and the last of them."""

    logprobs: list[GeneratedToken]
    finish_reason: Literal["eos_token", "length", "stop_sequence"] | None = None
    token: GeneratedToken | None = None


class TextResponse(msgspec.Struct, omit_defaults=True):
    """A text, or a step's piece of it; lists have an element for each of several sequences. What parameters ask for
    is beside it.
    """

    model_name: str
    model_version: str
    text_output: str | list[str]
    id: str | None = None
    details: GenerateDetails | None = None
    finish_reason: str | list[str] | None = None
    cumulative_logprob: float | list[float] | None = None
    logprobs: str | list[str] | None = None
    num_input_tokens: int | list[int] | None = None
    num_output_tokens: int | list[int] | None = None
    cum_log_probs: float | list[float] | None = None
    output_log_probs: float | list[float] | None = None


class TraceSetting(msgspec.Struct):
    """How requests are traced; numbers as text."""

    trace_level: list[str]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: str


class LogSetting(msgspec.Struct):
    """What is logged."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str
