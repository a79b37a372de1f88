"""The option `bf16_dots`: dense layers multiply bfloat16 roundings and add up in float32. Nothing else does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from models import equations
from models import noisy_params as params_of

import minigpt_jax as mg
from minigpt_jax.model import bf16_dot
from minigpt_jax.train import init_state, make_train_step
from minigpt_jax.trees import leaf_paths

pytestmark = pytest.mark.usefixtures("quick_compilation")

PLAIN = mg.ModelConfig(vocab_size=11, d_model=8, n_layers=1, n_heads=2, d_ff=12, context_len=8)
ROUNDED = dataclasses.replace(PLAIN, bf16_dots=True)


def a_batch():
    tokens, targets = np.random.default_rng(0).integers(0, 11, (2, 4, 8)).astype(np.int32)
    return mg.Batch(tokens, targets)


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def test_products_and_gradients_equal_float64_on_rounded_inputs():
    """Sums in bfloat16, results rounded to it, an input that is not, an operand transposed: I = 300, 5 and 7 outputs.

    Products of two numbers of 8 bits are exact in float32, so that only sums round: n of them, by 2^-24 of what has
    been added up, at most the sum of magnitudes. A result rounded to bfloat16 would err by 2^-9.
    """
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 300), (300, 7), (5, 7)))
    y, pull = jax.vjp(bf16_dot, x, w)
    for found, a, b in zip((y, *pull(dy)), (x, dy, x.T), (w, w.T, dy), strict=True):
        assert found.dtype == jnp.float32
        a, b = rounded(a), rounded(b)
        assert (np.abs(found - a @ b) <= a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))).all()
    # The roundings are there: the float32 product is another.
    assert np.abs(y - x @ w).max() > 2.0**-10 * np.abs(y).max()


@pytest.mark.parametrize("options", [{}, {"ffn": "swiglu", "n_kv_heads": 1, "attention_bias": True}])
def test_only_dense_layers_multiply_bfloat16(options):
    """One block: 6 forwards (7 with a gate) and twice as many backwards; attention's and the head's stay float32."""
    config = dataclasses.replace(ROUNDED, **options)
    slope = jax.value_and_grad(functools.partial(mg.loss, batch=a_batch(), config=config))
    products = [
        eqn for eqn in equations(jax.make_jaxpr(slope)(params_of(config)).jaxpr) if eqn.primitive.name == "dot_general"
    ]
    inputs = [{var.aval.dtype.name for var in eqn.invars} for eqn in products]
    dense = 7 if "ffn" in options else 6
    assert inputs.count({"bfloat16"}) == 3 * dense
    assert inputs.count({"float32"}) == 3 * (2 + 1) == len(inputs) - 3 * dense
    assert {eqn.outvars[0].aval.dtype.name for eqn in products} == {"float32"}


def test_without_kernels_nothing_changes():
    """Lookup, norms, biases and head to the bit; with kernels the logits do move, by roundings."""
    params = params_of(PLAIN)
    logits, moved = (mg.forward(params, a_batch().tokens, config) for config in (PLAIN, ROUNDED))
    # Six roundings of 2^-9 on the way, of both factors; logits of the largest size.
    assert 0 < np.abs(moved - logits).max() < 2.0**-5 * np.abs(logits).max()
    bare = jax.tree_util.tree_map_with_path(lambda path, x: 0 * x if path[-1].key == "kernel" else x, params)
    logits, same = (mg.forward(bare, a_batch().tokens, config) for config in (PLAIN, ROUNDED))
    np.testing.assert_array_equal(same, logits)
    assert np.abs(logits).max() > 0.1


def test_gradients_are_float32_and_near():
    """Every leaf, as a whole: a kernel's gradient transposed or lost would be as far away as it is long."""
    slope = jax.jit(jax.grad(mg.loss), static_argnums=2)
    exact, found = (leaf_paths(slope(params_of(PLAIN), a_batch(), config)) for config in (PLAIN, ROUNDED))
    for path, leaf in exact.items():
        assert found[path].dtype == jnp.float32
        # Some ten roundings of 2^-9, in gradients that are differences of larger ones: a factor of
        # three over the largest distance seen. 1 is what a lost gradient has.
        assert 0 < np.linalg.norm(found[path] - leaf) < 2.0**-3 * np.linalg.norm(leaf), path


def test_it_trains():
    config = mg.Config(ROUNDED, train=mg.TrainConfig(steps=40, warmup_steps=0, peak_lr=2e-2, batch_size=4))
    state, step = init_state(config), jax.jit(make_train_step(config))
    losses = []
    for _ in range(40):
        state, metrics = step(state, a_batch())
        losses.append(float(metrics["loss"]))
    assert losses[0] > 2 and losses[-1] < 0.7 * losses[0]  # from ln 11 = 2.4
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
