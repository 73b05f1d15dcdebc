"""The vendor's bodies with all their fields, types, ranges and defaults (scalegen-cli 0.0.46).

A field that is null counts as absent. Whole numbers may come as 300.0 or "300". Unknown fields are kept apart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from management.autoscale.config import Strategy
from management.models.deployment import LONGEST_S, MAX_WORKERS

InferenceType = Literal["llm", "embedding", "tti", "vlm"]
Engine = Literal["tei", "vllm", "nim", "lmdeploy", "nos", "friendli"]
Provider = Literal[
    "DATACRUNCH", "AWS", "AZURE", "GCP", "RUNPOD", "SCALETORCH", "ONPREM", "VASTAI", "SHADEFORM", "SCALEGENAI_OWN",
    "SCALEGENAI_PARTNER", "SCALEGENAI", "EXOSCALE",
]  # fmt: skip

LATENCIES = (Strategy.TTFT, Strategy.E2E)
STRATEGIES: dict[str, dict[str, tuple[Strategy, ...]]] = {
    "llm": {"vllm": tuple(Strategy), "nim": (Strategy.TTFT, Strategy.RPS), "friendli": (Strategy.TTFT, Strategy.RPS)},
    "embedding": {"tei": (Strategy.RPS,)},
}
"""The strategies of each engine, by the types of inference that are served here. The first engine is the default."""

_VARIANTS = ("", "_PCIE", "_SXM", "_PCIE_NVLINK", "_SXM_NVLINK")
GPU_TYPES = frozenset(
    [f"{family}{variant}" for family in ("A100", "A100_80GB", "H100_80GB", "H200") for variant in _VARIANTS]
) | frozenset(
    [
        "A10G",
        "A30",
        "A40",
        "GH201",
        "K80",
        "L4",
        "L40",
        "L40S",
        "M60",
        "P40",
        "P100",
        "RTX_3070",
        "RTX_3080",
        "RTX_3080_TI",
        "RTX_3090",
        "RTX_3090_TI",
        "RTX_4000",
        "RTX_4070",
        "RTX_4070_TI",
        "RTX_4080",
        "RTX_4090",
        "RTX_6000_ADA",
        "RTX_A2000",
        "RTX_A4000",
        "RTX_A4500",
        "RTX_A5000",
        "RTX_A6000",
        "T4",
        "V100",
        "V520",
    ]
)
"""The accelerators that the vendor names. Others are kept, with a warning."""

MOST_STARTED = 64
"""Of workers, which the vendor's API lets a request start, or keep, at once."""
MAX_TEXT = 2048
MAX_ENTRIES = 256


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(max_length=MAX_ENTRIES)]
Whole = Annotated[int, BeforeValidator(_no_flag)]
Number = Annotated[float, BeforeValidator(_no_flag), Field(ge=0, allow_inf_nan=False)]
Timeout = Annotated[Whole, Field(ge=0, le=LONGEST_S)]
Window = Annotated[Whole, Field(ge=1, le=LONGEST_S)]


class Section(BaseModel):
    """An object of the body; fields that it does not know are in `model_extra`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}


class CloudProvider(Section):
    """A cloud on which workers may run, and its regions; none is any."""

    name: Provider
    regions: Texts = []

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data


class WorkerConfig(Section):
    """`initial_worker_config`: the number and placement of workers."""

    min_workers: Annotated[Whole, Field(ge=0, le=MOST_STARTED)] = 0
    initial_workers_gpu: Annotated[str, Field(max_length=64)] | None = None
    initial_workers_gpu_num: Annotated[Whole, Field(ge=0, le=64)] | None = None
    use_other_gpus: StrictBool = False
    instance_types: Texts = []
    use_on_prem: StrictBool = False
    use_cloudburst: StrictBool = False
    on_prem_node_ids: Texts = []
    expand_gpu_types: StrictBool = True
    max_workers: Annotated[Whole, Field(ge=1, le=MAX_WORKERS)] = 100
    wait_for_preprov_nodes: StrictBool = False


class AutoscalingConfig(Section):
    """`autoscaling_config`: windows and timeouts in seconds; thresholds in seconds, or in requests per second and worker."""

    scale_up_time_window_sec: Window = 300
    scale_down_time_window_sec: Window = 300
    scaling_up_timeout_sec: Timeout = 1200
    scaling_down_timeout_sec: Timeout = 1200
    scale_to_zero_timeout_sec: Timeout = 1800
    enable_speedup_shared: StrictBool = False
    enable_fast_autoscaling: StrictBool = False
    scale_to_zero: StrictBool = False
    autoscaling_strategy: Strategy = Strategy.TTFT
    upper_allowed_threshold: Number = 1.0
    lower_allowed_threshold: Number = 0.2
    upper_allowed_latency_sec: Number = 1.0
    lower_allowed_latency_sec: Number = 0.2


class ApiGatewayData(Section):
    """`api_gateway_data`; kept and returned."""

    provider: Provider
    region: Text | None = None
    api_id: Text | None = None
    hash_value: Text | None = None
    endpoint: Text | None = None


class CloudController(Section):
    """`controller_cloud_config`; kept and returned, as nothing is provisioned for it here."""

    public_url: StrictBool = True
    use_ssl: StrictBool = True
    use_api_gateway: StrictBool = False
    vpc_id: Text | None = None
    cloud_provider: Provider
    region: Text
    api_gateway_data: ApiGatewayData | None = None


class OnPremController(Section):
    """`controller_on_prem_config`; kept and returned."""

    use_ssl: StrictBool = True
    on_prem_node_id: Text | None = None


class Lora(Section):
    """An adapter: a hub id or a directory, and the token to fetch it with, which is never stored."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    hf_repo: Annotated[str, Field(min_length=1, max_length=512)]
    hf_token: Text | None = Field(None, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _source_is_repo(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if name != "error"}  # of answers only
        if data.get("src") is not None:
            source = data.pop("src")
            if data.get("hf_repo") is None:
                data["hf_repo"] = source
        return data


class UpdateIn(Section):
    """What an update may change."""

    allow_spot_instances: StrictBool = False
    initial_worker_config: WorkerConfig = Field(default_factory=WorkerConfig)
    autoscaling_config: AutoscalingConfig = Field(default_factory=AutoscalingConfig)
    max_price_per_hour: Number | None = None
    min_throughput_rate: Number | None = None
    llm_loras: Annotated[list[Lora], Field(max_length=MAX_ENTRIES)] = []


class DeploymentIn(UpdateIn):
    """The body of a create."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    model: Annotated[str, Field(min_length=1, max_length=512)]
    base_model: Text | None = None
    inf_type: InferenceType = "llm"
    hf_token: Text | None = Field(None, repr=False)
    engine: Engine | None = None
    custom_chat_template: Annotated[str, Field(max_length=65_536)] | None = None
    logs_store: Text | None = None
    cloud_providers: Annotated[list[CloudProvider], Field(max_length=MAX_ENTRIES)] = []
    controller_cloud_config: CloudController | None = None
    controller_on_prem_config: OnPremController | None = None
    max_model_len: Annotated[Whole, Field(ge=0, le=1 << 24)] | None = None
    throughput_optimized: StrictBool = False
    agentic_deployment: StrictBool = False
    vllm_extra_args: Annotated[str, Field(max_length=8192)] | None = None


class ScaleUpIn(Section):
    """The body of a scale-up, which may be absent."""

    vm_num: Annotated[Whole, Field(ge=1, le=MOST_STARTED)] = 1


SERVED_TYPES = tuple(STRATEGIES)
