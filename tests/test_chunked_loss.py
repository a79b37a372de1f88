"""The loss in chunks of positions, with a gradient rule of its own, against the plain loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from models import equations, float64
from models import noisy_params as params_of

import minigpt_jax as mg
from minigpt_jax import losses
from minigpt_jax.functional import abstract_params
from minigpt_jax.trees import leaf_paths

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=1, n_heads=1, d_ff=5, context_len=8)
PLAIN = 10**6  # a chunk of more positions than there are
ROOMY = mg.ModelConfig(vocab_size=4096, d_model=16, n_layers=1, n_heads=2, d_ff=16)


value_and_grad = jax.jit(jax.value_and_grad(mg.loss), static_argnames=("config", "chunk"))


def a_batch(shape=(2, 7), mask=None):
    tokens, targets = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, *shape)).astype(np.int32)
    return mg.Batch(tokens, targets, mask)


HOLES = np.random.default_rng(5).random((2, 7)) < 0.6
MASKS = {
    "none": None,
    "holes": HOLES,
    "a chunk of nothing": HOLES & (np.arange(14).reshape(2, 7) // 4 != 1),  # the second of chunks of 4
    "nothing": np.zeros((2, 7), bool),
}


def assert_equal_gradients(found, expected, rtol):
    """Every leaf, relative to its largest entry."""
    found, expected = leaf_paths(found), leaf_paths(expected)
    assert list(found) == list(expected)
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype
        atol = rtol * float(np.abs(leaf).max())
        np.testing.assert_allclose(
            np.asarray(found[path], np.float64), np.asarray(leaf, np.float64), rtol=0, atol=atol, err_msg=path
        )


# Values and gradients. Each case: options of the model, of the call, the batch's shape, which targets count.

MASKED = ("holes", "a chunk of nothing", "nothing")
CASES = {
    "course": ({}, {"chunk": 4}, (2, 7), MASKED),  # the last chunk is 2 of 14
    "one_sequence": ({"positions": "learned"}, {"chunk": 1}, (7,), ("none",)),
    "scaled_lookup": ({"scale_embedding": True, "positions": "learned"}, {"chunk": 4}, (2, 7), ("holes",)),
    "untied": ({"norm": "rmsnorm", "tied": False}, {"chunk": 7}, (2, 7), MASKED),
    "dropout": ({"dropout": 0.4}, {"chunk": 4}, (2, 7), ("holes",)),
    "accumulate": ({}, {"chunk": 4, "accumulate": 2}, (2, 7), MASKED),
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("case", CASES)
def test_chunks_change_no_value_and_no_gradient(case, x64):
    """A last chunk that is cut off or counted twice, a mask that slips, a head without its lookup, another dropout."""
    options, calling, shape, masks = CASES[case]
    config = float64(dataclasses.replace(TINY, **options))
    key = jax.random.key(9) if config.dropout else None

    @jax.jit
    def both(params, batch):
        chunks = (calling["chunk"], PLAIN)
        results = [losses.loss_and_grads(params, batch, config, key, **calling | {"chunk": chunk}) for chunk in chunks]
        return *results, losses.loss_sum(params, batch, config) if config.dropout else None

    for name in masks:
        batch = a_batch(shape, MASKS[name] if name == "none" or len(shape) == 2 else MASKS[name][0])
        (summed, grads), (plain, expected), quiet = both(params_of(config), batch)
        assert summed.count == plain.count == (batch.targets.size if name == "none" else batch.mask.sum())
        # float64: sums of some 14 terms in another order.
        np.testing.assert_allclose(summed.total, plain.total, rtol=1e-12)
        assert_equal_gradients(grads, expected, 1e-12)
        nothing = name == "nothing"
        assert all(leaf.any() != nothing for leaf in jax.tree.leaves(grads)), name
        assert (summed.total == 0) == nothing
    if config.dropout:
        assert abs(plain.total - quiet.total) > 1e-3, "no dropout"


def scans(function, *args):
    """Lengths of the loops in a function."""
    eqns = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return [eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"]


def test_the_loss_chooses_its_chunks_by_size(monkeypatch, quick_compilation):
    """14 positions of 11 logits are 154: a limit off by one, a chunk above its limit, a choice that changes values."""
    batch = a_batch(mask=MASKS["holes"])
    slope = jax.value_and_grad(functools.partial(mg.loss, batch=batch, config=TINY))
    assert scans(slope, params_of(TINY)) == []
    value, expected = value_and_grad(params_of(TINY), batch, config=TINY, chunk=PLAIN)
    for limit, size, lengths in [(154, 1, []), (153, 154, []), (153, 77, [2]), (153, 76, [3]), (153, 1, [14])]:
        monkeypatch.setattr(losses, "PLAIN_LOGITS", limit)
        monkeypatch.setattr(losses, "CHUNK_LOGITS", size)
        assert scans(functools.partial(slope), params_of(TINY)) == lengths
        if lengths == [3]:  # of 5, 5 and 4
            found, grads = jax.jit(functools.partial(slope))(params_of(TINY))
            # float32: sums of 14 terms in another order, and their way back through one block.
            np.testing.assert_allclose(found, value, rtol=1e-6)
            assert_equal_gradients(grads, expected, 1e-5)


@pytest.mark.parametrize(("positions", "length"), [(1024, []), (4096, [13])])
def test_the_usual_limits(positions, length):
    """GPT-2's vocabulary: 51 million logits stay whole, 206 million go in parts of at most 17 million."""
    config = dataclasses.replace(TINY, vocab_size=50257)
    ids = jax.ShapeDtypeStruct((positions // 128, 128), jnp.int32)
    assert scans(functools.partial(mg.loss, config=config), abstract_params(config), mg.Batch(ids, ids)) == length


def test_a_target_outside_the_vocabulary_is_nan_in_chunks_too(quick_compilation):
    """Inside jit nothing can be raised; where it does not count it may be anything."""
    good = a_batch(mask=np.ones((2, 7), bool))
    for bad in (-100, -1, 11):
        targets = good.targets.copy()
        targets[1, 3] = bad
        value, grads = value_and_grad(params_of(TINY), good._replace(targets=targets), config=TINY, chunk=4)
        assert np.isnan(value)
        left_out = good._replace(targets=targets, mask=targets == good.targets)
        value, grads = value_and_grad(params_of(TINY), left_out, config=TINY, chunk=4)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, grads)))
    tokens = good.tokens.copy()
    tokens[1, 3] = 11
    assert np.isnan(value_and_grad(params_of(TINY), good._replace(tokens=tokens), config=TINY, chunk=4)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_bfloat16_params_add_up_in_float32(tied, quick_compilation):
    """600 chunks that all push the same row: in bfloat16's 8 bits a sum stops growing at 256 times its terms."""
    config = dataclasses.replace(TINY, param_dtype="bfloat16", tied=tied, context_len=30)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of(dataclasses.replace(TINY, tied=tied)))
    batch = mg.Batch(np.random.default_rng(0).integers(2, 5, (20, 30)), np.ones((20, 30), np.int32))
    _, grads = value_and_grad(params, batch, config=config, chunk=1)
    _, expected, _, _ = oracle.backward(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), *batch[:2], config)
    for path, leaf in leaf_paths(grads).items():
        assert leaf.dtype == jnp.bfloat16
        # A rounding of 2^-9 at the end. A head with a table of its own has three: of each chunk, their sum, their mean.
        atol = 2.0**-7 * float(np.abs(leaf_paths(expected)[path]).max())
        np.testing.assert_allclose(
            leaf.astype(jnp.float32), leaf_paths(expected)[path], rtol=0, atol=atol, err_msg=path
        )


