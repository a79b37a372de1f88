"""Tiny checkpoints of every family, with what `transformers` computed from them: see golden/make.py. No torch here."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raw_safetensors as raw

import minigpt_jax as mg

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/expected.json"))


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def golden(request):
    """The folder, what is expected of it, its params in the file's type, and its config."""
    folder = request.param
    params, config, tokenizer = mg.load_pretrained(folder)
    assert tokenizer is None
    return folder, json.loads((folder / "expected.json").read_text()), params, config


def in_float32(params, config):
    """The file's values, computed with in float32."""
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float32)), params)
    return params, dataclasses.replace(config, dtype="float32", param_dtype="float32")


def test_all_families_are_here():
    families = {json.loads((folder / "config.json").read_text())["model_type"] for folder in FOLDERS}
    assert families == {"gpt2", "llama", "qwen2", "qwen3", "gemma", "gpt_neox"} and len(FOLDERS) == 8


def test_logits_loss_and_greedy_continuation(golden):
    _, expected, params, config = golden
    params, config = in_float32(params, config)
    ids = np.array(expected["ids"])
    logits = mg.forward(params, ids, config)
    # The largest logit is about 10: 2e-5 is 20 units in float32's last place after some ten sums, and 20 times what
    # seven digits keep.
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-5)
    loss = mg.cross_entropy_from_logits(logits[:-1], ids[1:]).mean()
    np.testing.assert_allclose(loss, expected["loss"], rtol=2e-6)
    continuation = mg.generate(
        params,
        np.array(expected["prompt"]),
        config,
        key=jax.random.key(0),
        max_new_tokens=len(expected["continuation"]),
        sampling=mg.Sampling(temperature=0),
    )
    assert continuation.tolist() == expected["continuation"]


def canonical(tensors: dict) -> dict:
    """By the names that `transformers` writes: GPT-2's have a prefix, and the one table is the lookup's."""
    if not any(name.removeprefix("transformer.").startswith("h.") for name in tensors):
        return tensors
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    if "wte.weight" not in short:
        short["wte.weight"] = short.pop("lm_head.weight")
    return short


def test_the_file_comes_back_byte_for_byte(golden, tmp_path):
    folder, expected, params, config = golden
    original = raw.read_folder(folder)
    assert raw.sha256(original) == expected["sha256"]
    mg.save_pretrained(tmp_path / "again", params, config, None)
    written = raw.read_folder(tmp_path / "again")
    assert raw.sha256(canonical(written)) == raw.sha256(canonical(original))
    again = mg.load_pretrained(tmp_path / "again")
    assert again[1] == config
    assert jax.tree.structure(again[0]) == jax.tree.structure(params)
