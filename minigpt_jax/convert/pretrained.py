"""Checkpoints of Hugging Face's layout as our params, config and tokenizer, and back. torch is not needed."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..data import Tokenizer, load_pretrained_tokenizer, write_pretrained_tokenizer
from ..errors import InputError, require
from ..functional import abstract_params, check_params
from ..trees import leaf_paths, nested
from .families import BUFFERS, GPT2, Family, family_of, family_that_fits
from .files import CONFIG, StoredTensor, read_json, stored_tensors, write_json, write_tensors


class Pretrained(NamedTuple):
    """What `load_pretrained` gives."""

    params: dict
    config: ModelConfig
    tokenizer: Tokenizer | None
    """None where the folder has none."""


def pretrained_config(folder: str | Path) -> ModelConfig:
    """The `config.json` of a folder, as far as it says: the types of the weights are in their own file."""
    return _read_config(_folder(folder))[1]


def load_pretrained(folder: str | Path, *, tied: bool | None = None, param_dtype: str | None = None) -> Pretrained:
    """Params, config and tokenizer of a folder with `config.json` and safetensors (one file, or shards and an index).

    Families: GPT-2, Llama, Qwen2, Qwen3, Gemma, GPT-NeoX. Parameters keep the file's type, or take `param_dtype`;
    where a file mixes types they take the narrowest that holds all. Computation is in float32 (`config.dtype`).

    Whether one table serves both ends follows from `tie_word_embeddings` and from the file:

        flag     head in the file      outcome
        true     absent                tied
        true     equal to the table    tied
        true     differs               InputError; `tied=False` loads both tables
        false    there                 untied
        false    absent                InputError; `tied=True` loads the one table

    A tied file may hold its table under the head's name alone. `tied` stands in for the flag.

    Raises `InputError` for options that the model lacks, for missing or unknown tensors, wrong shapes and pickles.
    Memory: the parameters, and one tensor more.
    """
    folder = _folder(folder)
    tokenizer = load_pretrained_tokenizer(folder)
    return Pretrained(*_load(folder, tied, param_dtype), tokenizer)


def save_pretrained(folder: str | Path, params, config: ModelConfig, tokenizer: Tokenizer | None = None) -> list[str]:
    """Write a folder that `transformers` loads: `config.json`, `model.safetensors`, and the tokenizer's files.

    A tied table is stored once, under the lookup's name, as transformers does. Raises `InputError` where no family has
    the config's options, and where the folder holds a model already. Returns notes on what could not be written.
    """
    return _save(Path(folder), params, config, tokenizer, family_that_fits(config))


def load_gpt2(folder: str | Path) -> tuple[dict, ModelConfig]:
    """As `load_pretrained`, for GPT-2 alone: params and config, whatever tokenizer there is."""
    folder = _folder(folder)
    kind = _read_config(folder)[0].model_type
    require(kind == "gpt2", f"{folder} holds model_type {kind!r}, not gpt2; load it with load_pretrained")
    return _load(folder, None, None)


def save_gpt2(folder: str | Path, params, config: ModelConfig) -> None:
    """As `save_pretrained`, for GPT-2 alone: refuses a config that is none."""
    wrong = GPT2.misfits(config)
    require(not wrong, f"the config is no GPT-2's: {', '.join(wrong)}; see save_pretrained for other families")
    _save(Path(folder), params, config, None, GPT2)


def _load(folder: Path, tied: bool | None, param_dtype: str | None) -> tuple[dict, ModelConfig]:
    family, config = _read_config(folder, tied)
    stored = _tie(_named(family, stored_tensors(folder), folder), family, config, folder)
    config = _with_types(config, stored, param_dtype)
    abstract = leaf_paths(abstract_params(config))
    rows = family.rows(config, abstract)
    _check_names(stored, [name for name, _, _ in rows], folder)
    leaves = {}
    for name, paths, layout in rows:
        shapes = [abstract[path] for path in paths]
        theirs = np.shape(layout.to_theirs([np.broadcast_to(np.int8(0), x.shape) for x in shapes], config))
        require(
            stored[name].shape == theirs,
            f"{stored[name].file}: {name} has shape {list(stored[name].shape)}; {CONFIG} makes it {list(theirs)}",
        )
        for path, part in zip(paths, layout.to_ours(stored[name].read(), config), strict=True):
            leaves[path] = jnp.asarray(np.ascontiguousarray(part), abstract[path].dtype)
    return nested(leaves), config


def _read_config(folder: Path, tied: bool | None = None) -> tuple[Family, ModelConfig]:
    path = folder / CONFIG
    tree = read_json(path)
    family = family_of(tree, str(path))
    return family, family.model_config(tree if tied is None else tree | {"tie_word_embeddings": tied}, str(path))


def _save(folder: Path, params, config: ModelConfig, tokenizer: Tokenizer | None, family: Family) -> list[str]:
    check_params(params, config)
    there = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    taken = [name for name in there if name == CONFIG or ".safetensors" in name or name.endswith(".bin")]
    require(not taken, f"{folder} holds a model already ({', '.join(taken[:3])}); choose another folder")
    leaves = leaf_paths(params)
    tensors = {
        name: layout.to_theirs([np.asarray(leaves[path]) for path in paths], config)
        for name, paths, layout in family.rows(config, leaves)
    }
    table = leaves["embed/embedding"]
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos", "pad")}
    tree = family.config_tree(config) | special | {"dtype": str(table.dtype), "torch_dtype": str(table.dtype)}
    write_tensors(folder, tensors)
    notes = [] if tokenizer is None else write_pretrained_tokenizer(tokenizer, folder)
    write_json(folder / CONFIG, tree)  # last: with it the folder counts as a model
    return notes


def _folder(folder: str | Path) -> Path:
    folder = Path(folder)
    require(
        folder.is_dir(),
        f"{folder} is no folder; give one that holds {CONFIG} and safetensors, such as a model's downloaded snapshot",
    )
    return folder


def _named(family: Family, found: dict[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The tensors by the names that transformers writes today, without buffers."""
    stored = {}
    for name, tensor in found.items():
        if BUFFERS.fullmatch(name):
            continue
        whole = name if name.startswith(family.prefix) or name == family.head_name else family.prefix + name
        require(whole not in stored, f"{folder} holds {whole} twice, with and without {family.prefix!r}; drop one")
        stored[whole] = tensor
    return stored


