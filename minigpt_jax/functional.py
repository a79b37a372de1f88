"""The model as pure functions of a params pytree, jitted with the config static.

Token arrays may be (T,) or (B, T); results have the same leading axes. What a user can get wrong about them is refused
on the host, before anything is compiled: inside jit an id outside the table would be clamped, wrapped or NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig
from .errors import InputError, InputTypeError, require
from .model import MiniGPT, initial_std
from .trees import tree_differences


def check_ids(ids, vocab_size: int, name: str):
    """`ids` as an array; raises unless they are integers within [0, vocab_size). Traced ids pass unseen."""
    if not hasattr(ids, "dtype"):
        try:
            ids = np.asarray(ids)
        except ValueError:
            raise InputError(f"{name}: rows of different lengths; pad them, or give one at a time") from None
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputTypeError(f"{name} of type {ids.dtype}; give integer token ids (int32)")
    if not isinstance(ids, jax.core.Tracer):
        values = np.asarray(ids)
        bad = (values < 0) | (values >= vocab_size)
        if bad.any():
            at = tuple(np.argwhere(bad)[0].tolist())
            raise InputError(
                f"{name}{list(at)} is {values[at]}; ids must be in [0, {vocab_size}), the rows of the table: "
                "check the tokenizer (targets are left out by a mask, not by an id)"
            )
    return ids


def check_tokens(tokens, config: ModelConfig, name: str = "tokens"):
    """`tokens` as an array; raises unless they are integers of shape (T,) or (B, T) within [0, V)."""
    tokens = check_ids(tokens, config.vocab_size, name)
    if tokens.ndim not in (1, 2) or 0 in tokens.shape:
        raise InputError(f"{name} of shape {tokens.shape}; give (T,) or (B, T) with at least one token")
    return tokens


def check_params(params, config: ModelConfig) -> None:
    """Raise unless `params` has the tree and the shapes of the config; dtypes may differ (a cast copy, say)."""
    expected = abstract_params(config)
    if jax.tree.structure(params) == jax.tree.structure(expected):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
        if all(jnp.shape(a) == b.shape for a, b in pairs):
            return
    raise InputError(f"the params do not fit the config: {'; '.join(tree_differences(expected, params, 'the params'))}")


def check_limit(vocab_limit: int | None, vocab_size: int) -> int:
    """How many rows of the table stand for tokens: `vocab_limit`, or all V."""
    limit = vocab_size if vocab_limit is None else vocab_limit
    require(1 <= limit <= vocab_size, f"vocab_limit is {limit}; it must be in [1, {vocab_size}]")
    return limit


def check_stream(x, config: ModelConfig) -> None:
    require(
        jnp.ndim(x) in (2, 3) and jnp.shape(x)[-1] == config.d_model,
        f"the residual stream has shape {jnp.shape(x)}; give (T, D) or (B, T, D) with D = d_model = {config.d_model}",
    )


def check_mask(mask, shape: tuple[int, ...]):
    """`mask` as a bool array of `shape`, or None."""
    if mask is None:
        return None
    mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
    if mask.dtype != bool:
        raise InputTypeError(f"mask is {mask.dtype}; give bool, True at real tokens")
    require(mask.shape == shape, f"mask has shape {mask.shape}; give one bool for each token, {shape}")
    return mask


def check_context(length: int, config: ModelConfig) -> None:
    require(
        config.positions != "learned" or length <= config.context_len,
        f"{length} positions are asked for and context_len is {config.context_len}; learned positions end there: "
        "shorten the text (RoPE has no such wall)",
    )


_RANK = {"__call__": 2, "lookup": 2, "trunk": 3, "unembed": 3, "readout": 3}


@functools.partial(jax.jit, static_argnames=("config", "method", "only_h"))
def _apply(params, x, mask, dropout_key, *, config, method, only_h=False):
    """Run a method of the module on (B, T, ...), and give back the leading axes that came in."""
    single = x.ndim < _RANK[method]
    if single:
        x, mask = x[None], None if mask is None else mask[None]
    arguments = (x, mask) if method in ("__call__", "trunk") else (x,)
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    result = MiniGPT(config).apply({"params": params}, *arguments, method=method, rngs=rngs)
    if only_h:
        result = result[0]  # before the program ends, so that it computes no copies of the rest
    return jax.tree.map(lambda leaf: leaf[0], result) if single else result


def abstract_params(config: ModelConfig) -> dict:
    """The params tree as `jax.ShapeDtypeStruct`s: every path, shape and dtype, with nothing allocated."""
    require(
        "float64" not in (config.dtype, config.param_dtype) or jax.config.jax_enable_x64,
        "float64 needs JAX's 64-bit mode; set JAX_ENABLE_X64=1 in the environment, or choose float32",
    )
    return _abstract_params(config)


@functools.lru_cache
def _abstract_params(config: ModelConfig) -> dict:
    module, tokens = MiniGPT(config), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(lambda key, tokens: module.init(key, tokens)["params"], jax.random.key(0), tokens)


def init(config: ModelConfig, key: jax.Array) -> dict:
    """Fresh parameters, a plain nested dict: matrices and the table as `model.initial_std` says, biases 0, scales 1
    (0 with norm_unit_offset).

    Drawn on the host by NumPy's Philox from the key's own bits, since compiling a draw for each leaf takes longer than
    training's first hundred steps. Under jit, vmap or eval_shape the same function is called back: same key, same bits
    (with one version of NumPy, which does not promise its streams across versions).
    """
    if not hasattr(key, "dtype"):
        raise InputTypeError(f"key is {key!r}; give a random key, such as jax.random.key(0)")
    key = jnp.asarray(key)
    bits = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    draw = functools.partial(_draw_params, config)
    if isinstance(bits, jax.core.Tracer):
        return jax.pure_callback(draw, abstract_params(config), bits, vmap_method="sequential")
    return jax.tree.map(jnp.asarray, draw(bits))


def _draw_params(config: ModelConfig, bits) -> dict:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(np.asarray(bits).ravel().tolist())))

    def leaf(path, abstract):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        std = initial_std(name, abstract.shape, config)
        if std:
            value = std * rng.standard_normal(abstract.shape, np.float32)
        else:
            one = name.endswith("scale") and not config.norm_unit_offset
            value = np.full(abstract.shape, 1.0 if one else 0.0)
        return value.astype(abstract.dtype, copy=False)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))


def forward(params, tokens, config: ModelConfig, mask=None, dropout_key=None) -> jax.Array:
    """Logits, never probabilities: (T,) -> (T, V) or (B, T) -> (B, T, V), float32 whatever `config.dtype`.

    `mask` (bool, shaped as the tokens) is False at padding, which no position then attends to. `dropout_key` turns
    dropout on. Raises `InputError` for ids outside [0, V), for non-integer ids, and past a learned position table.
    """
    tokens = check_tokens(tokens, config)
    check_context(tokens.shape[-1], config)
    check_params(params, config)
    mask = check_mask(mask, tokens.shape)
    return _apply(params, tokens, mask, dropout_key, config=config, method="__call__")


def embed(params, tokens, config: ModelConfig) -> jax.Array:
    """The start of the residual stream, (..., T, D): rows of the table (times sqrt(D) with scale_embedding), plus
    learned positions if any."""
    tokens = check_tokens(tokens, config)
    check_context(tokens.shape[-1], config)
    return _apply(params, tokens, None, None, config=config, method="lookup")


def trunk(params, x, config: ModelConfig, mask=None, dropout_key=None, return_residuals: bool = False):
    """Blocks and final norm, (..., T, D) -> (..., T, D); with `return_residuals` also the stream at every layer.

    The dict's names: "embed", then "block_i/attention" and "block_i/ffn", the stream after each addition, before the
    final norm. What a surrounding jit does not use of it costs nothing.
    """
    check_stream(x, config)
    mask = check_mask(mask, jnp.shape(x)[:-1])
    only_h = not return_residuals
    result = _apply(params, x, mask, dropout_key, config=config, method="trunk", only_h=only_h)
    return result if only_h else result[:2]


def unembed(params, h, config: ModelConfig) -> jax.Array:
    """Logits of normed hidden states, (..., T, D) -> (..., T, V): `h @ E.T` with the lookup's own E when tied."""
    check_params(params, config)
    check_stream(h, config)
    return _apply(params, h, None, None, config=config, method="unembed")


def readout(params, x, config: ModelConfig) -> jax.Array:
    """Logits of the residual stream at any layer, (..., T, D) -> (..., T, V), as if it were the last: the final norm
    with its own statistics of x, its scale and bias, then the head. What a logit lens does."""
    check_params(params, config)
    check_stream(x, config)
    return _apply(params, x, None, None, config=config, method="readout")
