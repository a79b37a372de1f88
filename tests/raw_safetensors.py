"""A safetensors file taken apart by its format alone: neither the package's reader nor a library's type conversions."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np

_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}


def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (type, shape, bytes). Eight bytes of length, a JSON header of offsets, then the values."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[start + entry["data_offsets"][0] :][: _length(entry)])
        for name, entry in header.items()
    }


def _length(entry) -> int:
    return entry["data_offsets"][1] - entry["data_offsets"][0]


def read_folder(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All tensors of a folder, of its shards too."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= read(path)
    return tensors


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Name -> array, writable."""
    return {
        name: np.frombuffer(values, _TYPES[kind]).reshape(shape).copy()
        for name, (kind, shape, values) in read(path).items()
    }


def sha256(tensors: dict) -> dict[str, str]:
    """Name -> hash of a tensor's type, shape and bytes."""
    return {
        name: hashlib.sha256(f"{kind} {list(shape)} ".encode() + values).hexdigest()
        for name, (kind, shape, values) in sorted(tensors.items())
    }
