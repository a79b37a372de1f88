"""How the families store weights: each layout is a pair of maps between one stored tensor and our leaves.

Ours are dense kernels (in, out). All maps only move numbers, so they are exact, and gradients go the same way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..config import ModelConfig


class Layout(NamedTuple):
    to_ours: Callable[[np.ndarray, ModelConfig], list[np.ndarray]]
    """A stored tensor, and the leaves that it holds."""
    to_theirs: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray]
    """The inverse."""


SAME = Layout(lambda x, config: [x], lambda xs, config: xs[0])
# torch's linear layers multiply by a (out, in) matrix from the right.
TRANSPOSED = Layout(lambda x, config: [x.T], lambda xs, config: xs[0].T)
# GPT-2's query, key and value side by side on the last axis, of its (in, out) matrix and of its bias.
THREE_COLUMNS = Layout(
    lambda x, config: np.split(x, 3, axis=-1),
    lambda xs, config: np.concatenate(xs, axis=-1),
)


def _by_head(x: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    H, K = config.n_heads, config.head_dim
    x = x.reshape(H, 3, K, *x.shape[1:])
    return [part.reshape(H * K, *part.shape[2:]).T for part in (x[:, i] for i in range(3))]


def _joined_by_head(xs: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    H, K = config.n_heads, config.head_dim
    stacked = np.stack([x.T.reshape(H, K, *x.shape[:-1]) for x in xs], axis=1)
    return stacked.reshape(H * 3 * K, *stacked.shape[3:])


# GPT-NeoX's: query, key and value of the first head, then of the second ...; (out, in), and its bias (out,).
THREE_IN_EACH_HEAD = Layout(_by_head, _joined_by_head)
