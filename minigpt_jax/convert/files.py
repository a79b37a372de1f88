"""A checkpoint folder's files: `config.json`, and safetensors in one file or in shards.

Tensors are read one at a time, each through a memory map of its own: pages of a map that stays open would count as
this process's memory until the last tensor.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (safetensors' bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import InputError, replacing, require

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_json(path: Path) -> dict:
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}; give a folder in Hugging Face's layout") from None
    except ValueError:
        raise InputError(f"{path}: not JSON in UTF-8; fetch the file again") from None
    require(isinstance(tree, dict), f"{path} holds {type(tree).__name__}; it must map names to values")
    return tree


class StoredTensor(NamedTuple):
    """One tensor's place, shape and type, as its file's header says."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def dtype(self) -> str:
        """Asked for of weights alone: old files carry masks along as buffers, of bool or uint8."""
        known = ", ".join(_DTYPES.values())
        require(self.kind in _DTYPES, f"{self.file}: {self.name} is stored as {self.kind}; this package reads {known}")
        return _DTYPES[self.kind]

    def read(self) -> np.ndarray:
        """A copy of the values."""
        try:
            with safe_open(self.file, "np") as opened:
                return opened.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.file}: {self.name} can't be read: {error}; fetch the file again") from None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by name: headers alone."""
    stored = {}
    for file in _files(folder):
        try:
            with safe_open(file, "np") as opened:
                for name in opened.keys():
                    require(name not in stored, f"{file}: {name} is in another shard too; fetch them again")
                    piece = opened.get_slice(name)
                    stored[name] = StoredTensor(file, name, tuple(piece.get_shape()), piece.get_dtype())
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: not a whole safetensors file: {error}; fetch it again") from None
    return stored


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        require(isinstance(places, dict) and bool(places), f"{folder / INDEX} has no weight_map; fetch it again")
        names = sorted(set(map(str, places.values())))
        strange = [name for name in names if Path(name).name != name]
        require(not strange, f"{folder / INDEX} names {', '.join(strange[:3])}, which is no file of this folder")
        files = [folder / name for name in names]
        gone = [file.name for file in files if not file.is_file()]
        require(not gone, f"{folder} lacks the shards {', '.join(gone)} that {INDEX} names; fetch them")
        return files
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    require(
        not pickles,
        f"{folder} holds its weights as a pickle ({', '.join(pickles[:3])}), which can run any code when it is read; "
        f"get the model's {WEIGHTS}, or write one with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
    )
    raise InputError(f"{folder} has no {WEIGHTS}; give a folder in Hugging Face's layout")


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """One `model.safetensors`, in the order and with the metadata that transformers writes."""
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}  # else bytes in another order
    with replacing(folder / WEIGHTS) as file:
        mode = os.fstat(file.fileno()).st_mode
        save_file(whole, file.name, metadata={"format": "pt"})
        os.chmod(file.name, mode)  # which safetensors narrows to the owner alone


def write_json(path: Path, tree: dict) -> None:
    with replacing(path) as file:
        file.write(json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n")
