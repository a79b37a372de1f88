"""The tied table as a set of vectors: neighbours, how well its two uses fit together, norms and frequencies."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..errors import require
from ..functional import check_ids, check_limit, check_params, readout
from ..model import embedding_scaled, wide


def neighbours(params, token: int, k: int = 10, vocab_limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The k tokens nearest to `token` in E by cosine, itself left out: ids (k,) and cosines (k,), nearest first."""
    E = params["embed"]["embedding"]
    token = np.asarray(check_ids(token, E.shape[0], "token"))
    require(token.ndim == 0, f"token has shape {token.shape}; give one id")
    ids, cosines = all_neighbours(params, k, vocab_limit, token[None])
    return ids[0], cosines[0]


def all_neighbours(params, k: int = 10, vocab_limit: int | None = None, tokens=None) -> tuple[np.ndarray, np.ndarray]:
    """`neighbours` of many tokens (default: every one): ids (N, k) and cosines (N, k)."""
    rows, E = params["embed"]["embedding"].shape[0], _table(params, vocab_limit)
    V = E.shape[0]
    tokens = np.arange(V) if tokens is None else np.asarray(check_ids(tokens, rows, "tokens"))
    require(k >= 1, f"k is {k}; it must be at least 1")
    require(V >= 2, "the table has one row; a token has no neighbours there")
    require(bool((tokens < V).all()), f"a token is beyond the vocabulary of {V}: its row has no text")
    norm_V = _norm(E)
    unit_VxD = E.astype(norm_V.dtype) / jnp.maximum(norm_V, jnp.finfo(norm_V.dtype).tiny)[:, None]  # 0 for a zero row

    def nearest(token):
        cosines, ids = jax.lax.top_k((unit_VxD @ unit_VxD[token]).at[token].set(-jnp.inf), min(k, V - 1))
        return ids, cosines

    ids, cosines = jax.lax.map(nearest, jnp.asarray(tokens), batch_size=64)
    return np.asarray(ids), np.asarray(cosines)


def _table(params, vocab_limit: int | None) -> jax.Array:
    """The rows of E that are tokens."""
    E = jnp.asarray(params["embed"]["embedding"])
    return E[: check_limit(vocab_limit, E.shape[0])]


def _norm(x):
    return jnp.sqrt(jnp.sum(x.astype(wide(x.dtype)) ** 2, axis=-1))


class InterfaceConsistency(NamedTuple):
    """Whether reading back what was looked up gives the same token: argmax(E norm(E[v])) = v."""

    share: float
    """Of the vocabulary, how much comes back as itself."""
    decoded: np.ndarray
    """(V,): the token that each comes back as."""
    singular_values: np.ndarray
    """(min(V, D),) of E, largest first: how evenly the table uses the stream's directions."""


def interface_consistency(params, config: ModelConfig, vocab_limit: int | None = None) -> InterfaceConsistency:
    """Of a tied table, or of an untied pair: `decoded` goes through lookup, final norm and head, with no block between.

    After the idea of Gu et al. 2026 (arXiv:2602.04556) that sharing does not by itself keep the two sides consistent.
    """
    check_params(params, config)
    E = _table(params, vocab_limit)

    def decode(row_D):
        return jnp.argmax(readout(params, row_D[None], config)[0, : E.shape[0]])

    decoded = np.asarray(jax.lax.map(decode, embedding_scaled(E, config).astype(config.dtype), batch_size=64))
    singular = np.linalg.svd(np.asarray(E, np.float64), compute_uv=False)
    return InterfaceConsistency(float(np.mean(decoded == np.arange(E.shape[0]))), decoded, singular)


class NormsByFrequency(NamedTuple):
    norms: np.ndarray
    """(V,): L2 norm of each row of E."""
    correlation: float | None
    """Pearson, of norm and log count over the tokens that occur; None for fewer than three of them, or all alike."""


def norms_by_frequency(params, counts) -> NormsByFrequency:
    """Row norms of E against how often each token stands in a text: `counts` (V,), as of `np.bincount`; a shorter one
    leaves out the rows beyond it."""
    counts, E = np.asarray(counts), params["embed"]["embedding"]
    require(
        counts.ndim == 1 and len(counts) <= E.shape[0],
        f"counts have shape {counts.shape}; give one for each of the table's {E.shape[0]} rows, or of the first ones",
    )
    norms, seen = np.asarray(_norm(E[: len(counts)])), counts > 0
    logs, some = np.log(counts[seen]), norms[seen]
    varied = seen.sum() >= 3 and np.ptp(logs) > 0 and np.ptp(some) > 0
    return NormsByFrequency(norms, float(np.corrcoef(logs, some)[0, 1]) if varied else None)
