"""What a worker is told at its start: the one list of an engine's options.

Whatever else knows the options derives them from here: the server's settings, the deployment's form in the admin, the
table in docs/configuration.md. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from engine import policies
from engine import quantization as quantizations
from engine.adapters.files import MAX_RANK
from engine.address import parse


@dataclass(frozen=True, slots=True)
class Option:
    """What a field of EngineConfig means; stands in the field's annotation.

    `least` and `most` bound a number, ends included. `setting`: the server has a setting DRAGOMAN_<NAME>, which the
    deployment that `serve` makes gets. `reserved`: the launcher sets the field, no deployment may.
    """

    description: str
    least: int | None = None
    most: int | None = None
    setting: bool = False
    reserved: bool = False


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker's model, limits and address. Frozen; it validates itself and looks at nothing outside."""

    model: Annotated[str, Option("Directory or hub id.", reserved=True)]
    worker_id: Annotated[str, Option("The worker's name on the wire.", reserved=True)] = "worker"
    epoch: Annotated[int, Option("Sets the worker apart from earlier ones of its name.", reserved=True)] = 0
    address: Annotated[
        str,
        Option(
            "Where the worker listens (engine.address); empty: nowhere, the engine is used in place.", reserved=True
        ),
    ] = ""
    cache_dir: Annotated[
        str,
        Option(
            "Folder of files derived from the model (a converted tokenizer); empty: a temporary one.", reserved=True
        ),
    ] = ""
    task: Annotated[
        Literal["auto", "generate", "embed"],
        Option("What the model is for; auto: sentence-transformers' models and models without a head make embeddings."),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Option("Where it computes; auto is CUDA where torch finds a device.", setting=True),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option(
            "Type of the weights; auto is bfloat16 on CPUs that multiply it natively (AVX512_BF16, AMX), else float32.",
            setting=True,
        ),
    ] = "auto"
    quantization: Annotated[
        quantizations.Name,
        Option("int8 keeps the layers' weights in bytes, and takes no adapters.", setting=True),
    ] = quantizations.NONE
    max_model_len: Annotated[
        int, Option("Longest sequence in tokens; 0 is the model's own limit.", 0, 1 << 24, setting=True)
    ] = 0
    max_num_seqs: Annotated[int, Option("Sequences in one step.", 1, 4096, setting=True)] = 64
    max_num_batched_tokens: Annotated[
        int, Option("Tokens in one step; at least one for each sequence.", 1, 1 << 20, setting=True)
    ] = 1024
    max_waiting_requests: Annotated[
        int, Option("Requests that may wait for a place; more are refused.", 1, 1 << 20)
    ] = 1024
    kv_cache_bytes: Annotated[
        int, Option("Size of the KV cache on each device; 0 takes it from free memory.", 0, 1 << 44, setting=True)
    ] = 0
    block_size: Annotated[int, Option("Tokens in one block of the KV cache.", 1, 256)] = 16
    prefix_caching: Annotated[bool, Option("Keep the blocks of finished sequences for prompts that begin alike.")] = (
        True
    )
    scheduling_policy: Annotated[
        policies.Name,
        Option("Which request goes first; priority: the smaller priority, then who came first."),
    ] = policies.DEFAULT
    speculative_tokens: Annotated[
        int,
        Option("Most draft tokens of a sequence while few run; 0 makes none.", 0, 16, setting=True),
    ] = 4
    max_adapters: Annotated[int, Option("Adapters that may compute at a time.", 1, 256)] = 8
    max_cached_adapters: Annotated[int, Option("Adapters that stay in memory.", 1, 4096)] = 32
    max_adapter_rank: Annotated[int, Option("Largest rank of an adapter.", 1, MAX_RANK)] = 64
    tensor_parallel_size: Annotated[
        int,
        Option(
            "CUDA devices of one machine that compute one model together, and take no adapters.", 1, 64, setting=True
        ),
    ] = 1
    threads: Annotated[
        int, Option("Threads of a worker; 0 is one for each CPU that it may use.", 0, 1024, setting=True)
    ] = 0
    client_timeout_s: Annotated[
        float, Option("Seconds for which a client may leave its connection unread before it is dropped.")
    ] = 30.0

    def __post_init__(self) -> None:
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} must be between {least} and {most}, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: a decode step feeds one each")
        if self.address:
            parse(self.address)  # raises where it is none
        if not self.model:
            raise ValueError("model must not be empty")


class OptionField(msgspec.Struct, frozen=True):
    """A field of EngineConfig that a deployment may set."""

    name: str
    type: Any
    """int, float, bool, or a Literal of names."""
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that may stand there; empty for what is no Literal."""
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
    (field.name, field.option.least, field.option.most)
    for field in _ALL
    if field.option.least is not None and field.option.most is not None
)
OPTIONS = {field.name: field for field in _ALL if not field.option.reserved}
"""What deployments may set, by name."""
RESERVED = frozenset(field.name for field in _ALL if field.option.reserved)
"""What the launcher sets."""
