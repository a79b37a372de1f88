"""Cross-entropy from logits, and the loss of a batch."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from .config import ModelConfig, require
from .data import Batch
from .functional import check_ids, check_mask, check_tokens, forward
from .model import wide


class LossSum(NamedTuple):
    """A loss before its division, so that parts of a batch can be added up and divided once."""

    total: jax.Array
    """Sum of the negative log-likelihoods of the valid targets, in nats."""
    count: jax.Array
    """How many targets are valid, same type as `total`."""

    def mean(self) -> jax.Array:
        """Nats per valid target; 0, with zero gradients, where none is valid."""
        return self.total / jnp.maximum(self.count, 1)


def cross_entropy_sum(logits: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> LossSum:
    """Sum over targets of logsumexp(logits) - logits[target], and their number; arguments as for the mean below."""
    chex.assert_shape(targets, logits.shape[:-1])
    if mask is not None:
        chex.assert_equal_shape([targets, mask])
    logits, targets = logits.astype(wide(logits.dtype)), targets.astype(jnp.int32)
    # The target's logit by selection, not by gather: its gradient fuses with the softmax instead of being a scatter.
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = ids == targets[..., None]
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
    # Inside jit nothing can be raised: a target outside the vocabulary that counts makes the loss NaN, not plausible.
    nll = jnp.where((targets >= 0) & (targets < logits.shape[-1]), nll, jnp.nan)
    if mask is None:
        return LossSum(jnp.sum(nll), jnp.asarray(nll.size, nll.dtype))
    return LossSum(jnp.sum(jnp.where(mask, nll, 0)), jnp.sum(mask, dtype=nll.dtype))


def cross_entropy_from_logits(logits: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean cross-entropy in nats over the valid targets, float32 at least.

    `logits` (..., V), `targets` (...) integer ids, `mask` (...) bool with True where a target counts. The log-sum-exp
    is fused with the choice of the target, so logits of +-1000 are safe. No valid target gives 0 and zero gradients.
    """
    logits = jnp.asarray(logits)
    targets = jnp.asarray(check_ids(targets, logits.shape[-1], "targets"))
    require(
        targets.shape == logits.shape[:-1],
        f"logits have shape {logits.shape} and targets {targets.shape}; give (..., V) and (...)",
    )
    return cross_entropy_sum(logits, targets, check_mask(mask, targets.shape)).mean()


def checked_batch(batch: Batch, config: ModelConfig) -> Batch:
    """The batch as arrays of one shape; `InputError` for ids outside [0, V) or shapes that differ."""
    tokens, targets = check_tokens(batch.tokens, config), check_tokens(batch.targets, config, "targets")
    mask = check_mask(batch.mask, tokens.shape)
    require(
        targets.shape == tokens.shape, f"targets have shape {targets.shape} and tokens {tokens.shape}; give one shape"
    )
    return Batch(tokens, jnp.asarray(targets), mask)


def loss_sum(params, batch: Batch, config: ModelConfig, dropout_key=None) -> LossSum:
    """The batch's loss as sum and count; see `loss`."""
    batch = checked_batch(batch, config)
    logits = forward(params, batch.tokens, config, dropout_key=dropout_key)
    return cross_entropy_sum(logits, batch.targets, batch.mask)


def loss(params, batch: Batch, config: ModelConfig, dropout_key=None) -> jax.Array:
    """Mean cross-entropy of `batch.targets` in nats, over the positions where `batch.mask` is True (default: all).

    The mask says which targets count, nothing else: padding on the right needs no more, since no real position sees a
    later one. `targets[t]` is the token that follows `tokens[t]`; the shift is made where batches are made.
    """
    return loss_sum(params, batch, config, dropout_key).mean()
