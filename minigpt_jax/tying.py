"""One table or two: taking the tie apart and putting it back, for parameters and for their gradients.

The untied tree of a tied model holds the same table twice: `embed/embedding`, the lookup's, and `head/embedding_out`,
the head's. The gradient of the loss on that tree is the tied gradient split by use, from one backward pass, whatever
the loss does: dL/dE = lookup part + head part.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .config import ModelConfig
from .errors import InputError, require
from .functional import abstract_params
from .model import wide
from .trees import leaf_paths

TABLE, HEAD = "embed/embedding", "head/embedding_out"


def untied(config: ModelConfig) -> ModelConfig:
    """The config of the untied tree."""
    return dataclasses.replace(config, tied=False)


def two_tables(params) -> dict:
    """As `untie`, with one array in both places: for use inside jit, since such a tree can't be donated."""
    require(
        isinstance(params, dict) and "head" not in params and "embedding" in params.get("embed", {}),
        f"the params do not hold one tied table, {TABLE} without {HEAD}: they are untied already, or no params",
    )
    return {**params, "head": {"embedding_out": params["embed"]["embedding"]}}


def untie(params) -> dict:
    """Tied params to untied ones, which compute the same with the config `untied(config)`.

    The head's table is a copy, V * D values of new memory.
    """
    tree = two_tables(params)
    return {**tree, "head": {"embedding_out": jnp.copy(tree["head"]["embedding_out"])}}


def retie(params, keep: str | None = None) -> dict:
    """Untied params back to one table.

    Raises `InputError` where the two tables differ, unless `keep` says which one stays: "lookup", "head" or "mean".
    """
    leaves = leaf_paths(params)
    require(TABLE in leaves and HEAD in leaves, f"the params do not hold two tables, {TABLE} and {HEAD}")
    lookup, head = leaves[TABLE], leaves[HEAD]
    require(
        jnp.shape(lookup) == jnp.shape(head),
        f"{TABLE} has shape {jnp.shape(lookup)} and {HEAD} {jnp.shape(head)}; they can't be one table",
    )
    require(keep in (None, "lookup", "head", "mean"), f"keep is {keep!r}; choose 'lookup', 'head' or 'mean'")
    if keep is None:
        require(
            not any(isinstance(x, jax.core.Tracer) for x in (lookup, head)),
            "inside jit the two tables can't be compared; say which one to keep: 'lookup', 'head' or 'mean'",
        )
        a, b = np.asarray(lookup), np.asarray(head)
        rows = np.flatnonzero(((a != b) & ((a == a) | (b == b))).any(axis=1))  # NaN equals NaN here
        if rows.size:
            gap = np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)))
            raise InputError(
                f"{TABLE} and {HEAD} differ in {rows.size} of {a.shape[0]} rows, by at most {gap:.3g}; "
                "say which one to keep: retie(params, keep='lookup'), 'head' or 'mean'"
            )
    table = {None: lookup, "lookup": lookup, "head": head, "mean": (lookup + head) / 2}[keep]
    return _with_table(params, table)


def _with_table(params, table) -> dict:
    rest = {name: leaf for name, leaf in params.items() if name != "head"}
    return {**rest, "embed": {**params["embed"], "embedding": table}}


def assert_tied(params, config: ModelConfig) -> None:
    """Raise `InputError`, naming the leaves, unless the tree holds exactly one table.

    For any tree shaped like the params: params, gradients, one moment of an optimizer, at any depth of a larger tree.
    A table is what is called `embedding`, and what has the shape (V, D) or (D, V) without being a kernel of the model.
    """
    require(config.tied, "the config says tied: false: its model has two tables, so there is no tie to assert")
    shape = (config.vocab_size, config.d_model)
    kernels = [path for path in leaf_paths(abstract_params(config)) if path != TABLE]
    leaves = leaf_paths(params)
    tables = [
        path
        for path, leaf in leaves.items()
        if not any(f"/{path}".endswith(f"/{kernel}") for kernel in kernels)
        and (path.split("/")[-1] == "embedding" or jnp.shape(leaf) in (shape, shape[::-1]))
    ]
    require(bool(tables), f"the tree has no table: it needs a leaf {TABLE} of shape {shape}")
    described = " and ".join(f"{path} {list(jnp.shape(leaves[path]))}" for path in tables)
    require(
        len(tables) == 1,
        f"not tied: {described} are {len(tables)} tables, which part at the first update; join them with retie(params)",
    )
    require(
        f"/{tables[0]}".endswith(f"/{TABLE}") and jnp.shape(leaves[tables[0]]) == shape,
        f"the only table is {described}; it must be {TABLE} {list(shape)}",
    )


# Interventions: optax transformations of the gradient of the untied tree. They come before `tie_gradients`, which adds
# the two parts up for the optimizer of the tied params:
#
#     optimizer = optax.chain(scale_lookup_gradient(5.0), tie_gradients(), optax.adamw(1e-3))
#     grads = jax.grad(loss)(untie(params), batch, untied(config))
#     updates, opt_state = optimizer.update(grads, opt_state, params)


def _parts(grads):
    require(
        isinstance(grads, dict) and {"embed", "head"} <= grads.keys(),
        "this transformation needs the gradient by use: jax.grad(loss)(untie(params), batch, untied(config))",
    )
    return grads["embed"]["embedding"], grads["head"]["embedding_out"]


def _replaced(grads, lookup, head) -> dict:
    return {**grads, "embed": {"embedding": lookup}, "head": {"embedding_out": head}}


def scale_lookup_gradient(c: float) -> optax.GradientTransformation:
    """Multiply the lookup part by `c`, as in the causal test of Lopardo et al. 2026 (arXiv:2603.26663)."""

    def scale(grads, params=None):
        lookup, head = _parts(grads)
        return _replaced(grads, c * lookup, head)

    return optax.stateless(scale)


def clip_head_gradient() -> optax.GradientTransformation:
    """Scale the head part down to the L2 norm of the lookup part, where it is larger."""

    def clip(grads, params=None):
        lookup, head = _parts(grads)
        limit, norm = (optax.tree.norm(part.astype(wide(part.dtype))) for part in (lookup, head))
        return _replaced(grads, lookup, head * jnp.where(norm > limit, limit / norm, 1).astype(head.dtype))

    return optax.stateless(clip)


def tie_gradients() -> optax.GradientTransformation:
    """Add the two parts up: from the gradient of the untied tree to that of the tied one."""

    def tie(grads, params=None):
        lookup, head = _parts(grads)
        return _with_table(grads, lookup + head)

    return optax.stateless(tie)
