"""Rotary position embedding: frequencies, their scaling for longer texts, and the rotation itself."""

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position of each pair, float64 (rope_dim / 2,): rope_base^(-2k/rope_dim), scaled for longer texts.

    Without rope_original_len all are divided by rope_factor (Chen et al. 2023, arXiv:2306.15595). With it, by the rule
    of Llama 3.1's released code, only those that turn less often than rope_low_freq_factor times in that length; those
    that turn more often than rope_high_freq_factor times stay, and between the two is a mix.
    """
    K = config.rope_dim
    frequency_k = np.power(config.rope_base, -np.arange(0, K, 2) / K)
    if config.rope_original_len is None:
        return frequency_k / config.rope_factor
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns_k = config.rope_original_len * frequency_k / (2 * np.pi)
    smooth_k = np.clip((turns_k - low) / (high - low), 0, 1)
    return (1 - smooth_k) * frequency_k / config.rope_factor + smooth_k * frequency_k


def rope(x_BxTxHxK: jax.Array, positions: jax.Array, config: ModelConfig) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864): pair k turns by position * frequency k.

    Then <rope(q, m), rope(k, n)> depends on q, k and n - m alone. `positions` is (T,), or (B, T) where rows differ.
    """
    dtype = jnp.promote_types(x_BxTxHxK.dtype, jnp.float32)
    frequency_k = rope_frequencies(config).astype(dtype)
    angle_BxTxk = jnp.atleast_2d(positions).astype(dtype)[:, :, None] * frequency_k[None, None, :]
    cos, sin = jnp.cos(angle_BxTxk)[:, :, None, :], jnp.sin(angle_BxTxk)[:, :, None, :]
    x = x_BxTxHxK[..., : config.rope_dim].astype(dtype)
    if config.rope_pairs == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(x, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    rotated = rotated.astype(x_BxTxHxK.dtype)
    if config.rope_dim == config.head_dim:
        return rotated
    return jnp.concatenate([rotated, x_BxTxHxK[..., config.rope_dim :]], axis=-1)


def text_positions(slots_T: jax.Array, pad_B: jax.Array | None = None) -> jax.Array:
    """Positions in the text of the places in an array: the same, (1, T), or (B, T) behind each row's padding on the
    left."""
    return slots_T[None, :] if pad_B is None else jnp.maximum(slots_T[None, :] - pad_B[:, None], 0)
