"""The gradient of the tied table, split by use: dL/dE = lookup part + head part.

Three norms are always named, since they tell different stories: in the published run of Lopardo et al. 2026
(arXiv:2603.26663) the head part is 0.70 of the sum of both by L2 over the first 1,000 steps, 0.82 by squared L2, 0.43
by L1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..data import Batch
from ..errors import require
from ..losses import loss_and_grads
from ..model import wide
from ..tying import tie_gradients, two_tables, untied
from .tables import Table, shown


class TiedGradient(NamedTuple):
    """What one backward pass gives when the two uses of E are two leaves of the tree."""

    loss: jax.Array
    """Mean cross-entropy, nats."""
    lookup: jax.Array
    """(V, D): through the rows that were read. Rows of tokens that are no input are zero."""
    head: jax.Array
    """(V, D): through the logits. Row v is the mean over positions of (p_v - y_v) h."""
    grads: dict
    """The whole gradient tree, as `jax.grad(mg.loss)` gives it; its embedding leaf is lookup + head."""


def tied_gradient(
    params, batch: Batch, config: ModelConfig, dropout_key=None, accumulate: int = 1, chunk: int | None = None
) -> TiedGradient:
    """Both parts of dL/dE and the rest of the gradient, from one forward and one backward pass. Jittable.

    The options are those of the loss: a dropout key, micro-batches, logits in chunks. The gradient is that of the
    whole batch, before any clipping.
    """
    require(config.tied, "tied_gradient needs a tied model; this config says tied: false, so its tables are two leaves")
    summed, grads = loss_and_grads(two_tables(params), batch, untied(config), dropout_key, accumulate, chunk)
    return split_of(summed.mean(), grads)


def split_of(loss, grads) -> TiedGradient:
    """The split, from the gradient of the untied tree."""
    tied, _ = tie_gradients().update(grads, ())
    return TiedGradient(loss, grads["embed"]["embedding"], grads["head"]["embedding_out"], tied)


def _wide(x):
    return x.astype(wide(x.dtype))


def _l2_V(x_VxD):
    return jnp.sqrt(jnp.sum(_wide(x_VxD) ** 2, axis=1))


def _total(x_VxD):
    """Sum, row by row first, so that its float32 rounding does not depend on how a backend sums V * D terms."""
    return jnp.sum(jnp.sum(x_VxD, axis=1))


def tied_stats(split: TiedGradient, update: jax.Array | None = None) -> dict[str, float]:
    """Sizes of the two parts by three norms, the angle between them, and how the update follows each.

    Keys: `lookup_X`, `head_X`, `sum_X` for X in l2, l2_squared, l1 (entrywise, of the whole part; sum is lookup + head)
    and `head_share_X` = head / (head + lookup); `inner_product` and `cosine` of the parts, so that
    sum_l2_squared = lookup_l2_squared + head_l2_squared + 2 inner_product; `lookup_rows`, how many rows were read.

    With `update` (V, D), what the optimizer added to E, also `update_cosine_lookup`, `_head` and `_sum`: the cosine of
    the update with *minus* that gradient, so 1 is a step straight down it. Under jit the values are scalars.
    """
    stats = _stats(split.lookup, split.head, update)
    return {name: x if isinstance(x, jax.core.Tracer) else x.item() for name, x in stats.items()}


@jax.jit
def _stats(lookup, head, update):
    lookup, head = _wide(lookup), _wide(head)
    parts = {"lookup": lookup, "head": head, "sum": lookup + head}
    stats = {}
    squared = {name: _total(x**2) for name, x in parts.items()}
    norms = {
        "l2": {name: jnp.sqrt(x) for name, x in squared.items()},
        "l2_squared": squared,
        "l1": {name: _total(jnp.abs(x)) for name, x in parts.items()},
    }
    for norm, sizes in norms.items():
        stats |= {f"{name}_{norm}": size for name, size in sizes.items()}
        stats[f"head_share_{norm}"] = _ratio(sizes["head"], sizes["head"] + sizes["lookup"])
    stats["inner_product"] = _total(lookup * head)
    stats["cosine"] = _ratio(stats["inner_product"], norms["l2"]["lookup"] * norms["l2"]["head"])
    stats["lookup_rows"] = jnp.sum(jnp.sum(jnp.abs(lookup), axis=1) != 0)  # NaN counts, too
    if update is not None:
        update = _wide(update)
        length = jnp.sqrt(_total(update**2))
        for name, part in parts.items():
            stats[f"update_cosine_{name}"] = _ratio(-_total(update * part), length * norms["l2"][name])
    return stats


def _ratio(a, b):
    """a / b, and 0 where b is 0: a part that does not exist has no share and no direction."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))  # NaN stays NaN


def token_table(split: TiedGradient, batch: Batch, texts: list[str] | None = None) -> Table:
    """Row by row of E: what each token's vector is told by its two uses. Largest head part first.

    Records: id, text (with `texts`, the text of each id; rows beyond it have no token and are left out), inputs and
    targets (how often the token stands in the batch as either; masked targets, and inputs that no target is predicted
    from, do not count), lookup_l2, head_l2, cosine of the two (None where the lookup part is zero), softmax_only:
    neither input nor target, so moved by the normaliser of the softmax alone, which pushes all such rows the same way.
    """
    V = split.head.shape[0]
    shown_rows = V if texts is None else min(V, len(texts))
    tokens, targets = np.asarray(batch.tokens), np.asarray(batch.targets)
    mask = np.ones(targets.shape, bool) if batch.mask is None else np.asarray(batch.mask)
    used = np.logical_or.accumulate(mask[..., ::-1], axis=-1)[..., ::-1]  # a target at or after it counts
    inputs_V, targets_V = np.bincount(tokens[used], minlength=V), np.bincount(targets[mask], minlength=V)
    lookup_V, head_V, dot_V = jax.device_get(_by_row(split.lookup, split.head))
    records = [
        {
            "id": v,
            **({} if texts is None else {"text": texts[v]}),
            "inputs": int(inputs_V[v]),
            "targets": int(targets_V[v]),
            "lookup_l2": float(lookup_V[v]),
            "head_l2": float(head_V[v]),
            "cosine": float(dot_V[v] / (lookup_V[v] * head_V[v])) if lookup_V[v] * head_V[v] else None,
            "softmax_only": not inputs_V[v] and not targets_V[v],
        }
        for v in range(shown_rows)
    ]
    records.sort(key=lambda record: -record["head_l2"])
    return TokenTable(records)


class TokenTable(Table):
    """A `Table` whose texts print in quotes, and whose rows moved by the softmax alone say so."""

    def render(self, columns=None, limit: int | None = 20) -> str:
        def row(record):
            text = {"token": shown(record["text"])} if "text" in record else {}
            rest = {name: value for name, value in record.items() if name not in ("id", "text", "softmax_only")}
            return {"id": record["id"], **text, **rest, "moved by": "softmax alone" if record["softmax_only"] else ""}

        return Table([row(record) for record in self.records], self.note).render(columns, limit)


@jax.jit
def _by_row(lookup, head):
    return _l2_V(lookup), _l2_V(head), jnp.sum(_wide(lookup) * _wide(head), axis=1)
