"""Weights from elsewhere as a run directory, a run as a Hugging Face folder, and what `minigpt train --init` starts
from."""

import dataclasses
from pathlib import Path

import jax

from .checkpoint import create_run, open_run
from .compiled import keep_compiled_programs
from .config import Config, DataConfig, ModelConfig, load_config
from .convert import load_pretrained, pretrained_config, save_pretrained
from .convert.families import family_that_fits
from .data import Tokenizer
from .errors import require
from .functional import check_params
from .inspect import param_table

keep_compiled_programs()

# Windows of an imported run: long enough to show a model's worth, and no batch of a 100,000 positions.
WINDOW = 1024


def import_run(folder: Path, run_dir: Path, tied: bool | None) -> None:
    """Make a run directory of a Hugging Face folder."""
    print(f"reading {folder}", flush=True)
    params, model, tokenizer = load_pretrained(folder, tied=tied)
    if model.param_dtype == "float16":  # whose values float32 holds too, and AdamW's epsilon
        model = dataclasses.replace(model, param_dtype="float32")
        params = cast(params, model)
    _check_tokenizer(tokenizer, model, folder)
    config = Config(model, DataConfig(tokenizer="pretrained", window=min(model.context_len, WINDOW)))
    create_run(run_dir, config, tokenizer, lambda run: run.save_params(params))
    table = param_table(model)
    print(f"{table.total:,} parameters, {table.embedding:,} of them the {'tied ' if model.tied else ''}table")
    print(f"saved in {run_dir}; try: minigpt sample {run_dir} --prompt TEXT, or minigpt lens {run_dir} --prompt TEXT")


def export_run(run_dir: Path, folder: Path) -> None:
    """Write a run as a folder that transformers loads."""
    run = open_run(run_dir)
    params, step = run.load_params()
    notes = save_pretrained(folder, params, run.config.model, run.tokenizer)
    for note in notes:
        print(f"note: {note}")
    family = family_that_fits(run.config.model)
    print(f"step {step} of {run_dir} written to {folder} as {family.architecture}")


def _check_tokenizer(tokenizer: Tokenizer | None, model: ModelConfig, where: Path) -> None:
    """Raise where there is none, or it has ids that the table has no row for."""
    require(
        tokenizer is not None,
        f"{where} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); put its files there",
    )
    require(
        tokenizer.vocab_size <= model.vocab_size,
        f"{where}: the tokenizer has {tokenizer.vocab_size} ids and the table {model.vocab_size} rows; give the table "
        f"more: minigpt_jax.resize_vocab(params, {tokenizer.vocab_size})",
    )


def starting_weights(source: Path, model: ModelConfig) -> tuple[dict, Tokenizer]:
    """Parameters and tokenizer of a run directory or a Hugging Face folder, in the type of `model`."""
    if (source / "config.yaml").is_file():
        run = open_run(source)
        params, tokenizer = cast(run.load_params()[0], model), run.tokenizer
    else:
        params, _, tokenizer = load_pretrained(source, param_dtype=model.param_dtype)
    _check_tokenizer(tokenizer, model, source)
    check_params(params, model)
    return params, tokenizer


def starting_config(source: Path, config: Config) -> Config:
    """`config` with the model of a run directory or a Hugging Face folder. What is about training stays: windows no
    longer than `config.model.context_len`, dropout, types."""
    if (source / "config.yaml").is_file():
        found = load_config(source / "config.yaml")
        model, tokenizer = found.model, found.data.tokenizer
    else:
        model, tokenizer = pretrained_config(source), "pretrained"
    kept = {name: getattr(config.model, name) for name in ("dropout", "dtype", "param_dtype", "bf16_dots", "remat")}
    window = min(config.window, model.context_len)
    data = dataclasses.replace(config.data, tokenizer=tokenizer, window=window)
    return dataclasses.replace(config, model=dataclasses.replace(model, **kept), data=data)


def cast(params: dict, model: ModelConfig) -> dict:
    """The parameters in the config's type."""
    return jax.tree.map(lambda leaf: leaf.astype(model.param_dtype), params)
