"""How vectors are written: as numbers, as base64 or as bytes, in five types of numbers and two orders of bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from inference.errors import InvalidRequest
from inference.http.exchange import Response
from inference.http.offload import encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

FORMATS = ("float", "base64", "bytes", "bytes_only")
ENDIANNESS: dict[str, Literal["<", ">"]] = {"native": "<", "little": "<", "big": ">"}
"""All supported machines are little-endian; the documentation says what "native" means."""


class Written(Protocol):
    """The fields of a body that say how its vectors are written."""

    encoding_format: str | None
    embed_dtype: str | None
    endianness: str | None


class VectorWriter:
    """Writes vectors as one body asks for; raises InvalidRequest for values that do not exist.

    The bracketed words of the refusals are pydantic's types of errors, which vLLM's clients search for.
    """

    def __init__(self, body: Written) -> None:
        self.format = _chosen("encoding_format", body.encoding_format or "float", FORMATS)
        self._dtype = _chosen("embed_dtype", body.embed_dtype or "float32", tuple(DTYPES))
        self._endianness = _chosen("endianness", body.endianness or "native", tuple(ENDIANNESS))

    @property
    def in_bytes(self) -> bool:
        """Whether the response is made of bytes instead of JSON."""
        return self.format.startswith("bytes")

    def rows(self, vectors: np.ndarray, kind: str, key: str) -> msgspec.Raw:
        """`data` of a JSON response for vectors [inputs, dimensions] float32; each is called `key` in an object `kind`."""
        return encoded(self._rows(vectors, kind, key), 1)

    def response(self, vectors: np.ndarray, facts: dict[str, Any]) -> Response:
        """The vectors one after the other; `facts` and where each one is are in the header `metadata`, if the format asks
        for it.
        """
        rows = [self._raw(vector) for vector in vectors]
        if self.format == "bytes_only":
            return Response(200, b"".join(rows), b"application/octet-stream")
        items, start = [], 0
        for index, row in enumerate(rows):
            items.append({"index": index, "embed_dtype": self._dtype, "endianness": self._endianness,
                          "start": start, "end": start + len(row), "shape": [vectors.shape[1]]})  # fmt: skip
            start += len(row)
        metadata = json.dumps({**facts, "data": items}).encode()
        return Response(200, b"".join(rows), b"application/octet-stream", [(b"metadata", metadata)])

    def _rows(self, vectors: np.ndarray, kind: str, key: str) -> Iterator[dict[str, Any]]:
        for index, vector in enumerate(vectors):
            value = vector.tolist() if self.format == "float" else base64.b64encode(self._raw(vector)).decode()
            yield {"index": index, "object": kind, key: value}

    def _raw(self, vector: np.ndarray) -> bytes:
        numbers = DTYPES[self._dtype](vector)
        return numbers.astype(numbers.dtype.newbyteorder(ENDIANNESS[self._endianness])).tobytes()


def _chosen(field: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        text = f"{field} must be one of {', '.join(allowed)}, got {value[:40]!r} (literal_error)."
        raise InvalidRequest(text, field)
    return value


def bfloat16(vector: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded to nearest, ties to even, as uint16."""
    bits = vector.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Float8:
    """A type of one byte: a sign, `exponent` bits and `fraction` bits. Numbers that are too large become the code `largest`."""

    def __init__(self, exponent: int, fraction: int, largest: int) -> None:
        codes = np.arange(largest + 1)
        power, part = codes >> fraction, codes & ((1 << fraction) - 1)
        least = 2 - (1 << (exponent - 1))  # the exponent of subnormal numbers
        whole = np.where(power == 0, 0.0, 1.0)
        values = (whole + part / (1 << fraction)) * np.exp2(np.maximum(power - 1, 0) + least)
        self._middles = (values[1:] + values[:-1]) / 2

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """The codes of float32 numbers, rounded to nearest, ties to even."""
        sizes = np.abs(vector).astype(np.float64)
        codes = np.searchsorted(self._middles, sizes)
        middle = self._middles[np.minimum(codes, len(self._middles) - 1)]
        codes += (middle == sizes) & (codes % 2 == 1)
        return (codes | (np.signbit(vector).astype(np.int64) << 7)).astype(np.uint8)


DTYPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda vector: vector,
    "float16": lambda vector: vector.astype(np.float16),
    "bfloat16": bfloat16,
    "fp8_e4m3": Float8(4, 3, 0x7E),  # 448, since the type has no infinity
    "fp8_e5m2": Float8(5, 2, 0x7C),  # infinity
}
