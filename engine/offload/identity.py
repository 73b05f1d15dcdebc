"""What must be equal, besides a block's tokens, adapter and salt, for its bytes to mean the same in another process: the model's files, the type
and layout of the cache, and what computes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch
import transformers
from llvmlite.binding import get_host_cpu_features

from engine.offload.block_file import VERSION
from engine.process.progress import progress

if TYPE_CHECKING:
    from pathlib import Path

    from engine.config import EngineConfig
    from engine.models.prepared import Prepared

IDENTITY_BYTES = 16
MEMO_PREFIX = "model-"
"""Files in the tier's folder that remember the digest of a model's files, which takes a second for every GB."""


def identity_of(config: EngineConfig, prepared: Prepared, root: Path) -> bytes:
    """The identity of the blocks that this worker computes. `root` is the tier's folder. Raises OSError if the model's files
    cannot be read any more.
    """
    loaded, cache = prepared.loaded, prepared.cache
    facts: dict[str, Any] = {
        "format": VERSION,
        "model": model_digest(loaded.directory, root),
        "quantization": config.quantization,
        "block_size": cache.block_size,
        "parts": [[str(t.dtype), *t.shape[1:]] for pair in zip(cache.keys, cache.values, strict=True) for t in pair],
        "cache": [type(cache).__qualname__, cache.order],
        "forward": getattr(loaded.forward, "__qualname__", type(loaded.forward).__qualname__),
        "machine": _machine(cache.keys[0].device),
        "libraries": [torch.__version__, transformers.__version__],
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=IDENTITY_BYTES).digest()


def model_digest(directory: Path, root: Path) -> str:
    """The SHA-256 of the model's weights and configuration. It is computed again when the system's status of a file differs."""
    paths = [*sorted(directory.glob("*.safetensors")), *sorted(directory.glob("*.json"))]
    states = [os.stat(path) for path in paths]
    status = repr([(p.name, s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns) for p, s in zip(paths, states, strict=True)])
    memo = root / (MEMO_PREFIX + hashlib.sha256(f"{directory}\n{status}".encode()).hexdigest())
    try:
        return memo.read_bytes().decode("ascii")
    except (OSError, ValueError):
        pass
    whole = hashlib.sha256()
    for path in paths:
        progress.begin("computing the model's digest", os.path.getsize(path) / 1e8)
        with path.open("rb") as file:
            whole.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    digest = whole.hexdigest()
    try:
        unfinished = memo.with_suffix(f".{os.urandom(8).hex()}")
        unfinished.write_text(digest)
        unfinished.rename(memo)
    except OSError:
        pass  # the next start computes it again
    return digest


def _machine(device: torch.device) -> list[str]:
    """What decides how the device rounds."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    return sorted(name for name, has in get_host_cpu_features().items() if has)
