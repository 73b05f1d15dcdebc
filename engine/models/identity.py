"""A digest by which workers tell whether they serve the same model, made without reading most of its weights."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from engine.models.files import weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

SAMPLES = 4
SAMPLE_BYTES = 256
"""The samples of each tensor and their size. They tell two models apart, because training changes every number of a tensor."""
BY_ROW = re.compile(r"embed|wte|lm_head|output")
"""Tensors of which training may change a few rows alone, those of new tokens."""
ROW_BYTES = 16
"""What counts of each of their rows."""
PART_BYTES = 4 << 20


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
            tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
            for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
                start, end = entry["data_offsets"]
                for sample in range(SAMPLES):
                    file.seek(begin + start + (end - start) * sample // SAMPLES)
                    digest.update(file.read(min(SAMPLE_BYTES, end - start)))
                if len(entry["shape"]) == 2 and start < end and BY_ROW.search(name):
                    file.seek(begin + start)
                    for begins in _begins_of_rows(file, entry["shape"][0], (end - start) // entry["shape"][0]):
                        digest.update(begins)
    return digest.hexdigest()


def _begins_of_rows(file: BinaryIO, rows: int, row_bytes: int) -> Iterator[bytes]:
    """The first ROW_BYTES of each row of the tensor that begins here, which is read and not mapped: the file may be replaced."""
    at_once = max(1, PART_BYTES // row_bytes)
    for first in range(0, rows, at_once):
        part = np.frombuffer(file.read(min(at_once, rows - first) * row_bytes), np.uint8)
        yield part.reshape(-1, row_bytes)[:, :ROW_BYTES].tobytes()
