"""MindIE's config.json: its keys, ranges and defaults, checked as a whole before startup.

Keys that this server does not use (kernels, NPU memory, log levels) are checked if their range is known and otherwise
ignored, so that a file written for MindIE can be used unchanged.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from inference.dialects.mindie.settings import MindieSettings
from inference.planes.declaration import SetupError

if TYPE_CHECKING:
    from pathlib import Path

    from inference.dialects.mindie.environment import MindieEnvironment

MAX_FILE_BYTES = 10 << 20
MODEL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?")
PathText = Annotated[str, Field(max_length=4096)]
Port = Annotated[int, Field(ge=1024, le=65535)]


class MindieConfigError(SetupError):
    """config.json, or an address `of_environment`, cannot be used; the text names the key and its range."""

    def __init__(self, message: str, *, of_environment: bool = False) -> None:
        super().__init__(message)
        self.of_environment = of_environment


class Strict(BaseModel):
    """Types are not coerced; unknown keys are ignored."""

    model_config = {"strict": True, "extra": "ignore", "frozen": True}


class HealthCheck(Strict):
    """`ServerConfig.HealthCheckConfig`."""

    npuUsageThreshold: int = Field(0, ge=0, le=100)


class Server(Strict):
    """Addresses, TLS and protocol settings."""

    ipAddress: str
    managementIpAddress: str = ""
    port: Port
    managementPort: Port | None = None
    metricsPort: Port
    allowAllZeroIpListening: bool
    maxLinkNum: int = Field(ge=1, le=4096)
    httpsEnabled: bool
    fullTextEnabled: bool = False
    tlsCaPath: str = "security/ca/"
    tlsCaFile: str | list[str] = ["ca.pem"]
    tlsCert: str = "security/certs/server.pem"
    tlsPk: str = "security/keys/server.key.pem"
    tlsPkPwd: PathText = "security/pass/key_pwd.txt"
    tlsCrlPath: str = "security/certs/"
    tlsCrlFiles: list[str] | None = None
    managementTlsCaFile: list[str] = ["management_ca.pem"]
    managementTlsCert: str = "security/certs/management/server.pem"
    managementTlsPk: str = "security/keys/management/server.key.pem"
    managementTlsPkPwd: PathText = "security/pass/management/key_pwd.txt"
    managementTlsCrlPath: str = "security/management/certs/"
    managementTlsCrlFiles: list[str] | None = None
    metricsTlsCaFile: list[str] = ["metrics_ca.pem"]
    metricsTlsCert: str = "security/certs/metrics/server.pem"
    metricsTlsPk: str = "security/keys/metrics/server.key.pem"
    metricsTlsPkPwd: PathText = "security/pass/metrics/key_pwd.txt"
    metricsTlsCrlPath: str = "security/metrics/certs/"
    metricsTlsCrlFiles: list[str] | None = None
    inferMode: Literal["standard", "dmi"]
    interCommTLSEnabled: bool = True
    interCommPort: Port = 1121
    interCommTlsCaPath: PathText = "security/grpc/ca/"
    interCommTlsCaFiles: list[str] = ["ca.pem"]
    interCommTlsCert: PathText = "security/grpc/certs/server.pem"
    interCommPk: PathText = "security/grpc/keys/server.key.pem"
    interCommPkPwd: PathText = "security/grpc/pass/key_pwd.txt"
    interCommTlsCrlPath: PathText = "security/grpc/certs/"
    interCommTlsCrlFiles: list[str] | None = None
    openAiSupport: str = "vllm"
    tokenTimeout: int = Field(ge=1, le=3600)
    e2eTimeout: int = Field(ge=1, le=65535)
    maxRequestLength: int = Field(40, ge=1, le=100)
    maxJsonDepth: int = Field(10, ge=10, le=100)
    HealthCheckConfig: HealthCheck = HealthCheck()

    @field_validator("ipAddress", "managementIpAddress")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value:
            ipaddress.ip_address(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Server:
        for key in ("ipAddress", "managementIpAddress"):
            address = getattr(self, key)
            if address and ipaddress.ip_address(address).is_unspecified and not self.allowAllZeroIpListening:
                raise ValueError(f"{key} {address} needs allowAllZeroIpListening to be true")
        if not 1 <= len(self.interCommTlsCaFiles) <= 3:
            raise ValueError("interCommTlsCaFiles must list 1 to 3 files")
        files = [self.tlsCaFile] if isinstance(self.tlsCaFile, str) else self.tlsCaFile
        if not 1 <= len(files) <= 3:
            raise ValueError("tlsCaFile must list 1 to 3 files")
        return self


class ModelEntry(Strict):
    """One model."""

    modelInstanceType: Literal["Standard", "StandardMock"] = "Standard"
    modelName: str
    modelWeightPath: str
    worldSize: int = Field(ge=1)
    cpuMemSize: int = Field(ge=0)
    npuMemSize: int = Field(ge=-1)
    backendType: Literal["atb", "torch", "ms"]
    trustRemoteCode: bool

    @model_validator(mode="after")
    def _check(self) -> ModelEntry:
        if not MODEL_NAME.fullmatch(self.modelName):
            raise ValueError(
                "modelName must have 1 to 256 letters, digits, '-', '.', '_', the last three not at its ends"
            )
        if self.trustRemoteCode:
            raise ValueError("trustRemoteCode true is not supported by this server: no model's own code is ever run")
        if self.modelInstanceType == "StandardMock":
            raise ValueError("modelInstanceType StandardMock is not supported by this server: it must be Standard")
        return self


class LoraModule(Strict):
    """An adapter that is loaded at startup."""

    name: str
    path: str
    baseModelName: str


class ModelDeploy(Strict):
    """Lengths, the model and its adapters."""

    maxSeqLen: int = Field(gt=0)
    maxInputTokenLen: int = Field(ge=1, le=4194304)
    truncation: bool | Literal[-1, 0, 1] = 0
    maxLoras: int = Field(0, ge=0)
    maxLoraRank: int = Field(0, ge=0)
    LoraModules: list[LoraModule] = []
    ModelConfig: list[ModelEntry]


class Schedule(Strict):
    """Batch sizes and limits."""

    templateType: Literal["Standard", "Mix"]
    templateName: str
    cacheBlockSize: int = Field(ge=1, le=128)
    maxPrefillBatchSize: int = Field(ge=0)
    maxPrefillTokens: int = Field(ge=1, le=4194304)
    prefillTimeMsPerReq: int = Field(ge=0, le=1000)
    prefillPolicyType: Literal[0]
    decodeTimeMsPerReq: int = Field(ge=0, le=1000)
    decodePolicyType: Literal[0]
    maxBatchSize: int = Field(ge=1, le=819200)
    maxIterTimes: int = Field(ge=1)
    maxPreemptCount: int = Field(ge=0)
    supportSelectBatch: bool
    maxQueueDelayMicroseconds: int = Field(ge=500, le=1000000)
    maxFirstTokenWaitTime: int = Field(2500, ge=0, le=3600000)
    maxN: int | None = Field(None, ge=1, le=8192)


class Backend(Strict):
    """The inference backend."""

    backendName: Literal["mindieservice_llm_engine"]
    modelInstanceNumber: int = Field(ge=1, le=10)
    npuDeviceIds: list[list[int]]
    tokenizerProcessNumber: int = Field(ge=1, le=32)
    ModelDeployConfig: ModelDeploy
    ScheduleConfig: Schedule

    @model_validator(mode="after")
    def _check(self) -> Backend:
        deploy, schedule = self.ModelDeployConfig, self.ScheduleConfig
        if len(deploy.ModelConfig) != 1:
            raise ValueError("ModelDeployConfig.ModelConfig must have exactly one entry")
        if any(deploy.ModelConfig[0].worldSize != len(cards) for cards in self.npuDeviceIds):
            raise ValueError("worldSize must equal the number of devices in npuDeviceIds")
        rules = (
            ("maxIterTimes", schedule.maxIterTimes, deploy.maxSeqLen, "maxSeqLen"),
            ("maxPrefillBatchSize", schedule.maxPrefillBatchSize, schedule.maxBatchSize, "maxBatchSize"),
            ("maxPreemptCount", schedule.maxPreemptCount, schedule.maxBatchSize, "maxBatchSize"),
            ("maxInputTokenLen", deploy.maxInputTokenLen, schedule.maxPrefillTokens, "maxPrefillTokens"),
            ("maxN", schedule.maxN or 1, schedule.maxBatchSize, "maxBatchSize"),
        )
        for name, value, limit, of in rules:
            if value > limit:
                raise ValueError(f"{name} must be at most {of}, which is {limit}, got {value}")
        if schedule.cacheBlockSize % 16:
            raise ValueError(f"cacheBlockSize must be a multiple of 16, got {schedule.cacheBlockSize}")
        if schedule.maxPreemptCount and not deploy.ModelConfig[0].cpuMemSize:
            raise ValueError("cpuMemSize must not be 0 where maxPreemptCount is not")
        return self


class MindieConfig(Strict):
    """The whole file."""

    Version: str = "1.0.0"
    ServerConfig: Server
    BackendConfig: Backend
    EnableDynamicAdjustTimeoutConfig: bool = False

    @property
    def model(self) -> ModelEntry:
        """The one model."""
        return self.BackendConfig.ModelDeployConfig.ModelConfig[0]

    @property
    def engine_options(self) -> dict[str, Any]:
        """The engine options of the deployment's workers."""
        deploy, schedule = self.BackendConfig.ModelDeployConfig, self.BackendConfig.ScheduleConfig
        options: dict[str, Any] = {
            "max_model_len": deploy.maxSeqLen,
            "max_num_seqs": min(schedule.maxBatchSize, 4096),
            "max_num_batched_tokens": min(schedule.maxPrefillTokens, 1 << 20),
            "block_size": schedule.cacheBlockSize,
        }
        if deploy.maxLoraRank:
            options["max_adapter_rank"] = deploy.maxLoraRank
        return options


