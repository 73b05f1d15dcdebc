"""A digest by which workers tell whether they serve the same model, made without reading all of its weights."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

from engine.models.files import weight_files

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 4
SAMPLE_BYTES = 256
"""The samples of each tensor and their size. They tell two models apart, because training changes every number of a tensor."""


def model_digest(directory: Path, quantization: str) -> str:
    """The digest of a loaded model: its configuration, the names and shapes of its tensors, samples of their numbers, and how
    they are stored. Raises OSError, ValueError or ModelError if the files are no longer those that were loaded.
    """
    digest = sha256(quantization.encode() + b"\0")
    digest.update((directory / "config.json").read_bytes())
    for shard in weight_files(directory):
        with shard.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            begin = 8 + len(header)
            tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
            for start, end in sorted(tensors):
                for sample in range(SAMPLES):
                    file.seek(begin + start + (end - start) * sample // SAMPLES)
                    digest.update(file.read(min(SAMPLE_BYTES, end - start)))
    return digest.hexdigest()
