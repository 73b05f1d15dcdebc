"""The environment variables of MindIE's planes: this server's own, and those that MindIE itself reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field

from inference.planes.declaration import DialectSettings

CONFIG_VARIABLES = ("DRAGOMAN_MINDIE_CONFIG", "MIES_CONFIG_JSON_PATH")
"""The variables that name a config.json; the first that is set counts."""


class MindieEnvironment(DialectSettings):
    """DRAGOMAN_MINDIE_*, and MindIE's variables under their own names."""

    mindie_port: int = Field(1025, ge=0, le=65535, description="Port of MindIE's service plane; 0 switches it off.")
    mindie_management_port: int = Field(1026, ge=0, le=65535, description="Port of MindIE's management plane.")
    mindie_metrics_port: int = Field(1027, ge=0, le=65535, description="Port of MindIE's metrics plane.")
    mindie_config: Path | None = Field(
        None,
        validation_alias=AliasChoices(*CONFIG_VARIABLES),
        description="Path of a MindIE config.json; its addresses, limits, TLS files and model are used.",
    )
    mindie_infer_mode: Literal["standard", "dmi"] = Field(
        "standard", description="`dmi`: MindIE's instance with a role, without a config.json; on loopback only."
    )
    mindie_inter_comm_port: int = Field(
        1121, ge=1024, le=65535, description="Port for calls between MindIE's instances with roles."
    )
    address: str = Field(
        "", validation_alias="MIES_CONTAINER_IP", description="Address of the service plane; overrides config.json."
    )
    management_address: str = Field(
        "",
        validation_alias="MIES_CONTAINER_MANAGEMENT_IP",
        description="Address of the management and metrics planes; overrides config.json.",
    )
    monitor_mode: str = Field(
        "", validation_alias="MIES_SERVICE_MONITOR_MODE", description="1 serves the metrics plane's metrics."
    )
    benchmark: str = Field(
        "", validation_alias="MINDIE_LLM_BENCHMARK_ENABLE", description="1 or 2 adds times and batch sizes to answers."
    )
    async_scheduling: str = Field(
        "", validation_alias="MINDIE_ASYNC_SCHEDULING_ENABLE", description="1 refuses several sequences for a prompt."
    )
    average_window: str = Field(
        "", validation_alias="DYNAMIC_AVERAGE_WINDOW_SIZE", description="Requests that /metrics-json averages over."
    )

    @property
    def config_variable(self) -> str:
        """The variable that named the config.json."""
        return next((name for name in CONFIG_VARIABLES if os.environ.get(name)), CONFIG_VARIABLES[0])
