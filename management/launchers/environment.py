"""What a worker may know of the server's environment: variables of libraries, never the server's own secrets.

A worker computes what clients send, so it is told nothing that it has no use for: the database's password, the keys of
clouds and whatever else stands in the environment of the server stay there.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP",
        "VIRTUAL_ENV", "NO_COLOR", "TERM", "CC", "CXX",
        # how the hub is reached
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GLIBC_TUNABLES",
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
"""HF_TOKEN is a secret, and the one that a worker needs: it fetches gated models."""


MEMORY = "/dev/shm"


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker is started with; proxies' names count in lower case too."""
    chosen = {
        name: value
        for name, value in environment.items()
        if name in NAMES
        or name.startswith(PREFIXES)
        or (name.islower() and name.endswith("_proxy") and name.upper() in NAMES)
    }
    if not _can_write_temporary_files() and os.access(MEMORY, os.W_OK):
        chosen["TMPDIR"] = MEMORY  # the disk is full; libraries refuse to be imported without a place for files
    return chosen


def _can_write_temporary_files() -> bool:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError:
        return False
    return True
