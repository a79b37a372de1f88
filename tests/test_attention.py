"""Attention by itself: blocks of queries, rows that see nothing, extreme scores, derivatives of second order.

That it equals the oracle inside the model, grouped heads and masks included, is in `test_model.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from models import equations, float64, noisy_params

import minigpt_jax as mg
from minigpt_jax import model
from minigpt_jax.trees import leaf_paths

pytestmark = pytest.mark.usefixtures("quick_compilation")

# 4 query heads on 2 key/value heads, each 2 wide.
GROUPED = mg.ModelConfig(vocab_size=7, d_model=8, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=4, context_len=8)


def weights_of(config):
    return noisy_params(config)["block_0"]["attention"]


def a_stream(config, shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, config.d_model)).astype(config.dtype)


def attend(weights, x_BxTxD, config, mask_BxT=None, window=None):
    B, T, D = x_BxTxD.shape
    arguments = (x_BxTxD.reshape(B * T, D), B, jnp.arange(T), mask_BxT, None, window)
    y_NxD, _ = model.Attention(config).apply({"params": weights}, *arguments)
    return y_NxD.reshape(B, T, D)


def with_gradients(config):
    """Output, and the gradients of its product with `dy` in weights and input, as one program."""

    @jax.jit
    def run(weights, x, mask, dy, window=None):
        y, pull = jax.vjp(lambda weights, x: attend(weights, x, config, mask, window), weights, x)
        return y, pull(dy)

    return run


def assert_equal(found, expected, rtol):
    """Every array, relative to its largest entry."""

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(np.abs(b).max()))

    jax.tree.map(check, found, expected)


# Blocks of queries.


@functools.cache
def in_one_block():
    return with_gradients(float64(GROUPED))


@pytest.mark.parametrize(("length", "window"), [(256, 10**6), (257, 100), (258, 3), (259, 10**6)])
def test_blocks_of_queries_change_nothing(length, window, x64, monkeypatch):
    """A cut that leaves out the last query or repeats one, keys of too few blocks, a mask or window cut elsewhere.

    One program for the other side: what comes after `length` has no influence on what comes before.
    """
    config = float64(GROUPED)
    mask = np.random.default_rng(1).random((2, 259)) < 0.8
    mask[:, 0] = True
    x, dy = a_stream(config, (2, 259)), a_stream(config, (2, 259), seed=2)
    dy[:, length:] = 0
    cut = [array[:, :length] for array in (x, mask, dy)]
    y, (weight_grads, x_grad) = with_gradients(config)(weights_of(config), *cut, window)
    monkeypatch.setattr(model, "QUERY_BLOCKS_FROM", 10**9)
    expected, (expected_weight_grads, expected_x_grad) = in_one_block()(weights_of(config), x, mask, dy, window)
    # float64: sums of up to 259 terms, grouped otherwise.
    assert_equal(y, expected[:, :length], 1e-12)
    assert_equal(weight_grads, expected_weight_grads, 1e-12)
    assert_equal(x_grad, expected_x_grad[:, :length], 1e-12)


def test_blocks_spare_the_scores_of_later_keys():
    """From 256 on no (T, T) scores exist, and 5/8 of their products are made: 1/4 of the queries see 1/4 of the keys,
    the next 2/4 ..."""
    largest, products = {}, {}
    for length in (255, 256):
        shape = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
        jaxpr = jax.make_jaxpr(functools.partial(attend, config=GROUPED))(weights_of(GROUPED), shape)
        eqns = list(equations(jaxpr.jaxpr))
        floats = [v.aval.size for eqn in eqns for v in eqn.outvars if v.aval.dtype == jnp.float32]
        largest[length] = max(floats)
        scores = [eqn for eqn in eqns if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.ndim == 4]
        products[length] = sum(
            eqn.outvars[0].aval.size
            for eqn in scores[::2]  # each followed by its product with v
        )
    heads = 4
    assert largest == {255: heads * 255 * 255, 256: heads * 64 * 256}
    assert products == {255: heads * 255 * 255, 256: heads * 256 * 256 * 5 // 8}


# Rows without a key, and extreme scores.


@pytest.mark.parametrize(("dtype", "length", "hidden"), [("bfloat16", 6, 2), ("float32", 260, 70)])
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(dtype, length, hidden):
    """0/0, or the mean of all values. In long sequences the whole first block of queries sees nothing."""
    config = dataclasses.replace(GROUPED, dtype=dtype)
    mask = np.stack([np.arange(length) >= hidden, np.ones(length, bool)])
    run = with_gradients(config)
    x, dy = a_stream(config, (2, length)), a_stream(config, (2, length), seed=1)
    with jax.debug_nans(True):
        y, grads = run(weights_of(config), x, mask, dy)
        dy[0, hidden:], dy[1] = 0, 0
        _, of_hidden = run(weights_of(config), x, mask, dy)
    assert not y[0, :hidden].any() and y[0, hidden:].any(axis=-1).all() and y[1].any(axis=-1).all()
    assert all(leaf.any() for leaf in jax.tree.leaves(grads)) and not grads[1][0, :hidden].any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(of_hidden)), "a query that sees nothing has a gradient"


@pytest.mark.parametrize(("dtype", "masked"), [("float32", False), ("float64", True)])
def test_scores_of_ten_thousand_make_no_nan(dtype, masked, x64):
    """exp overflows at 89 in float32 and at 710 in float64; what is divided by must not round to 0.

    In float64 against the oracle and its reverse pass, where one key takes all, and where two share: 4 and 5 have one
    key and two values, so that not every gradient of a key is zero.
    """
    config = dataclasses.replace(GROUPED, positions="none", dtype=dtype, param_dtype=dtype)
    weights = {name: {"kernel": weights_of(config)[name]["kernel"]} for name in ("query", "key", "value", "out")}
    for name in ("query", "key"):
        weights[name] = {"kernel": 150 * weights[name]["kernel"].at[0].set(0)}
    x, dy = a_stream(config, (1, 8)), a_stream(config, (1, 8), seed=3)
    x[0, 5, 1:] = x[0, 4, 1:]
    mask = np.arange(8) % 3 != 0 if masked else np.ones(8, bool)
    with jax.debug_nans(True):
        y, (weight_grads, x_grad) = with_gradients(config)(weights, x, mask[None] if masked else None, dy)
    found = {"y": y[0], "x": x_grad[0], **weight_grads}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    exact = oracle.to_float64(jax.device_get(weights))
    expected_y, saved = oracle.attention(x[0].astype(np.float64), exact, config, mask)
    scores = np.concatenate([(q @ k.T).ravel() for q, k, _, _ in saved[-1]])
    assert scores.max() > 1e4 and scores.min() < -1e4
    if dtype == "float64":
        grads = jax.tree.map(np.zeros_like, exact)
        expected = {"y": expected_y, "x": oracle.attention_back(dy[0], x[0], exact, config, saved, grads), **grads}
        assert np.abs(grads["key"]["kernel"]).max() > 1
        for path, leaf in leaf_paths(expected).items():
            # Scores of 1e4 are good to 1e-12, and so are their exponentials; keys and queries are near 500.
            np.testing.assert_allclose(leaf_paths(found)[path], leaf, rtol=0, atol=1e-9, err_msg=path)


# Derivatives of other kinds.


@pytest.mark.parametrize("blocks_from", [4, 10**9], ids=["blocks", "one"])
def test_forward_mode_and_forward_over_reverse(blocks_from, x64, monkeypatch):
    """The largest score is no variable: exact only if it truly does not matter, in second derivatives too."""
    monkeypatch.setattr(model, "QUERY_BLOCKS_FROM", blocks_from)
    config = float64(GROUPED)
    mask = np.array([[False, True, True, False, True, True, True], [True] * 7])
    dy = a_stream(config, (2, 7), seed=1)
    at = weights_of(config), a_stream(config, (2, 7))
    rng = np.random.default_rng(2)
    towards = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), at)

    @jax.jit
    def derivatives(at):
        def value(weights, x):
            return jnp.sum(jnp.sin(attend(weights, x, config, mask)) * dy)

        gradient = jax.grad(value, argnums=(0, 1))
        return jax.jvp(value, at, towards), jax.jvp(gradient, at, towards)

    (_, slope), (gradient, product) = derivatives(at)
    inner = sum(np.vdot(g, v) for g, v in zip(*map(jax.tree.leaves, (gradient, towards)), strict=True))
    np.testing.assert_allclose(slope, inner, rtol=1e-12)  # float64: a sum of some 300 terms

    def difference(part):
        at_steps = [jax.tree.map(lambda x, v: x + s * 3e-4 * v, at, towards) for s in (-2, -1, 1, 2)]  # noqa: B023
        return jax.tree.map(
            lambda a, b, c, d: (8 * (c - b) - (d - a)) / (12 * 3e-4), *[part(derivatives(moved)) for moved in at_steps]
        )

    # Fourth order in steps of 3e-4: values are good to 1e-15, their slopes to 1e-11.
    np.testing.assert_allclose(difference(lambda found: found[0][0]), slope, rtol=1e-8)
    assert_equal(product, difference(lambda found: found[1][0]), 1e-8)