def _tie(stored: dict, family: Family, config: ModelConfig, folder: Path) -> dict:
    """The tensors with one table where the config is tied, with two where it is not."""
    table, head = stored.get(family.table_name), stored.get(family.head_name)
    if not config.tied:
        require(
            head is not None or table is None,
            f"{folder}: tie_word_embeddings is false, and there is no head ({family.head_name}); if the table serves "
            "both ends, load it with tied=True (minigpt import --tied True)",
        )
        return stored
    if head is None:
        return stored
    rest = {name: tensor for name, tensor in stored.items() if name != family.head_name}
    if table is None:
        return rest | {family.table_name: head}
    same = table.shape == head.shape and table.dtype == head.dtype and _equal(table.read(), head.read())
    require(
        same,
        f"{folder}: tie_word_embeddings is true, but {family.head_name} differs from {family.table_name}; load both "
        "tables with tied=False (minigpt import --tied False)",
    )
    return rest


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit by bit: NaN equals itself, and 0 is not -0."""
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


def _with_types(config: ModelConfig, stored: dict, param_dtype: str | None) -> ModelConfig:
    types = {tensor.dtype for tensor in stored.values()}
    require(bool(types), "the file holds no tensors")
    joined = param_dtype or str(jnp.result_type(*map(jnp.dtype, types)))
    return dataclasses.replace(config, param_dtype=joined, dtype="float64" if joined == "float64" else "float32")


def _check_names(stored: dict, wanted: list[str], folder: Path) -> None:
    missing = [name for name in wanted if name not in stored]
    unknown = [name for name in stored if name not in wanted]
    wrong = [f"{what} {_listed(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
    if wrong:
        raise InputError(f"{folder}: the tensors are not those of {CONFIG}: {'; '.join(wrong)}")


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