# What it costs.


@pytest.mark.parametrize(("compute", "factor"), [(mg.loss, 8), (jax.value_and_grad(mg.loss), 4)])
def test_chunks_need_less_memory(compute, factor):
    """4,096 positions of 4,096 logits are 64 MB, 256 of them 4 MB: logits that are kept for the backward pass show."""
    ids = jax.ShapeDtypeStruct((128, 32), jnp.int32)
    sizes = {}
    for chunk in (4096, 256):
        compiled = jax.jit(functools.partial(compute, config=ROOMY, chunk=chunk))
        memory = compiled.lower(abstract_params(ROOMY), mg.Batch(ids, ids)).compile().memory_analysis()
        sizes[chunk] = memory.temp_size_in_bytes
    assert sizes[256] < sizes[4096] / factor


def test_no_array_of_all_logits_exists_in_chunks():
    """Nor in parts, (16, 256, V): no array has more entries than a chunk's logits. Products are as many as without."""
    ids = jax.ShapeDtypeStruct((128, 32), jnp.int32)
    largest, products = {}, {}
    for chunk in (4096, 256):
        slope = jax.value_and_grad(functools.partial(mg.loss, config=ROOMY, chunk=chunk))
        eqns = list(equations(jax.make_jaxpr(slope)(abstract_params(ROOMY), mg.Batch(ids, ids)).jaxpr))
        largest[chunk] = max(var.aval.size for eqn in eqns for var in eqn.outvars)
        products[chunk] = sum(eqn.primitive.name == "dot_general" for eqn in eqns)
    assert largest == {4096: 4096 * 4096, 256: 256 * 4096}
    assert products[256] == products[4096] == 27