def read_config(path: Path) -> MindieConfig:
    """Read and check the file; raises MindieConfigError."""
    try:
        size = path.stat().st_size
        if not 0 < size <= MAX_FILE_BYTES:
            raise MindieConfigError(f"{path}: its size must be in (0, 10 MB], it is {size} bytes")
        return MindieConfig.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise MindieConfigError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MindieConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        given = first["input"]  # an object where the rule is about several of its keys, which the message names
        got = "" if isinstance(given, dict) else f", got {str(given)[:100]}"
        raise MindieConfigError(f"{path}: {key}: {first['msg']}{got}") from error


def wire_settings(
    config: MindieConfig | None, environment: MindieEnvironment, management_address: str
) -> MindieSettings:
    """The handlers' settings, from the file and MindIE's environment variables."""
    window = environment.average_window
    common: dict[str, Any] = {
        "metrics_enabled": environment.monitor_mode == "1",
        "benchmark_enabled": environment.benchmark in ("1", "2"),
        "async_scheduling": environment.async_scheduling == "1",
        "average_window": int(window) if window.isdigit() and int(window) > 0 else 1000,
        "management_address": management_address,
    }
    if config is None:
        return MindieSettings(**common)
    server, backend = config.ServerConfig, config.BackendConfig
    deploy, schedule = backend.ModelDeployConfig, backend.ScheduleConfig
    raised = config.EnableDynamicAdjustTimeoutConfig
    return MindieSettings(
        open_ai_support=server.openAiSupport,
        full_text_enabled=server.fullTextEnabled,
        token_timeout_s=3600 if raised else server.tokenTimeout,
        e2e_timeout_s=65535 if raised else server.e2eTimeout,
        max_request_length_mib=server.maxRequestLength,
        max_json_depth=server.maxJsonDepth,
        max_iter_times=schedule.maxIterTimes,
        max_input_token_len=deploy.maxInputTokenLen,
        truncation=-1 if deploy.truncation is True else int(deploy.truncation),
        max_batch_size=schedule.maxBatchSize,
        max_prefill_batch_size=schedule.maxPrefillBatchSize or schedule.maxBatchSize,
        max_prefill_tokens=schedule.maxPrefillTokens,
        max_n=schedule.maxN or min(128, schedule.maxBatchSize),
        prefill_policy_type=schedule.prefillPolicyType,
        decode_policy_type=schedule.decodePolicyType,
        npu_mem_size=config.model.npuMemSize,
        cpu_mem_size=config.model.cpuMemSize,
        world_size=config.model.worldSize,
        max_loras=deploy.maxLoras,
        model_weights=(config.model.modelName, PurePath(config.model.modelWeightPath).name),
        **common,
    )
