"""Small models for tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import minigpt_jax as mg
from minigpt_jax.data import BPETokenizer

GPT2 = mg.ModelConfig(
    vocab_size=270,
    d_model=16,
    n_layers=2,
    n_heads=2,
    context_len=32,
    positions="learned",
    ffn="gelu_tanh",
    attention_bias=True,
    kernel_init="fixed",
)


def equations(jaxpr):
    """Every equation of a jaxpr, those of inner functions too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def float64(config: mg.ModelConfig) -> mg.ModelConfig:
    return dataclasses.replace(config, dtype="float64", param_dtype="float64")


@functools.cache
def noisy_params(config: mg.ModelConfig, matrix: float = 0.4, vector: float = 0.1, seed: int = 0) -> dict:
    """Fresh ones with noise on every leaf, so that no gradient is tiny or zero, no scale 1 and no bias 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            leaf + rng.normal(size=leaf.shape) * (matrix if leaf.ndim == 2 else vector), leaf.dtype
        ),
        mg.init(config, jax.random.key(seed)),
    )


def write_gpt2(folder, text: str) -> BPETokenizer:
    """A folder in Hugging Face's layout, with two more rows in the table than the tokenizer has ids."""
    tokenizer = BPETokenizer.train([text], GPT2.vocab_size - 2)
    assert mg.save_pretrained(folder, noisy_params(GPT2), GPT2, tokenizer) == []
    return tokenizer
