"""A config.json as MindIE ships it, pointed at the demo model, with changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tests.conftest import DEMO

SHIPPED: dict[str, Any] = {
    "Version": "1.0.0",
    "ServerConfig": {
        "ipAddress": "127.0.0.1", "managementIpAddress": "127.0.0.1", "port": 1025, "managementPort": 1026,
        "metricsPort": 1027, "allowAllZeroIpListening": False, "maxLinkNum": 1000, "httpsEnabled": False,
        "fullTextEnabled": False, "tlsCaPath": "security/ca/", "tlsCaFile": ["ca.pem"],
        "tlsCert": "security/certs/server.pem", "tlsPk": "security/keys/server.key.pem", "inferMode": "standard",
        "interCommTLSEnabled": True, "interCommPort": 1121, "openAiSupport": "vllm", "tokenTimeout": 600,
        "e2eTimeout": 600, "distDPServerEnabled": False,
    },
    "BackendConfig": {
        "backendName": "mindieservice_llm_engine", "modelInstanceNumber": 1, "npuDeviceIds": [[0]],
        "tokenizerProcessNumber": 8, "multiNodesInferEnabled": False,
        "ModelDeployConfig": {
            "maxSeqLen": 512, "maxInputTokenLen": 400, "truncation": 0,
            "ModelConfig": [{
                "modelInstanceType": "Standard", "modelName": "llama_65b", "modelWeightPath": str(DEMO), "worldSize": 1,
                "cpuMemSize": 0, "npuMemSize": -1, "backendType": "atb", "trustRemoteCode": False,
            }],
        },
        "ScheduleConfig": {
            "templateType": "Standard", "templateName": "Standard_LLM", "cacheBlockSize": 128,
            "maxPrefillBatchSize": 8, "maxPrefillTokens": 400, "prefillTimeMsPerReq": 150, "prefillPolicyType": 0,
            "decodeTimeMsPerReq": 50, "decodePolicyType": 0, "maxBatchSize": 16, "maxIterTimes": 64,
            "maxPreemptCount": 0, "supportSelectBatch": False, "maxQueueDelayMicroseconds": 5000,
        },
    },
}  # fmt: skip
SECTIONS = {
    "server": ("ServerConfig",),
    "backend": ("BackendConfig",),
    "deploy": ("BackendConfig", "ModelDeployConfig"),
    "schedule": ("BackendConfig", "ScheduleConfig"),
}


def write(directory: Path, **changes: dict[str, Any]) -> Path:
    """conf/config.json below `directory`; `server={...}` and the like change a section, None removes a key."""
    config = copy.deepcopy(SHIPPED)
    for section, values in changes.items():
        part: Any = config
        if section == "model":
            part = config["BackendConfig"]["ModelDeployConfig"]["ModelConfig"][0]
        else:
            for key in SECTIONS[section]:
                part = part[key]
        part.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del part[key]
    path = directory / "conf" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path
