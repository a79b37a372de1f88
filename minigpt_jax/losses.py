"""Cross-entropy from logits, and the loss of a batch."""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from .config import ModelConfig
from .data import Batch
from .errors import require
from .functional import _apply, check_ids, check_mask, check_params, check_tokens, embed, forward, trunk
from .model import embedding_scaled, wide


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


def loss_sum(params, batch: Batch, config: ModelConfig, dropout_key=None, chunk: int | None = None) -> LossSum:
    """The batch's loss as sum and count; see `loss`."""
    batch = checked_batch(batch, config)
    N = batch.targets.size
    require(
        chunk is None or (isinstance(chunk, int) and chunk >= 1),
        f"chunk is {chunk}; give the number of positions whose logits are held at once, at least 1",
    )
    if chunk is None:
        values = N * config.vocab_size
        chunk = N if values <= PLAIN_LOGITS else math.ceil(N / math.ceil(values / CHUNK_LOGITS))
    if chunk >= N:
        logits = forward(params, batch.tokens, config, dropout_key=dropout_key)
        return cross_entropy_sum(logits, batch.targets, batch.mask)
    check_params(params, config)
    if config.tied:
        inputs = {name: params[name] for name in ("embed", "positions") if name in params}
        x, table = _share(config, inputs, batch.tokens)
        head = {"embed": {"embedding": table}}
    else:
        x, head = embed(params, batch.tokens, config), {"head": params["head"]}
    h = trunk(params, x, config, dropout_key=dropout_key)
    mask = jnp.ones(batch.targets.shape, bool) if batch.mask is None else batch.mask
    spare = -N % chunk  # padding that no mask lets in

    def cut(x, *shape):
        return jnp.pad(x.reshape(N, *shape), [(0, spare)] + [(0, 0)] * len(shape)).reshape(-1, chunk, *shape)

    parts = cut(h, config.d_model), cut(batch.targets), cut(mask)
    return LossSum(_chunked_total(config, head, *parts), jnp.sum(mask, dtype=wide(config.dtype)))


# Beyond so many logits (256 MB in float32) the loss works in chunks of so many (64 MB). At V = 50,257 and D = 768,
# 4,096 positions then take a seventh of the memory and nine tenths of the time; 1,024 gain nothing.
PLAIN_LOGITS, CHUNK_LOGITS = 1 << 26, 1 << 24


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _share(config: ModelConfig, inputs, tokens):
    """The residual stream after the lookup, and the table for the head; `inputs` are the params that the lookup reads.

    Backwards, the gradients of the rows that were looked up are added into the head's gradient of the table, where
    autodiff would make a (V, D) array of zeros for them and then add the two.
    """
    table_VxD = inputs["embed"]["embedding"]
    return embed(inputs, tokens, config), table_VxD.astype(wide(table_VxD.dtype))


def _share_forward(config, inputs, tokens):
    # No call of `_share`, and no stop_gradient on the table: forward mode over the gradient, as in a product with the
    # Hessian, could not pass the one and would lose a part at the other.
    table_VxD = inputs["embed"]["embedding"]
    others = {name: leaves for name, leaves in inputs.items() if name != "embed"}
    x, pull = jax.vjp(lambda others: embed({**inputs, **others}, tokens, config), others)
    return (x, table_VxD.astype(wide(table_VxD.dtype))), (tokens, pull, jnp.zeros((), table_VxD.dtype))


def _share_backward(config, kept, grads):
    (tokens, pull, like), (x_grad, table_grad_VxD) = kept, grads
    rows_grad = embedding_scaled(x_grad, config)  # a factor is its own transpose
    table_grad_VxD = table_grad_VxD.at[tokens].add(rows_grad.astype(table_grad_VxD.dtype))
    return {**pull(x_grad)[0], "embed": {"embedding": table_grad_VxD.astype(like.dtype)}}, None


_share.defvjp(_share_forward, _share_backward)


