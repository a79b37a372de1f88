"""Where the parameters, bytes and FLOPs of a config are, from its shapes alone; and how large a tree's leaves are."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..errors import require
from ..functional import abstract_params
from ..model import wide
from ..trees import leaf_paths
from ..tying import HEAD, TABLE
from .tables import Table


class ParamRow(NamedTuple):
    path: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    used_by: str


@dataclasses.dataclass(frozen=True)
class ParamTable:
    """Every leaf, and the totals. `render` prints it in 100 columns, and `str()` is `render()`."""

    config: ModelConfig
    rows: tuple[ParamRow, ...]

    @property
    def total(self) -> int:
        """Parameters, each leaf once."""
        return sum(row.count for row in self.rows)

    @property
    def embedding(self) -> int:
        """Parameters of the token table, V * D."""
        return self.config.vocab_size * self.config.d_model

    @property
    def other_total(self) -> int:
        """What the total would be with `tied` the other way: V * D more or less."""
        return self.total + (self.embedding if self.config.tied else -self.embedding)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs per token at context_len: 2 for each weight of a matmul, the head's V * D among them, and
        4 T H K a layer for scores and weighted sum, counted in full (not halved for causality)."""
        c = self.config
        kernels = sum(row.count for row in self.rows if row.path.endswith("kernel"))
        return 2 * (kernels + self.embedding) + 4 * c.n_layers * c.context_len * c.n_heads * c.head_dim

    def __str__(self) -> str:
        return self.render()

    def render(self, every_leaf: bool = False) -> str:
        """One line a leaf, then the totals. Models of over 60 leaves show one block, unless `every_leaf`."""
        c = self.config
        rows = self.rows if every_leaf or len(self.rows) <= 60 else _folded(self.rows)
        width = max(len(row.path) for row in rows)
        lines = [f"{'path':<{width}}  {'shape':>15}  {'parameters':>15}  {'bytes':>15}  used by"]
        for row in rows:
            shape = "x".join(map(str, row.shape))
            lines.append(
                f"{row.path:<{width}}  {shape:>15}  {row.count:>15,}  {row.bytes:>15,}  {row.used_by}".rstrip()
            )

        share = f"{self.embedding / max(self.total, self.other_total):.1%}"
        saves, of = ("saves", "of the untied") if c.tied else ("would save", "of")
        tied = "" if c.tied else f"; tied: {self.other_total:,}"
        cache = kv_cache_bytes(c, batch=1, length=c.context_len)
        figures = [
            ("total", self.total, f"{self.bytes:,} bytes as {c.param_dtype}"),
            ("  of it the token table", self.embedding, f"{self.embedding / self.total:.1%} of the total"),
            ("  without the token table", self.total - self.embedding, ""),
            (f"tying {saves}", self.embedding, f"{share} {of} {max(self.total, self.other_total):,}{tied}"),
            ("forward FLOPs per token", self.flops_per_token, f"at T = {c.context_len}, the head's matmul counted"),
            ("KV cache bytes", cache, f"for T = {c.context_len} as {c.dtype}; {cache // c.context_len:,} a token"),
        ]
        return "\n".join([*lines, "", *(f"{name:<28}{n:>18,}  {note}".rstrip() for name, n, note in figures)])


def _folded(rows) -> list[ParamRow]:
    """Blocks have equal shapes: print the first, then one line for the rest."""
    first = [row for row in rows if not row.path.startswith("block_") or row.path.startswith("block_0/")]
    rest = [row for row in rows if row not in first]
    if rest:
        blocks = sorted({int(row.path.split("/")[0].removeprefix("block_")) for row in rest})
        name = f"block_{blocks[0]}" + (f" ... block_{blocks[-1]}" if len(blocks) > 1 else "")
        summary = ParamRow(name, ("as block_0",), sum(r.count for r in rest), sum(r.bytes for r in rest), "")
        at = 1 + max(i for i, row in enumerate(first) if row.path.startswith("block_0/"))
        first.insert(at, summary)
    return first


def param_table(config: ModelConfig) -> ParamTable:
    """Path, shape, count and bytes of every leaf, by `jax.eval_shape`; the tied table once, with both its uses."""
    leaves = leaf_paths(abstract_params(config))
    uses = {TABLE: "lookup, head" if config.tied else "lookup", HEAD: "head"}
    rows = [
        ParamRow(
            path, leaf.shape, math.prod(leaf.shape), math.prod(leaf.shape) * leaf.dtype.itemsize, uses.get(path, "")
        )
        for path, leaf in leaves.items()
    ]
    order = {"embed": 0, "positions": 1, "norm_final": 3, "head": 4}
    rows.sort(key=lambda row: (order.get(row.path.split("/")[0], 2), _block(row.path)))
    return ParamTable(config, tuple(rows))


