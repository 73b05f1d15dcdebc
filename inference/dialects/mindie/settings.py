"""MindIE's config.json settings that affect the protocol, with MindIE's defaults. It reads no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.messages import ModelInfo

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class MindieSettings:
    """One field for each key, under its own name; times are seconds, sizes MiB. None: the deployment's value."""

    open_ai_support: str = "vllm"
    full_text_enabled: bool = False
    token_timeout_s: int = 600
    e2e_timeout_s: int = 600
    max_request_length_mib: int = 40
    max_json_depth: int = 10
    max_iter_times: int | None = None
    max_input_token_len: int | None = None
    truncation: int = 0
    """0 refuses prompts that are too long, 1 truncates them on the left, -1 on the right."""
    max_batch_size: int | None = None
    max_prefill_batch_size: int | None = None
    max_prefill_tokens: int | None = None
    max_n: int = 128
    prefill_policy_type: int = 0
    decode_policy_type: int = 0
    npu_mem_size: int = -1
    cpu_mem_size: int = 0
    world_size: int = 1
    max_loras: int | None = None
    model_weights: tuple[str, str] | None = None
    """The name of config.json's model, and the last part of its `modelWeightPath`."""
    management_address: str = "127.0.0.1:1026"
    metrics_enabled: bool = False
    """MIES_SERVICE_MONITOR_MODE."""
    benchmark_enabled: bool = False
    """MINDIE_LLM_BENCHMARK_ENABLE: adds batch sizes and queue times to `usage`, and step times."""
    async_scheduling: bool = False
    """MINDIE_ASYNC_SCHEDULING_ENABLE: more than one sequence per prompt is refused."""
    average_window: int = 1000
    """DYNAMIC_AVERAGE_WINDOW_SIZE: the number of completed requests in the means of /metrics-json."""

    @property
    def max_request_bytes(self) -> int:
        """The largest body in bytes, and the longest text in UTF-16 units."""
        return self.max_request_length_mib * MEBIBYTE

    @property
    def vllm_flavour(self) -> bool:
        """Whether /v1/chat/completions uses vLLM's ranges instead of OpenAI's."""
        return self.open_ai_support == "vllm"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity figures that MindIE reports for a model: the settings' values if set, else the worker's."""

    max_seq_len: int
    max_input_token_len: int
    max_iter_times: int
    max_batch_size: int
    max_prefill_batch_size: int
    max_prefill_tokens: int
    cache_block_size: int
    total_blocks: int

    @classmethod
    def of(cls, settings: MindieSettings, info: ModelInfo) -> Capacity:
        """The capacity of one deployment."""
        batch = min(settings.max_batch_size or info.max_num_seqs, info.max_num_seqs)
        length = info.max_model_len
        return cls(
            max_seq_len=length,
            max_input_token_len=min(settings.max_input_token_len or length - 1, length - 1),
            max_iter_times=min(settings.max_iter_times or length, length),
            max_batch_size=batch,
            max_prefill_batch_size=min(settings.max_prefill_batch_size or batch, batch),
            max_prefill_tokens=settings.max_prefill_tokens or info.max_num_batched_tokens,
            cache_block_size=info.block_size,
            total_blocks=info.num_blocks,
        )
