"""Another number of rows for the table."""

import jax
import jax.numpy as jnp
import numpy as np

from .errors import InputError, InputTypeError, require
from .model import wide
from .trees import leaf_paths
from .tying import HEAD, TABLE


def resize_vocab(params, n: int, *, new_rows: str = "mean", key: jax.Array | None = None, opt_state=None):
    """The params with a table of n rows, or (params, opt_state) where `opt_state` is given.

    Rows that stay are the same bit for bit; a smaller n drops the last rows. New rows are the mean of the old
    (`new_rows="mean"`: a new token starts as likely as an average one, Hewitt 2021), or "noise" drawn with `key` from
    a normal distribution with each column's mean and standard deviation. The optimizer's moments of new rows are 0, as
    before a first update. An untied model's two tables are resized alike. The config to go with it is
    `dataclasses.replace(config, vocab_size=n)`; a tokenizer keeps its ids.
    """
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool):
        raise InputTypeError(f"n is {n!r}; give the number of rows, a whole number")
    require(n >= 1, f"n is {n}; a table needs at least 1 row")
    require(new_rows in ("mean", "noise"), f"new_rows is {new_rows!r}; choose 'mean' or 'noise'")
    require(new_rows == "mean" or key is not None, "new_rows='noise' needs a key, such as jax.random.key(0)")
    leaves = leaf_paths(params)
    require(TABLE in leaves, f"the params hold no table {TABLE}")
    V = leaves[TABLE].shape[0]
    keys = {path: None if key is None else jax.random.fold_in(key, i) for i, path in enumerate((TABLE, HEAD))}

    def grown(path: str, table):
        if new_rows == "noise":
            return _noise(keys[path], table, n - V)
        mean = jnp.mean(table.astype(wide(table.dtype)), axis=0, keepdims=True)
        return jnp.broadcast_to(mean.astype(table.dtype), (n - V, table.shape[1]))

    resized = _resized(params, n, grown)
    if opt_state is None:
        return resized
    moments = _resized(opt_state, n, lambda path, table: jnp.zeros((n - V, table.shape[1]), table.dtype))
    return resized, moments


def _noise(key, table, more: int):
    rows = table.astype(wide(table.dtype))
    noise = jax.random.normal(key, (more, table.shape[1]), rows.dtype)
    return (jnp.mean(rows, axis=0)[None] + jnp.std(rows, axis=0)[None] * noise).astype(table.dtype)


def _resized(tree, n: int, grown):
    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        table = next((end for end in (TABLE, HEAD) if f"/{name}".endswith(f"/{end}")), None)
        if table is None:
            return leaf
        if jnp.ndim(leaf) != 2:
            raise InputError(f"{name} has shape {jnp.shape(leaf)}; a table has two axes")
        kept = leaf[: min(n, leaf.shape[0])]
        return kept if n <= leaf.shape[0] else jnp.concatenate([kept, grown(table, leaf)])

    return jax.tree_util.tree_map_with_path(one, tree)
