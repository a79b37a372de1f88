"""The gradient of the tied table, split by use: dL/dE = lookup part + head part."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..config import ModelConfig, require
from ..data import Batch
from ..functional import embed, trunk, unembed
from ..losses import checked_batch, cross_entropy_sum


class TiedGradient(NamedTuple):
    """What one backward pass gives when the two uses of E are two arguments of the loss."""

    loss: jax.Array
    """Mean cross-entropy, nats."""
    lookup: jax.Array
    """(V, D): through the rows that were read. Rows of tokens that are no input are zero."""
    head: jax.Array
    """(V, D): through the logits. Row v is the mean over positions of (p_v - y_v) h."""
    grads: dict
    """The whole gradient tree, as `jax.grad(mg.loss)` gives it; its embedding leaf is lookup + head."""


def tied_gradient(params, batch: Batch, config: ModelConfig) -> TiedGradient:
    """Both parts of dL/dE and the rest of the gradient, from one forward and one backward pass. Jittable."""
    require(config.tied, "tied_gradient needs a tied model; this config says tied: false, so its tables are two leaves")
    batch = checked_batch(batch, config)

    def with_table(rest, table):
        return {**rest, "embed": {"embedding": table}}

    def loss(E_lookup, E_head, rest):
        h = trunk(rest, embed(with_table(rest, E_lookup), batch.tokens, config), config)
        logits = unembed(with_table(rest, E_head), h, config)
        return cross_entropy_sum(logits, batch.targets, batch.mask).mean()

    E = params["embed"]["embedding"]
    rest = {name: leaf for name, leaf in params.items() if name != "embed"}
    value, (lookup, head, grads) = jax.value_and_grad(loss, argnums=(0, 1, 2))(E, E, rest)
    return TiedGradient(value, lookup, head, with_table(grads, lookup + head))


def tied_norms(split: TiedGradient) -> dict[str, float]:
    """Sizes of the two parts by three norms, since they tell different stories, and the angle between the parts.

    `head_share_x` is head / (head + lookup) by norm x; `cosine` is between the parts. Of a batch, before clipping.
    """
    norms = {"l2": optax.tree.norm, "l2_squared": lambda x: jnp.sum(x**2), "l1": lambda x: jnp.sum(jnp.abs(x))}
    result = {}
    for name, norm in norms.items():
        lookup, head = float(norm(split.lookup)), float(norm(split.head))
        result |= {
            f"lookup_{name}": lookup,
            f"head_{name}": head,
            f"sum_{name}": float(norm(split.lookup + split.head)),
        }
        result[f"head_share_{name}"] = head / (head + lookup) if head + lookup else 0.0
    product = result["lookup_l2"] * result["head_l2"]
    result["cosine"] = float(jnp.sum(split.lookup * split.head)) / product if product else 0.0
    result["lookup_rows"] = int(jnp.sum(jnp.any(split.lookup != 0, axis=1)))
    return result
