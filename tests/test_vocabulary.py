"""Another number of rows: what stays, what is new, and that the model goes on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import noisy_params

import minigpt_jax as mg
from minigpt_jax.trees import leaf_paths

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = mg.ModelConfig(vocab_size=13, d_model=8, n_layers=1, n_heads=2, context_len=8)
UNTIED = mg.untied(CONFIG)
IDS = np.array([[1, 5, 12, 0, 3]])


def resized(config, n):
    return dataclasses.replace(config, vocab_size=n)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("n", [13, 14, 20])
def test_growing_keeps_rows_and_logits(config, n):
    """transformers#35141: the head of a resized model is a new object, or of another size."""
    params = noisy_params(config)
    grown = mg.resize_vocab(params, n)
    for path, leaf in leaf_paths(grown).items():
        old = leaf_paths(params)[path]
        np.testing.assert_array_equal(np.asarray(leaf)[: len(old)].view(np.uint32), np.asarray(old).view(np.uint32))
    before, after = mg.forward(params, IDS, config), mg.forward(grown, IDS, resized(config, n))
    assert after.shape[-1] == n
    # Another width of the last product may add up in another order.
    np.testing.assert_allclose(after[..., :13], before, rtol=1e-5, atol=1e-6)


def test_shrinking_drops_the_last_rows():
    params = noisy_params(CONFIG)
    less = mg.resize_vocab(params, 11)
    np.testing.assert_array_equal(less["embed"]["embedding"], params["embed"]["embedding"][:11])
    mg.assert_tied(less, resized(CONFIG, 11))
    assert mg.forward(less, np.array([10]), resized(CONFIG, 11)).shape == (1, 11)


def test_new_rows_are_the_mean_of_the_old():
    params = {"embed": {"embedding": jnp.array([[1.0, 0.0], [2.0, 6.0], [3.0, 3.0]])}}
    np.testing.assert_allclose(mg.resize_vocab(params, 5)["embed"]["embedding"][3:], [[2.0, 3.0]] * 2, rtol=1e-6)


def test_noise_has_each_column_s_mean_and_spread():
    rng = np.random.default_rng(0)
    table = np.array([5.0, -2.0]) + np.array([0.5, 3.0]) * rng.standard_normal((400, 2))
    params = {"embed": {"embedding": jnp.asarray(table, jnp.float32)}}
    key = jax.random.key(3)
    new = np.asarray(mg.resize_vocab(params, 4400, new_rows="noise", key=key)["embed"]["embedding"][400:])
    # 4,000 draws: the mean is within 5 standard errors, the spread within 5 / sqrt(8,000) of itself.
    assert (np.abs(new.mean(axis=0) - table.mean(axis=0)) < 5 * table.std(axis=0) / np.sqrt(4000)).all()
    assert (np.abs(new.std(axis=0) / table.std(axis=0) - 1) < 0.06).all()
    again = mg.resize_vocab(params, 4400, new_rows="noise", key=jax.random.clone(key))["embed"]["embedding"][400:]
    np.testing.assert_array_equal(again, new)


def test_both_tables_of_an_untied_model_draw_their_own_noise():
    grown = mg.resize_vocab(mg.untie(noisy_params(CONFIG)), 15, new_rows="noise", key=jax.random.key(0))
    assert not np.allclose(grown["embed"]["embedding"][13:], grown["head"]["embedding_out"][13:])


def test_bfloat16_stays():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), noisy_params(CONFIG))
    grown = mg.resize_vocab(params, 15)
    assert {leaf.dtype for leaf in jax.tree.leaves(grown)} == {jnp.dtype(jnp.bfloat16)}
    mean = np.asarray(params["embed"]["embedding"], np.float32).mean(axis=0)
    # Added up in float32 and rounded once: half a unit in the last of 8 bits.
    np.testing.assert_allclose(np.asarray(grown["embed"]["embedding"][14], np.float32), mean, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("n", [11, 16])
def test_the_optimizer_goes_on(n):
    """Moments are cut and filled up like the table; the update of an old row is what it would have been."""
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    params = noisy_params(CONFIG)
    grads = jax.tree.map(lambda leaf: jnp.sin(7 * leaf), params)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    other, other_state = mg.resize_vocab(params, n, opt_state=state)
    assert jax.tree.structure(other_state) == jax.tree.structure(state)
    for name in ("mu", "nu"):
        moment, old = (getattr(s[0], name)["embed"]["embedding"] for s in (other_state, state))
        kept = min(n, 13)
        assert moment.shape == (n, 8)
        np.testing.assert_array_equal(moment[:kept], old[:kept])
        np.testing.assert_array_equal(moment[kept:], 0)
    other_grads = mg.resize_vocab(grads, n)
    updates, _ = optimizer.update(other_grads, other_state, other)
    expected, _ = optimizer.update(grads, state, params)
    np.testing.assert_array_equal(updates["embed"]["embedding"][:11], expected["embed"]["embedding"][:11])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"n": 0}, "n is 0; a table needs at least 1 row"),
        ({"n": 2.0}, "n is 2.0; give the number of rows"),
        ({"n": True}, "n is True; give the number of rows"),
        ({"n": 20, "new_rows": "noise"}, "needs a key"),
        ({"n": 20, "new_rows": "zeros"}, "choose 'mean' or 'noise'"),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(mg.InputError, match=words):
        mg.resize_vocab(noisy_params(CONFIG), **arguments)


def test_no_table():
    with pytest.raises(mg.InputError, match="hold no table embed/embedding"):
        mg.resize_vocab({"block_0": {}}, 5)
