"""Filters the environment of a worker: an allow-list of variables that libraries read.

A worker processes clients' input, so it gets no secrets that it does not need: database passwords, cloud keys and all
other variables of the server are left out.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from engine import faults

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP",
        "VIRTUAL_ENV", "NO_COLOR", "TERM", "CC", "CXX",
        # access to the hub
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GLIBC_TUNABLES",
        # fault points (engine.faults), which no release configuration has
        faults.VARIABLE, faults.SWITCH,
    }
)  # fmt: skip
PREFIXES = (
    "LC_", "LD_", "XDG_", "PYTHON", "MALLOC_",
    # threads and kernels
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_", "NUMBA_", "RAYON_",
    # torch and devices
    "TORCH", "PYTORCH_", "INDUCTOR_", "TRITON_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_",
    # models
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_",
)  # fmt: skip
"""HF_TOKEN is the one secret among them: gated models are fetched with it."""


MEMORY = "/dev/shm"


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker is started with. Proxy variables are also accepted in lower case."""
    chosen = {
        name: value
        for name, value in environment.items()
        if name in NAMES
        or name.startswith(PREFIXES)
        or (name.islower() and name.endswith("_proxy") and name.upper() in NAMES)
    }
    if not _can_write_temporary_files() and os.access(MEMORY, os.W_OK):
        chosen["TMPDIR"] = MEMORY  # the disk is full, and some libraries need a temporary folder at import
    return chosen


def _can_write_temporary_files() -> bool:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError:
        return False
    return True
