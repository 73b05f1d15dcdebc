"""Tensors of the v2 protocol: datatypes, JSON form and binary form."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.errors import InvalidRequest

DTYPES: dict[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2",
}  # fmt: skip
DATATYPES = (*DTYPES, "BYTES")
BINARY_ONLY = ("FP16", "BF16")
MAX_ELEMENTS = 1 << 20
MAX_RANK = 16


@dataclass(slots=True)
class Tensor:
    """`values` are the elements in row-major order: numbers, booleans, or texts for BYTES."""

    name: str
    datatype: str
    shape: list[int]
    values: list[Any]


def check_shape(name: str, datatype: Any, shape: Any) -> int:
    """The number of elements of the shape; raises InvalidRequest."""
    if datatype not in DATATYPES:
        raise InvalidRequest(f"unsupported datatype '{str(datatype)[:40]}' for input '{name}'", "inputs")
    whole = isinstance(shape, list) and all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in shape)
    if not whole:
        raise InvalidRequest(f"the shape of input '{name}' must be a list of non-negative integers", "inputs")
    if len(shape) > MAX_RANK:
        raise InvalidRequest(f"the shape of input '{name}' must have at most {MAX_RANK} dimensions", "inputs")
    count = 1
    for dimension in shape:
        count *= min(dimension, MAX_ELEMENTS + 1)  # keeps the product small
    if count > MAX_ELEMENTS:
        raise InvalidRequest(f"input '{name}' must have at most {MAX_ELEMENTS} elements", "inputs")
    return count


def from_json(name: str, datatype: Any, shape: Any, data: Any) -> Tensor:
    """A tensor whose `data` is flat or nested lists."""
    count = check_shape(name, datatype, shape)
    if datatype in BINARY_ONLY:
        raise InvalidRequest(f"input '{name}': datatype {datatype} has no JSON form; send binary data", "inputs")
    if not isinstance(data, list):
        raise InvalidRequest(f"unable to parse 'data' of input '{name}': it must be a list", "inputs")
    values = _flat(data)
    if len(values) != count:
        text = f"unable to parse 'data' of input '{name}': got {len(values)} elements, expected {count}"
        raise InvalidRequest(text, "inputs")
    if not _all_fit(values, datatype):
        wrong = next(value for value in values if not _all_fit([value], datatype))
        text = f"unable to parse 'data' of input '{name}': {str(wrong)[:40]!r} is no {datatype}"
        raise InvalidRequest(text, "inputs")
    return Tensor(name, datatype, shape, values)


def from_bytes(name: str, datatype: Any, shape: Any, raw: bytes | memoryview) -> Tensor:
    """A tensor from its little-endian bytes."""
    count = check_shape(name, datatype, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, _texts(name, bytes(raw), count))
    dtype = np.dtype(DTYPES[datatype])
    if len(raw) != count * dtype.itemsize:
        text = f"input '{name}': got {len(raw)} bytes, expected {count * dtype.itemsize} for its shape and datatype"
        raise InvalidRequest(text, "inputs")
    array = np.frombuffer(raw, dtype)
    if datatype == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    return Tensor(name, datatype, shape, array.tolist())


def to_bytes(tensor: Tensor) -> bytes:
    """The little-endian bytes of a tensor."""
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(raw)) + raw for raw in (str(v).encode() for v in tensor.values))
    return np.asarray(tensor.values, DTYPES[tensor.datatype]).tobytes()


def _flat(data: list[Any]) -> list[Any]:
    """The elements in row-major order; the depth of bodies is limited earlier."""
    if not any(isinstance(item, list) for item in data):
        return data
    values: list[Any] = []
    for item in data:
        values += _flat(item) if isinstance(item, list) else [item]
    return values


def _all_fit(values: list[Any], datatype: str) -> bool:
    """Whether every value is of the datatype; without a Python loop, because tensors of token ids are long."""
    kinds = set(map(type, values))
    if datatype == "BYTES":
        return kinds <= {str}
    if datatype == "BOOL":
        return kinds <= {bool}
    if datatype.startswith("FP"):
        return kinds <= {int, float}
    limits = np.iinfo(DTYPES[datatype])
    return kinds <= {int} and (not values or (limits.min <= min(values) and max(values) <= limits.max))


def _texts(name: str, raw: bytes, count: int) -> list[str]:
    texts: list[str] = []
    at = 0
    while at < len(raw) and len(texts) <= count:  # one element too many is enough for the error
        if at + 4 > len(raw) or at + 4 + (length := struct.unpack_from("<I", raw, at)[0]) > len(raw):
            raise InvalidRequest(f"input '{name}': the bytes end inside an element", "inputs")
        try:
            texts.append(raw[at + 4 : at + 4 + length].decode())
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"input '{name}': an element is not valid UTF-8", "inputs") from error
        at += 4 + length
    if len(texts) != count:
        raise InvalidRequest(f"input '{name}': its bytes do not hold {count} elements", "inputs")
    return texts
