"""The configuration of one engine worker, and the only list of the engine's options.

The server's settings, the deployment form in the admin and the tables of docs/configuration.md are derived from it.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from engine import policies
from engine import quantization as quantizations
from engine.adapters.files import MAX_RANK
from engine.address import parse
from engine.network.credentials import Credentials


@dataclass(frozen=True, slots=True)
class Option:
    """The description of one field of EngineConfig, given in the field's annotation.

    `minimum` and `maximum` bound a number, both inclusive. `setting`: the server setting DRAGOMAN_<NAME> gives the field's
    value in the deployment that `serve` creates. `reserved`: only the launcher sets the field, never a deployment.
    """

    description: str
    minimum: int | None = None
    maximum: int | None = None
    setting: bool = False
    reserved: bool = False


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model, limits and address of one worker. An immutable struct that validates its own fields; it reads no file
    and no environment variable.
    """

    model: Annotated[str, Option("Directory or hub id of the model.", reserved=True)]
    worker_id: Annotated[str, Option("Name of the worker in messages and logs.", reserved=True)] = "worker"
    epoch: Annotated[int, Option("Number of the worker's incarnation; grows with every restart.", reserved=True)] = 0
    address: Annotated[
        str,
        Option(
            "Address on which the worker listens (engine.address); empty for an engine in the same process.",
            reserved=True,
        ),
    ] = ""
    tls: Annotated[
        Credentials | None,
        Option("The worker's certificate, which an address on TCP needs (engine.network.credentials).", reserved=True),
    ] = None
    lease_s: Annotated[
        float,
        Option(
            "Seconds that the worker runs on without word from a launcher; 0: it exits with its launcher.",
            reserved=True,
        ),
    ] = 0.0
    cache_dir: Annotated[
        str,
        Option(
            "Folder for files derived from the model, such as a converted tokenizer; empty for a temporary one.",
            reserved=True,
        ),
    ] = ""
    flight_dir: Annotated[
        str,
        Option(
            "Folder for the flight recorder's files (engine.process.flight); empty: none are written.", reserved=True
        ),
    ] = ""
    kv_offload_dir: Annotated[
        str, Option("Folder of the KV blocks on disk, which a deployment's workers share; empty: none.", reserved=True)
    ] = ""
    required_adapters: Annotated[
        dict[str, str],
        Option(
            "Directories by name of adapters that the worker must be able to serve: it ends at start if it cannot.",
            reserved=True,
        ),
    ] = {}
    nixl_devices: Annotated[
        str,
        Option(
            "Network devices over which NIXL may move KV blocks without encryption, separated by commas; empty: none.",
            reserved=True,
        ),
    ] = ""
    log_format: Annotated[Literal["console", "json"], Option("How the worker writes its log lines.", reserved=True)] = (
        "console"
    )
    task: Annotated[
        Literal["auto", "generate", "embed"],
        Option(
            "What the model is used for; auto decides by the model's files: sentence-transformers' models and models "
            "without a language-model head make embeddings."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Option("Device of the worker; auto is CUDA if torch finds a device.", setting=True),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option(
            "Type of the weights; auto is bfloat16, for embedding models float32.",
            setting=True,
        ),
    ] = "auto"
    quantization: Annotated[
        quantizations.Name,
        Option("Storage of the layers' weights; int8 supports no adapters.", setting=True),
    ] = quantizations.NONE
    weight_coding: Annotated[
        Literal["auto", "on", "off"],
        Option(
            "Whether bfloat16 weights are kept in twelve bits a number on CPUs, without loss; auto measures at start which is faster.",
            setting=True,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int, Option("Longest sequence in tokens; 0 is the model's own limit.", 0, 1 << 24, setting=True)
    ] = 0
    max_num_seqs: Annotated[int, Option("Most sequences in one step.", 1, 4096, setting=True)] = 64
    max_num_batched_tokens: Annotated[
        int, Option("Most tokens in one step; at least max_num_seqs.", 1, 1 << 20, setting=True)
    ] = 1024
    max_step_ms: Annotated[
        int,
        Option(
            "About the most milliseconds of a step that computes prompts beside sequences that decode, or while another worker "
            "comes for KV blocks; longer prompts are computed in chunks that are expected to fit, of 16 tokens at least. 0: no limit.",
            0,
            600_000,
            setting=True,
        ),
    ] = 150
    max_waiting_requests: Annotated[
        int, Option("Most requests in the engine's queue; further ones are refused.", 1, 1 << 20)
    ] = 1024
    target_ttft_ms: Annotated[
        int,
        Option(
            "Milliseconds within which a request should begin: prompts that take longer to compute than that, at the measured "
            "rate, do not wait; further ones are refused. 0: no limit.",
            0,
            3_600_000,
            setting=True,
        ),
    ] = 60_000
    kv_cache_bytes: Annotated[
        int, Option("Bytes of KV cache on each device; 0 uses free memory.", 0, 1 << 44, setting=True)
    ] = 0
    kv_offload_memory_bytes: Annotated[
        int,
        Option(
            "Bytes of host memory beside each CUDA device's KV cache for blocks that it evicts; 0: none. CPUs have one memory: "
            "kv_cache_bytes.",
            0,
            1 << 44,
            setting=True,
        ),
    ] = 0
    kv_offload_disk_bytes: Annotated[
        int,
        Option(
            "Bytes on disk for the KV blocks of a deployment, which outlive eviction and restarts; 0: none.",
            0,
            1 << 50,
            setting=True,
        ),
    ] = 0
    kv_transport: Annotated[
        Literal["sockets", "nixl"],
        Option(
            "How the KV blocks of a prompt get from one worker to another: in frames over the connection between them, or by NIXL "
            "(the extra nixl).",
            setting=True,
        ),
    ] = "sockets"
    block_size: Annotated[int, Option("Tokens in one block of the KV cache.", 1, 256)] = 16
    prefix_caching: Annotated[
        bool, Option("Keep the blocks of finished sequences for prompts with the same beginning.")
    ] = True
    scheduling_policy: Annotated[
        policies.Name,
        Option(
            "Order of requests; fair: tenants by what they got for their weight, each one's requests as priority has them; "
            "priority: the smaller priority first, then the earlier arrival."
        ),
    ] = policies.DEFAULT
    speculative_tokens: Annotated[
        int,
        Option("Most draft tokens per sequence in small batches; 0 disables speculation.", 0, 16, setting=True),
    ] = 4
    max_adapters: Annotated[int, Option("Most adapters in slots, which can compute in one step.", 1, 256)] = 8
    max_cached_adapters: Annotated[int, Option("Most adapters in memory.", 1, 4096)] = 32
    max_adapter_rank: Annotated[int, Option("Largest rank of an adapter.", 1, MAX_RANK)] = 64
    tensor_parallel_size: Annotated[
        int,
        Option(
            "CUDA devices of one machine that share a model; more than 1 supports no adapters.", 1, 64, setting=True
        ),
    ] = 1
    threads: Annotated[int, Option("Threads of a worker; 0 is one per usable CPU.", 0, 1024, setting=True)] = 0
    client_timeout_s: Annotated[
        float, Option("Seconds that a client may leave its connection unread before it is closed.")
    ] = 30.0

    def __post_init__(self) -> None:
        for name, minimum, maximum in _BOUNDS:
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise ValueError(f"{name} must be between {minimum} and {maximum}, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: a decode step feeds one each")
        if self.address:
            parse(self.address)  # raises AddressError, a ValueError
        if not self.model:
            raise ValueError("model must not be empty")
        if self.offloads and not self.prefix_caching:
            raise ValueError(
                "kv_offload_memory_bytes and kv_offload_disk_bytes keep cached prefixes: set prefix_caching"
            )
        if self.offloads and self.tensor_parallel_size > 1:
            raise ValueError(
                "kv_offload_memory_bytes and kv_offload_disk_bytes support a tensor_parallel_size of 1 only"
            )

    @property
    def offloads(self) -> bool:
        """Whether KV blocks are kept beside the device's cache."""
        return bool(self.kv_offload_memory_bytes or self.kv_offload_disk_bytes)


class OptionField(msgspec.Struct, frozen=True):
    """A field of EngineConfig that a deployment may set."""

    name: str
    type: Any
    """int, float, bool, or a Literal of names."""
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The permitted names; empty unless the type is a Literal."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def _fields() -> list[OptionField]:
    hints = get_type_hints(EngineConfig, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    found = []
    for name, (kind, option) in ((name, get_args(hint)) for name, hint in hints.items() if name in defaults):
        found.append(OptionField(name, kind, defaults[name], option))
    return found


_ALL = _fields()
_BOUNDS = tuple(
    (field.name, field.option.minimum, field.option.maximum)
    for field in _ALL
    if field.option.minimum is not None and field.option.maximum is not None
)
OPTIONS = {field.name: field for field in _ALL if not field.option.reserved}
"""The fields that a deployment may set, by name."""
RESERVED = frozenset(field.name for field in _ALL if field.option.reserved)
"""The names of the fields that only the launcher sets."""
