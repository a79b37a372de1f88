"""The baseline that a language model has to beat: counts of n-grams."""

import numpy as np

from minigpt_jax.errors import require


def ngram_cross_entropy(
    train_tokens: np.ndarray, val_tokens: np.ndarray, order: int, vocab_size: int, alpha: float = 1.0
) -> float:
    """Mean cross-entropy, in nats per token, of an n-gram model with add-alpha smoothing; 1-D arrays of ids in [0, V).

    p(w | context) = (count(context w) + alpha) / (count(context) + alpha V); its context: the order - 1 tokens before.
    `val_tokens` continues `train_tokens`: its first tokens have the training tail as context. Where the training text
    is shorter than a context, the validation tokens without a whole one are left out.
    """
    require(order >= 1, f"order is {order}; it must be at least 1 (the token frequencies alone)")
    require(alpha > 0, f"alpha is {alpha}; it must be above 0, or an unseen n-gram costs an infinite loss")
    require(
        vocab_size**order < 2**63,
        f"order {order} with V = {vocab_size} has over 2**63 possible n-grams; give a smaller order",
    )
    train = np.asarray(train_tokens, np.int64)
    val = np.concatenate([train[max(0, len(train) - order + 1) :], np.asarray(val_tokens, np.int64)])
    seen, counts = np.unique(_codes(train, order, vocab_size), return_counts=True)
    contexts, starts = np.unique(seen // vocab_size, return_index=True)  # sorted codes: one run per context
    totals = np.add.reduceat(counts, starts) if len(counts) else counts
    wanted = _codes(val, order, vocab_size)
    require(
        len(wanted) > 0, f"no token has the {order - 1} tokens before it that order {order} needs; give more tokens"
    )
    hits, total = _count(wanted, seen, counts), _count(wanted // vocab_size, contexts, totals)
    return float(np.mean(np.log(total + alpha * vocab_size) - np.log(hits + alpha)))


def _codes(tokens: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """One int64 per n-gram: its tokens as digits in base V."""
    n = max(0, len(tokens) - order + 1)
    codes = np.zeros(n, np.int64)
    for i in range(order):
        codes = codes * vocab_size + tokens[i : i + n]
    return codes


def _count(wanted: np.ndarray, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The count of each wanted code; 0 where it is not among the sorted keys."""
    if not len(keys):
        return np.zeros(len(wanted))
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)