def _part(head, h_CxD, targets_C, mask_C, config: ModelConfig):
    logits_CxV = _apply(head, h_CxD, None, None, config=config, method="unembed")
    return cross_entropy_sum(logits_CxV, targets_C, mask_C).total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_total(config: ModelConfig, head, h_nxCxD, targets_nxC, mask_nxC):
    """The sum of the head's losses, a chunk of C positions at a time, so that no (N, V) logits exist."""

    def add(total, xs):
        return total + _part(head, *xs, config), None

    return jax.lax.scan(add, jnp.zeros((), wide(config.dtype)), (h_nxCxD, targets_nxC, mask_nxC))[0]


def _chunked_forward(config, head, h_nxCxD, targets_nxC, mask_nxC):
    # The loss is a sum, so its gradient is known up to a factor as soon as a chunk's logits are: taking it now spares
    # computing them a second time in the backward pass.
    def add(carry, xs):
        part, (head_grad, h_grad) = jax.value_and_grad(_part, argnums=(0, 1))(head, *xs, config)
        return jax.tree.map(jnp.add, carry, (part, head_grad)), h_grad

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), head)
    carry = jnp.zeros((), wide(config.dtype)), zeros
    (total, head_grad), h_grad = jax.lax.scan(add, carry, (h_nxCxD, targets_nxC, mask_nxC))
    return total, (jax.tree.map(lambda g, x: g.astype(x.dtype), head_grad, head), h_grad)


def _chunked_backward(config, grads, scale):
    head_grad, h_grad = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return head_grad, h_grad, None, None


_chunked_total.defvjp(_chunked_forward, _chunked_backward)


def loss(params, batch: Batch, config: ModelConfig, dropout_key=None, chunk: int | None = None) -> jax.Array:
    """Mean cross-entropy of `batch.targets` in nats, over the positions where `batch.mask` is True (default: all).

    The mask says which targets count, nothing else: padding on the right needs no more, since no real position sees a
    later one. `targets[t]` is the token that follows `tokens[t]`; the shift is made where batches are made.

    With `chunk`, the logits of only so many positions exist at once: the same value and gradients in less memory. The
    default cuts where there are more than `PLAIN_LOGITS` of them. Chunks know no forward mode (`jax.jvp` of the loss is
    a TypeError, that of its gradient is not); a `chunk` of all positions, or more, gives the plain loss, which does.
    """
    return loss_sum(params, batch, config, dropout_key, chunk).mean()


def loss_and_grads(
    params, batch: Batch, config: ModelConfig, dropout_key=None, accumulate: int = 1, chunk: int | None = None
) -> tuple[LossSum, dict]:
    """The batch's loss, and the gradient of its mean; computed in `accumulate` micro-batches.

    Sums and counts are added up and divided once, so that the result does not depend on how the batch is cut.
    """

    require(
        isinstance(accumulate, int) and accumulate >= 1, f"accumulate is {accumulate}; give a whole number, at least 1"
    )
    batch = checked_batch(batch, config)

    def summed_loss(params, batch, key, value):
        summed = loss_sum(params, batch, config, key, chunk)
        return value(summed), summed

    grad = jax.grad(summed_loss, has_aux=True)
    if accumulate == 1:  # divided before the backward pass, which spares a pass over all gradients
        grads, summed = grad(params, batch, dropout_key, LossSum.mean)
        return summed, grads
    shape = jnp.shape(batch.tokens)
    require(
        len(shape) == 2 and shape[0] % accumulate == 0,
        f"the batch has shape {shape}; accumulate = {accumulate} needs (B, T) with B a multiple of {accumulate}",
    )
    micro = jax.tree.map(lambda x: jnp.reshape(x, (accumulate, shape[0] // accumulate, *shape[1:])), batch)

    def add(carry, xs):
        i, part = xs
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
        grads, summed = grad(params, part, key, lambda summed: summed.total)
        return jax.tree.map(jnp.add, carry, (summed, grads)), None

    zero = jnp.zeros((), wide(config.dtype))
    # Sums of gradients are float32 at least, whatever the parameters are stored in.
    zeros = LossSum(zero, zero), jax.tree.map(lambda p: jnp.zeros(p.shape, wide(p.dtype)), params)
    (summed, grads), _ = jax.lax.scan(add, zeros, (jnp.arange(accumulate), micro))
    scale = 1 / jnp.maximum(summed.count, 1)
    return summed, jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads, params)