# Other transformations.


@pytest.mark.usefixtures("quick_compilation")
def test_a_product_with_the_hessian(x64):
    """Forward mode over the rule's own gradient; against the plain loss, and against differences of gradients."""
    config = float64(TINY)
    batch, params, towards = a_batch(mask=MASKS["holes"]), params_of(config), params_of(config, seed=1)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient_and_product(chunk, params):
        slope = jax.grad(functools.partial(mg.loss, batch=batch, config=config, chunk=chunk))
        return jax.jvp(slope, (params,), (towards,))

    _, product = gradient_and_product(4, params)
    assert_equal_gradients(product, gradient_and_product(PLAIN, params)[1], 1e-12)

    def moved(step):
        return gradient_and_product(4, jax.tree.map(lambda x, v: x + step * v, params, towards))[0]

    differences = jax.tree.map(
        lambda a, b, c, d: (8 * (c - b) - (d - a)) / (12 * 3e-4), *[moved(s * 3e-4) for s in (-2, -1, 1, 2)]
    )
    # Fourth order in steps of 3e-4: gradients are good to 1e-16, their slopes to 1e-12.
    assert_equal_gradients(product, differences, 1e-8)


def test_forward_mode_needs_the_plain_loss(quick_compilation):
    """As the loss's docstring says."""
    params, batch = params_of(TINY), a_batch()

    def slope(params, chunk):
        loss = functools.partial(mg.loss, batch=batch, config=TINY, chunk=chunk)
        return jax.jvp(loss, (params,), (jax.tree.map(jnp.ones_like, params),))

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(functools.partial(slope, chunk=4)).lower(params)
    for chunk in (14, PLAIN, None):
        jax.jit(functools.partial(slope, chunk=chunk)).lower(params)


def test_chunks_under_vmap(quick_compilation):
    """Over parameters and batches at once, as by hand."""
    params = [params_of(TINY, seed=seed) for seed in range(3)]
    tokens, targets = np.random.default_rng(1).integers(0, 11, (2, 3, 2, 7)).astype(np.int32)
    mask = np.stack([MASKS[name] for name in ("holes", "a chunk of nothing", "nothing")])
    batch = mg.Batch(tokens, targets, mask)
    mapped, grads = jax.jit(jax.vmap(functools.partial(value_and_grad, config=TINY, chunk=4)))(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *params), batch
    )
    for i in range(3):
        one = jax.tree.map(lambda x: x[i], batch)  # noqa: B023
        value, expected = value_and_grad(params[i], one, config=TINY, chunk=PLAIN)
        # float32: sums of 14 terms in another order.
        np.testing.assert_allclose(mapped[i], value, rtol=1e-6)
        assert_equal_gradients(jax.tree.map(lambda x: x[i], grads), expected, 1e-5)  # noqa: B023