def _block(path: str) -> int:
    return int(path.split("/")[0].removeprefix("block_")) if path.startswith("block_") else 0


def kv_cache_bytes(config: ModelConfig, batch: int, length: int) -> int:
    """2 L G K S B bytes-per-value: keys and values of every layer, for `batch` sequences of `length` positions."""
    values = 2 * config.n_layers * config.kv_heads * config.head_dim * length * batch
    return values * jnp.dtype(config.dtype).itemsize


def tree_report(tree, other=None) -> "TreeReport":
    """Every array of a pytree, params, gradients, updates, optimizer state or a split: how large it is and whether it
    is finite. With `other`, a tree of the same paths and shapes, ratio = L2 norm of this leaf / of the other's:
    `tree_report(grads, params)` is gradient to weight, `tree_report(updates, params)` update to weight.

    Records: path, shape, dtype, l2, rms, max (of the absolute values), nonfinite (how many values), share (of the
    tree's squared L2 norm), and other_l2 and ratio. Sums are float32 at least, scaled so that they can't overflow.
    """
    leaves, others = leaf_paths(tree), {} if other is None else leaf_paths(other)
    for path, leaf in leaves.items():
        require(
            _is_numbers(leaf),
            f"{path or 'the tree'} is {type(leaf).__name__}, not an array of numbers; give a pytree of arrays",
        )
        if other is not None:
            shape = getattr(others.get(path), "shape", "missing" if path not in others else "no array")
            require(shape == leaf.shape, f"{path} has shape {leaf.shape} and is {shape} in the second tree")
    sizes = {path: _measured(leaf) for path, leaf in leaves.items()}
    finite = [size.l2 for size in sizes.values() if math.isfinite(size.l2)]
    largest = max(finite, default=0.0) or 1.0
    total = sum((l2 / largest) ** 2 for l2 in finite)
    records = []
    for path, leaf in leaves.items():
        size = sizes[path]
        record = {"path": path, "shape": tuple(leaf.shape), "dtype": str(leaf.dtype), **size._asdict()}
        record["share"] = (size.l2 / largest) ** 2 / total if total else 0.0
        if other is not None:
            record["other_l2"] = _measured(others[path]).l2
            record["ratio"] = size.l2 / record["other_l2"] if record["other_l2"] else math.nan
        records.append(record)
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    bad = sum(size.nonfinite for size in sizes.values())
    of = "" if len(finite) == len(sizes) else " of the finite leaves"
    note = f"{len(leaves)} leaves, {count:,} values, {bad:,} not finite, L2 norm{of} {largest * math.sqrt(total):.6g}"
    return TreeReport(records, note)


class TreeReport(Table):
    """`str()` prints it in 100 columns."""

    def render(self, columns=None, limit=None) -> str:
        names = {"path": "path", "shape": "shape", "dtype": "dtype", "l2": "L2 norm", "rms": "rms", "max": "max |x|"}
        names |= {"nonfinite": "bad", "share": "share"}
        if self.records and "ratio" in self.records[0]:
            names |= {"ratio": "ratio"}
        rows = [record | {"share": f"{record['share']:.1%}"} for record in self.records]
        return Table(rows, self.note).render(columns or names, limit)


class _Size(NamedTuple):
    l2: float
    rms: float
    max: float
    nonfinite: int


def _is_numbers(leaf) -> bool:
    kinds = (jnp.floating, jnp.integer, bool)
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and any(jnp.issubdtype(leaf.dtype, k) for k in kinds)


def _measured(leaf) -> _Size:
    if not math.prod(jnp.shape(leaf)):
        return _Size(0.0, 0.0, 0.0, 0)
    if isinstance(leaf, jax.Array):
        largest, mean_square, nonfinite = jax.device_get(_reduced_on_device(leaf.astype(wide(leaf.dtype))))
    else:  # JAX would cut NumPy's 64 bits to 32
        with np.errstate(invalid="ignore"):
            largest, mean_square, nonfinite = _reduced(np.asarray(leaf, np.float64), np)
    rms = float(largest) * math.sqrt(mean_square)
    return _Size(rms * math.sqrt(math.prod(jnp.shape(leaf))), rms, float(largest), int(nonfinite))


def _reduced(x, xp):
    """max |x|, the mean square of x / max |x|, and how many values are not finite; `xp` is numpy or jax.numpy."""
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    largest = xp.max(xp.abs(x))
    scaled = x / xp.where(largest > 0, largest, 1)
    return largest, xp.mean(xp.mean(scaled**2, axis=1)), xp.sum(~xp.isfinite(x))


_reduced_on_device = jax.jit(functools.partial(_reduced, xp=jnp))
