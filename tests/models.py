"""Small models for tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import minigpt_jax as mg


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
