"""How the next token is drawn: filters as pure functions of the logits, vectorised over rows, and their order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import Sampling
from .errors import InputTypeError, require
from .model import wide


def _by_row(parameter, logits: jax.Array) -> jax.Array:
    """A parameter for all rows, or one for each, as it stands beside (..., V)."""
    parameter = jnp.asarray(parameter)
    return parameter if parameter.ndim == 0 else parameter[..., None]


def _keep_first(logits: jax.Array, descending: jax.Array, n: jax.Array) -> jax.Array:
    """-inf for all but the n largest, n (..., 1), given the logits in descending order. Of equal ones the lower ids
    stay. Values alone are sorted, which is much cheaper than an argsort of a large vocabulary."""
    last = jnp.take_along_axis(descending, jnp.clip(n - 1, 0, logits.shape[-1] - 1), axis=-1)
    above, equal = logits > last, logits == last
    room = n - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), logits, -jnp.inf)


def keep_top_k(logits: jax.Array, k) -> jax.Array:
    """-inf for all but the k largest logits, (..., V) -> (..., V). Exactly min(k, V) stay; ties go to the lower id.

    `k` is a number, or (...) with one for each row.
    """
    k = jnp.broadcast_to(_by_row(k, logits), (*logits.shape[:-1], 1))
    return _keep_first(logits, -jnp.sort(-logits, axis=-1), jnp.minimum(k, logits.shape[-1]))


def keep_top_p(logits: jax.Array, p) -> jax.Array:
    """-inf outside the nucleus: the smallest set of most likely tokens whose probability is >= p.

    Holtzman et al. 2020, arXiv:1904.09751. The most likely token always stays; p = 1 keeps all. Ties as in top-k.
    `p` is a number, or (...) with one for each row.
    """
    p, descending = _by_row(p, logits), -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of the more likely tokens
    n = jnp.sum((before < p) | (before == 0) | (p >= 1), axis=-1, keepdims=True)
    return _keep_first(logits, descending, n)


def keep_min_p(logits: jax.Array, p) -> jax.Array:
    """-inf for tokens less likely than p times the most likely one (Nguyen et al. 2024, arXiv:2407.01082).

    0 keeps all; 1 keeps the most likely, and its equals. `p` is a number, or (...) with one for each row.
    """
    p = _by_row(p, logits)
    return jnp.where(logits - jnp.max(logits, axis=-1, keepdims=True) >= jnp.log(p), logits, -jnp.inf)


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty) -> jax.Array:
    """Logits of tokens that the text holds already, `seen` (..., V) bool, divided by the penalty where positive and
    multiplied where negative (Keskar et al. 2019, arXiv:1909.05858). 1 changes nothing; a number, or one for each row.
    """
    penalty = _by_row(penalty, logits)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


class Filters(NamedTuple):
    """The values of a `Sampling` as a pytree: traced, another value compiles nothing. None: that filter is left out."""

    temperature: jax.Array | None
    """None: greedy."""
    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None
    repetition_penalty: jax.Array | None


def filters_of(sampling: Sampling, vocab_size: int) -> Filters:
    """Only those that change anything."""
    if not isinstance(sampling, Sampling):
        raise InputTypeError(f"sampling is {sampling!r}; give a Sampling, such as Sampling(temperature=0.8)")
    s = sampling
    return Filters(
        # It and its reciprocal within float32's range: the losers get -inf then, or stay -inf, but never NaN.
        None if s.temperature == 0 else float(np.clip(s.temperature, np.finfo(np.float32).tiny, 1e37)),
        None if s.top_k is None or s.top_k >= vocab_size else np.int32(s.top_k),
        None if s.top_p is None or s.top_p >= 1 else float(s.top_p),
        None if s.min_p is None or s.min_p == 0 else float(s.min_p),
        # So that no logit below 1e8 overflows.
        None if s.repetition_penalty == 1 else float(np.clip(s.repetition_penalty, 1e-30, 1e30)),
    )


def filter_logits(logits: jax.Array, sampling: Sampling, seen: jax.Array | None = None) -> jax.Array:
    """Logits to draw from, (..., V) float32: the repetition penalty on those of `seen` tokens (..., V) bool, then
    divided by the temperature, then top-k, then top-p, then min-p, each on what the one before left.

    Temperature 0 leaves only the most likely token, the lowest id among equals. The result is shifted so that the most
    likely token has 0, which a softmax does not see.
    """
    logits, seen = jnp.asarray(logits), None if seen is None else jnp.asarray(seen)
    require(logits.ndim > 0 and logits.size > 0, f"logits have shape {logits.shape}; give (..., V), V at least 1")
    filters = filters_of(sampling, logits.shape[-1])
    if filters.repetition_penalty is not None:
        require(
            seen is not None and seen.shape == logits.shape and seen.dtype == bool,
            f"repetition_penalty is {sampling.repetition_penalty}; give `seen`, bool of the logits' shape "
            f"{logits.shape}: which tokens each text holds already",
        )
    return apply_filters(logits, filters, seen)


def apply_filters(logits: jax.Array, filters: Filters, seen: jax.Array | None) -> jax.Array:
    """`filter_logits` for traced values."""
    logits = _penalized(logits, filters, seen)
    if filters.temperature is None:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        ids = jax.lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
        return jnp.where(ids == best, logits, -jnp.inf)
    # Shifted first, so that a tiny temperature never makes inf or NaN of the winner.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / filters.temperature
    if filters.top_k is not None:
        logits = keep_top_k(logits, filters.top_k)
    if filters.top_p is not None:
        logits = keep_top_p(logits, filters.top_p)
    return logits if filters.min_p is None else keep_min_p(logits, filters.min_p)


def draw(key: jax.Array, logits: jax.Array, filters: Filters, seen: jax.Array | None) -> jax.Array:
    """Ids (...) drawn from (..., V). Greedy text is the largest logit at once: no random numbers, one pass."""
    if filters.temperature is None:
        return jnp.argmax(_penalized(logits, filters, seen), axis=-1)
    return jax.random.categorical(key, apply_filters(logits, filters, seen))


def _penalized(logits: jax.Array, filters: Filters, seen: jax.Array | None) -> jax.Array:
    logits = logits.astype(wide(logits.dtype))
    if filters.repetition_penalty is None:
        return logits
    return penalize_repetition(logits, seen, filters.repetition_penalty)
