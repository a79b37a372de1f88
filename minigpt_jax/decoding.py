"""Text generation: filters as pure functions of the logits, and a cached decode compiled once for many lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig, Sampling
from .errors import require
from .functional import check_context, check_tokens
from .model import MiniGPT, wide


def _ranks(logits: jax.Array) -> jax.Array:
    """Rank of each token along the last axis, 0 for the largest logit; equal logits rank by id."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True)


def keep_top_k(logits: jax.Array, k) -> jax.Array:
    """-inf for all but the k largest logits, (..., V) -> (..., V). Exactly min(k, V) stay; ties go to the lower id."""
    return jnp.where(_ranks(logits) < k, logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p) -> jax.Array:
    """-inf outside the nucleus: the smallest set of most likely tokens whose probability is >= p.

    Holtzman et al. 2020, arXiv:1904.09751. The most likely token always stays; p = 1 keeps all. Ties as in top-k.
    """
    ranks = _ranks(logits)
    sorted_probs = -jnp.sort(-jax.nn.softmax(logits, axis=-1), axis=-1)
    before = jnp.cumsum(sorted_probs, axis=-1) - sorted_probs  # mass of the more likely tokens
    kept = (before < p) | (before == 0) | (p >= 1)
    return jnp.where(jnp.take_along_axis(kept, ranks, axis=-1), logits, -jnp.inf)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits to draw from, (..., V) float32: divided by the temperature, then top-k, then top-p.

    Temperature 0 leaves only the most likely token, the lowest id among equals.
    """
    logits = logits.astype(wide(logits.dtype))
    if sampling.temperature == 0:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        ids = jax.lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
        return jnp.where(ids == best, logits, -jnp.inf)
    # Shifted first, and by no less than float32's smallest number: a tiny temperature then makes -inf of the losers,
    # never inf or NaN of the winner.
    temperature = max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, min(sampling.top_k, logits.shape[-1]))
    return logits if sampling.top_p is None else keep_top_p(logits, sampling.top_p)


def empty_cache(config: ModelConfig, batch: int, length: int) -> dict:
    """Key/value cache for `length` positions: 2 L G K S B values of `config.dtype`."""
    shape = (batch, length, config.kv_heads, config.head_dim)
    zeros = functools.partial(jnp.zeros, shape, config.dtype)
    return {f"block_{i}": {"key": zeros(), "value": zeros()} for i in range(config.n_layers)}


def _bucket(n: int) -> int:
    """The next power of two from 16 on: one compiled program serves every length in it."""
    return max(16, 1 << (n - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("config", "sampling", "size"))
def _generate(params, prompt_BxP, length, total, key, window, vocab_limit, stop_token, *, config, sampling, size):
    """Prefill the padded prompt, then decode to position `total`; ids (B, size) with the prompt in front."""
    module, B = MiniGPT(config), prompt_BxP.shape[0]

    def step(cache, tokens, offset):
        def run(m):
            h, _, new_cache = m.trunk(m.lookup(tokens, offset), cache=cache, offset=offset, window=window)
            last = jnp.clip(length - 1 - offset, 0, tokens.shape[1] - 1)
            return m.unembed(jax.lax.dynamic_slice_in_dim(h, last, 1, axis=1))[:, 0], new_cache

        return module.apply({"params": params}, method=run)

    def draw(logits_BxV, position):
        real = jnp.arange(config.vocab_size) < vocab_limit  # rows of the table that stand for no token
        logits_BxV = filter_logits(jnp.where(real[None], logits_BxV, -jnp.inf), sampling)
        return jax.random.categorical(jax.random.fold_in(key, position), logits_BxV)

    def more(carry):
        _, _, position, _, stopped_B = carry
        return (position < total) & ~jnp.all(stopped_B)

    def decode(carry):
        ids_BxS, cache, position, logits_BxV, stopped_B = carry
        new_B = jnp.where(stopped_B, stop_token, draw(logits_BxV, position)).astype(ids_BxS.dtype)
        ids_BxS = jax.lax.dynamic_update_slice(ids_BxS, new_B[:, None], (0, position))
        logits_BxV, cache = step(cache, new_B[:, None], position)
        return ids_BxS, cache, position + 1, logits_BxV, stopped_B | (new_B == stop_token)

    # Padding behind the prompt is in the cache too, but its slots are overwritten before any query can see them.
    logits_BxV, cache = step(empty_cache(config, B, size), prompt_BxP, 0)
    ids_BxS = jnp.zeros((B, size), jnp.int32)
    ids_BxS = jax.lax.dynamic_update_slice(ids_BxS, prompt_BxP, (0, 0))
    carry = (ids_BxS, cache, length, logits_BxV, jnp.zeros((B,), bool))
    ids_BxS, _, end, _, _ = jax.lax.while_loop(more, decode, carry)
    return ids_BxS, end


def generate(
    params,
    prompt,
    config: ModelConfig,
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
    window: int | None = None,
    vocab_limit: int | None = None,
    stop_token: int | None = None,
) -> np.ndarray:
    """New ids only: prompt (T,) -> (n,), or (B, T) -> (B, n), int32 with n <= max_new_tokens.

    `window` lets attention look back at most so many positions, which keeps RoPE at distances it was trained on.
    `vocab_limit`: ids from it on are never drawn (rows of the table without a token). `stop_token` ends a row; a batch
    ends when all rows have, and shorter rows are filled up with it. Same key, same ids. Learned positions end at
    context_len, and asking for more is an `InputError`.
    """
    prompt = check_tokens(prompt, config, "prompt")
    for name, value, low in (
        ("max_new_tokens", max_new_tokens, 0),
        ("window", window, 1),
        ("vocab_limit", vocab_limit, 1),
        ("stop_token", stop_token, 0),
    ):
        whole = isinstance(value, (int, np.integer)) or (value is None and name != "max_new_tokens")
        require(whole and (value is None or value >= low), f"{name} is {value}; give a whole number, at least {low}")
    prompt_BxT = np.atleast_2d(np.asarray(prompt, np.int32))
    B, length = prompt_BxT.shape
    total = length + max_new_tokens
    check_context(total, config)
    size = _bucket(total)
    if config.positions == "learned":
        size = min(size, config.context_len)
    padded = np.zeros((B, min(_bucket(length), size)), np.int32)
    padded[:, :length] = prompt_BxT
    ids, end = _generate(
        params,
        padded,
        np.int32(length),
        np.int32(total),
        key,
        np.int32(size if window is None else window),
        np.int32(config.vocab_size if vocab_limit is None else vocab_limit),
        np.int32(-1 if stop_token is None else stop_token),
        config=config,
        sampling=sampling,
        size=size,
    )
    new = np.asarray(ids)[:, length : int(end)]
    return new if prompt.ndim == 2 else new[0]
