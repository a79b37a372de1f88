"""The tie: one leaf, two uses, one gradient that is their sum.

V, D, F and T all differ, so that a transposed or misplaced matrix can't fit.
"""

import copy
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from models import equations, float64
from models import noisy_params as params_of

import minigpt_jax as mg
from minigpt_jax.checkpoint import create_run, open_run
from minigpt_jax.data import CharTokenizer
from minigpt_jax.functional import abstract_params
from minigpt_jax.train import init_state
from minigpt_jax.trees import leaf_paths

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=1, n_heads=1, d_ff=5, context_len=8)
RUN = mg.Config(TINY, train=mg.TrainConfig(steps=10, warmup_steps=0, peak_lr=1e-2, batch_size=2))
DEEP = dataclasses.replace(TINY, vocab_size=13, d_model=8, n_layers=2, n_heads=2)
TABLE = "embed/embedding"

loss_and_grads = jax.jit(jax.value_and_grad(mg.loss), static_argnums=2)
tied_gradient = jax.jit(mg.tied_gradient, static_argnums=2, static_argnames=("accumulate", "chunk"))
forward = jax.jit(mg.forward, static_argnums=2)
unembed = jax.jit(mg.unembed, static_argnums=2)


def a_batch(shape=(2, 5), seed=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, TINY.vocab_size, (2, *shape)).astype(np.int32)
    mask = np.ones(shape, bool)
    mask[0, 1] = mask[1, 3:] = False
    return mg.Batch(tokens, targets, mask)


@functools.cache
def state_after(steps):
    state, step = init_state(RUN), jax.jit(mg.make_train_step(RUN))
    for i in range(steps):
        state, _ = step(state, a_batch(seed=i))
    return state


def assert_tied(params, config):
    """One table, and the head is it: the unit vectors unembed to its columns, exactly (sums with zeros)."""
    mg.assert_tied(params, config)
    E = params["embed"]["embedding"]
    np.testing.assert_array_equal(unembed(params, jnp.eye(config.d_model, dtype=E.dtype), config), np.asarray(E).T)


# One leaf.


@pytest.mark.parametrize("steps", [0, 2])
def test_the_head_is_the_lookups_table_also_after_training(steps):
    """flax#1263: copying one leaf onto another at init ties nothing; they part at the first update."""
    assert_tied(state_after(steps).params, TINY)
    if steps:
        moved = state_after(steps).params["embed"]["embedding"] - state_after(0).params["embed"]["embedding"]
        assert np.abs(moved).max(axis=1).min() > 0, "some row of the table was not trained"


@pytest.mark.parametrize("options", [{}, {"positions": "learned"}, {"norm": "rmsnorm", "ffn": "swiglu"}])
def test_every_kind_of_tied_model_has_one_table(options):
    config = dataclasses.replace(TINY, **options)
    mg.assert_tied(abstract_params(config), config)


def test_tying_takes_away_one_leaf_of_v_times_d_and_one_first_moment():
    """equinox#469: flattening a shared object twice doubles its gradient and its optimizer state."""
    for config in (TINY, mg.ModelConfig(), mg.load_config(Path(__file__).parents[1] / "configs/gpt2.yaml").model):
        one, two = abstract_params(config), abstract_params(mg.untied(config))
        assert len(jax.tree.leaves(two)) == len(jax.tree.leaves(one)) + 1
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (one, two)]
        assert sizes[1] - sizes[0] == config.vocab_size * config.d_model
        assert set(leaf_paths(two)) - set(leaf_paths(one)) == {"head/embedding_out"}
        states = [jax.eval_shape(mg.make_optimizer(mg.TrainConfig()).init, tree) for tree in (one, two)]
        for name in ("mu", "nu"):
            moments = [len(jax.tree.leaves(optax.tree.get(state, name))) for state in states]
            assert moments == [len(jax.tree.leaves(one)), len(jax.tree.leaves(one)) + 1]


def test_counts_by_hand():
    """V D + L (4 D^2 + 2 D F + F + D + 4 D) + 2 D, and V D more untied."""
    expected = 11 * 6 + (4 * 36 + 2 * 30 + 5 + 6 + 24) + 12
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(TINY))) == expected
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(mg.untied(TINY)))) == expected + 66


def test_a_head_that_drifts_by_a_millionth_is_seen():
    """The check above, held against what it is for."""
    tree = mg.untie(params_of(TINY))
    E = np.asarray(tree["embed"]["embedding"])
    tree["head"]["embedding_out"] = tree["head"]["embedding_out"].at[3, 2].multiply(1 + 2**-20)
    assert not np.array_equal(unembed(tree, jnp.eye(TINY.d_model), mg.untied(TINY)), E.T)


def test_another_row_in_the_table_is_another_logit():
    """peft#2399: an edit in the lookup's code path would never reach the head. h is fixed here."""
    params = params_of(TINY)
    h = jnp.asarray(np.random.default_rng(1).normal(size=(3, TINY.d_model)), jnp.float32)
    row = np.arange(1.0, 7.0, dtype=np.float32)
    edited = {**params, "embed": {"embedding": params["embed"]["embedding"].at[4].set(row)}}
    before, after = np.asarray(unembed(params, h, TINY)), np.asarray(unembed(edited, h, TINY))
    np.testing.assert_allclose(after[:, 4], h @ row, rtol=1e-5)  # six float32 products
    assert (after[:, 4] != before[:, 4]).all()
    others = np.arange(TINY.vocab_size) != 4
    np.testing.assert_array_equal(after[:, others], before[:, others])
    # The lookup reads the same row.
    np.testing.assert_array_equal(mg.embed(edited, np.array([4], np.int32), TINY)[0], row)


# Copies of the tree.


def bfloat16_and_back(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)


@pytest.mark.parametrize(
    "copied",
    [
        bfloat16_and_back,
        lambda params: jax.device_put(params, jax.devices()[0]),
        jax.device_get,
        copy.deepcopy,
        lambda params: pickle.loads(pickle.dumps(params)),
        lambda params: jax.tree.map(lambda x: x + 0, params),
    ],
    ids=["bfloat16", "device_put", "device_get", "deepcopy", "pickle", "tree_map"],
)
def test_the_tie_survives_every_copy(copied):
    """pytorch-lightning#2705, xla#2719: moving a model made two tables of one, without a message."""
    params = params_of(TINY)
    result = copied(params)
    assert_tied(result, TINY)
    assert jax.tree.structure(result) == jax.tree.structure(params)
    # bfloat16 keeps 8 significant bits: rounding moves a value by 2^-9 of itself.
    tolerance = 2.0**-8 if copied is bfloat16_and_back else 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=0), result, params)


def test_the_tie_survives_a_checkpoint(tmp_path):
    """transformers#43159: a file with one of two tied names was filled up with random values."""
    state = state_after(2)
    create_run(tmp_path, RUN, CharTokenizer("abcdefghijk")).save(state, "")
    params, _ = open_run(tmp_path).load_params()
    assert_tied(params, TINY)
    np.testing.assert_array_equal(params["embed"]["embedding"], state.params["embed"]["embedding"])
    opt_state = open_run(tmp_path).load_state("").opt_state
    for moment in ("mu", "nu"):
        mg.assert_tied(optax.tree.get(opt_state, moment), TINY)


def test_low_precision_params_change_the_logits_a_little():
    """transformers#37905: casting the input table also casts the head, and its logits; by how much is bounded."""
    config = dataclasses.replace(TINY, param_dtype="bfloat16", dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(TINY))
    mg.assert_tied(half, config)
    logits, exact = forward(half, a_batch().tokens, config), forward(params_of(TINY), a_batch().tokens, TINY)
    assert logits.dtype == jnp.float32
    # The table, h and every product of the block are rounded by 2^-9 of themselves: 2^-6 in all, measured.
    assert 0 < np.abs(logits - exact).max() < 2.0**-4 * np.abs(exact).max()


# Init in other guises.


@pytest.mark.parametrize("config", [TINY, mg.untied(TINY)], ids=["tied", "untied"])
def test_abstract_init_has_the_structure_of_init(config):
    """Modalities#357: tied as shapes, then each name filled on its own."""
    real = mg.init(config, jax.random.key(0))
    for abstract in (jax.eval_shape(functools.partial(mg.init, config), jax.random.key(0)), abstract_params(config)):
        assert jax.tree.structure(abstract) == jax.tree.structure(real)
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_init_gives_the_same_bits_inside_transformations():
    """Under jit and vmap the draw is called back from the compiled program."""
    with jax.debug_key_reuse(False):  # the same keys again are the point here
        keys = jax.random.split(jax.random.key(7), 3)
        expected = [mg.init(TINY, key) for key in keys]
        jitted = jax.jit(functools.partial(mg.init, TINY))(keys[1])
        mapped = jax.vmap(functools.partial(mg.init, TINY))(keys)
        raw = mg.init(TINY, jax.random.key_data(keys[1]))
    jax.tree.map(np.testing.assert_array_equal, jitted, expected[1])
    jax.tree.map(np.testing.assert_array_equal, mapped, jax.tree.map(lambda *x: np.stack(x), *expected))
    jax.tree.map(np.testing.assert_array_equal, raw, expected[1])
    assert not np.array_equal(expected[0]["embed"]["embedding"], expected[1]["embed"]["embedding"])


# One gradient.


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_tied_step_is_the_untied_step_with_both_gradients_summed(optimizer, x64):
    """Megatron-LM#656: copies drift unless their gradients are summed. Two steps, so that moments are tested too."""
    config = float64(TINY)
    adamw = mg.make_optimizer(mg.TrainConfig(peak_lr=0.1, warmup_steps=0))
    rule = {"sgd": optax.sgd(0.1), "adamw": adamw}[optimizer]
    tied = summed = params_of(config)
    tied_state = summed_state = rule.init(tied)
    for i in range(2):
        _, grads = loss_and_grads(tied, a_batch(seed=i), config)
        updates, tied_state = rule.update(grads, tied_state, tied)
        tied = optax.apply_updates(tied, updates)

        _, two = loss_and_grads(mg.untie(summed), a_batch(seed=i), mg.untied(config))
        head, lookup = two.pop("head")["embedding_out"], two["embed"]["embedding"]
        assert np.abs(head).max() > 1e-3 and np.abs(lookup).max() > 1e-3
        two["embed"] = {"embedding": lookup + head}
        updates, summed_state = rule.update(two, summed_state, summed)
        summed = optax.apply_updates(summed, updates)
    # float64, sums in another order; Adam divides by the root of a square, which magnifies entries near zero.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), tied, summed)


# Split by use. Each case: options of the model, of the call, and which targets count; 2 rows of 7.

EVERY, HOLES = np.ones((2, 7), bool), np.random.default_rng(5).random((2, 7)) < 0.6
ONE_AND_SEVEN = np.stack([np.arange(7) == 3, np.ones(7, bool)])
CASES = {
    "no_mask": ({}, {}, None),
    "mask": ({}, {}, HOLES),
    "accumulate": ({}, {"accumulate": 2}, ONE_AND_SEVEN),
    "chunk": ({}, {"chunk": 3}, EVERY),  # the last piece is 2 of 14
    "chunk_of_one": ({}, {"chunk": 1}, HOLES),
    "chunk_beyond_the_batch": ({}, {"chunk": 50}, HOLES),
    "chunk_and_accumulate": ({}, {"chunk": 3, "accumulate": 2}, ONE_AND_SEVEN),
    "rmsnorm_swiglu_grouped": ({"norm": "rmsnorm", "ffn": "swiglu", "n_heads": 4, "n_kv_heads": 2}, {}, HOLES),
    "learned_positions": ({"positions": "learned"}, {}, HOLES),
    "scaled_lookup": ({"scale_embedding": True, "parallel_residual": True}, {"chunk": 3}, HOLES),
    "remat": ({"remat": True}, {}, HOLES),
    "dropout": ({"dropout": 0.4}, {}, HOLES),
    "dropout_and_accumulate": ({"dropout": 0.4}, {"accumulate": 2}, ONE_AND_SEVEN),
    "dropout_and_chunk": ({"dropout": 0.4}, {"chunk": 3}, HOLES),
}


@functools.cache
def split_and_gradient(case, base):
    """The split, and (loss, gradient) of `mg.loss` on the tied model: no chunks, no micro-batches but by hand."""
    options, calling, mask = CASES[case]
    config, key = dataclasses.replace(base, **options), None
    batch = a_batch((2, 7))._replace(mask=mask)
    if not config.dropout:
        split = tied_gradient(params_of(config), batch, config, None, **calling)
        whole = batch._replace(mask=EVERY if mask is None else mask)
        return config, batch, split, loss_and_grads(params_of(config), whole, dataclasses.replace(config, remat=False))
    split = tied_gradient(params_of(config), batch, config, jax.random.key(9), **calling)
    if "accumulate" not in calling:
        return config, batch, split, loss_and_grads(params_of(config), batch, config, jax.random.key(9))
    parts = []
    for i, count in enumerate(mask.sum(axis=1)):  # each micro-batch has its own key, and the weight of its targets
        key = jax.random.fold_in(jax.random.key(9), i)
        one = jax.tree.map(lambda x: x[i : i + 1], batch)  # noqa: B023
        part = loss_and_grads(params_of(config), one, config, key)
        parts.append(jax.tree.map(lambda x: np.asarray(x) * (count / mask.sum()), part))  # noqa: B023
    return config, batch, split, jax.tree.map(np.add, *parts)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_add_up_to_the_gradient_of_the_loss(case, x64):
    """In float64, to 1e-12 (entries are below 1), every leaf; and each part equals the oracle's, a reverse pass written
    out by hand: swapped parts would still add up."""
    config, batch, split, (value, grads) = split_and_gradient(case, float64(DEEP))
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    near(split.loss, value)
    assert jax.tree.structure(split.grads) == jax.tree.structure(grads)
    jax.tree.map(near, split.grads, grads)
    near(split.lookup + split.head, grads["embed"]["embedding"])
    assert np.abs(split.lookup).max() > 1e-3 and np.abs(split.head).max() > 1e-3
    value, _, lookup, head = oracle.backward(params_of(config), *batch[:2], config, batch.mask)
    if config.dropout:
        assert abs(split.loss - value) > 1e-3, "no dropout"
    else:
        near(split.loss, value)
        near(split.lookup, lookup)
        near(split.head, head)


def test_the_parts_in_float32():
    config, batch, split, (value, grads) = split_and_gradient("chunk_and_accumulate", DEEP)
    _, _, lookup, head = oracle.backward(params_of(config), *batch[:2], config, batch.mask)
    np.testing.assert_allclose(split.loss, value, rtol=1e-6)
    # Sums of some 50 float32 terms through two blocks, relative to the largest entry.
    atol = 1e-5 * float(jnp.abs(grads["embed"]["embedding"]).max())
    np.testing.assert_allclose(split.lookup + split.head, grads["embed"]["embedding"], rtol=0, atol=atol)
    np.testing.assert_allclose(split.lookup, lookup, rtol=0, atol=atol)
    np.testing.assert_allclose(split.head, head, rtol=0, atol=atol)
    np.testing.assert_array_equal(split.grads["embed"]["embedding"], split.lookup + split.head)


def test_the_parts_with_computation_in_bfloat16():
    """Blocks round to 8 bits; the table, the logits and both parts are float32."""
    config = dataclasses.replace(DEEP, dtype="bfloat16")
    split = tied_gradient(params_of(config), a_batch((2, 7)), config)
    value, grads = loss_and_grads(params_of(config), a_batch((2, 7)), config)
    _, _, lookup, head = oracle.backward(params_of(config), *a_batch((2, 7))[:2], config, a_batch((2, 7)).mask)
    assert split.lookup.dtype == split.head.dtype == jnp.float32
    largest = float(np.abs(lookup + head).max())
    # The same roundings by two routes of autodiff, of which a few fall the other way: 2^-8 each.
    np.testing.assert_allclose(split.loss, value, rtol=2.0**-8)
    np.testing.assert_allclose(split.lookup + split.head, grads["embed"]["embedding"], rtol=0, atol=2.0**-8 * largest)
    # Against float64: some ten roundings on the way.
    np.testing.assert_allclose(split.lookup, lookup, rtol=0, atol=2.0**-4 * largest)
    np.testing.assert_allclose(split.head, head, rtol=0, atol=2.0**-4 * largest)


def test_the_split_outside_jit_equals_that_inside(x64):
    config = float64(TINY)
    jitted, plain = (split(params_of(config), a_batch(), config) for split in (tied_gradient, mg.tied_gradient))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-14), jitted, plain)  # float64


@pytest.mark.parametrize(("path", "part"), [(TABLE, "lookup"), ("head/embedding_out", "head")])
def test_each_part_is_the_slope_in_its_own_table(path, part, x64):
    """Central differences of the loss with two tables, of which one moves: read rows, unread ones, a target's."""
    config, batch = float64(TINY), a_batch()
    split = tied_gradient(params_of(config), batch, config)
    tree = mg.untie(params_of(config))
    value = functools.partial(jax.jit(mg.loss, static_argnums=2), batch=batch, config=mg.untied(config))
    read, unread = int(batch.tokens[0, 0]), min(set(range(11)) - set(batch.tokens.flat))
    for index in [(read, 2), (int(batch.tokens[1, 0]), 5), (unread, 0)]:
        slope = oracle.finite_difference(tree, path, index, value)
        # Fourth order in steps of 3e-4, of a float64 loss.
        np.testing.assert_allclose(getattr(split, part)[index], slope, rtol=0, atol=1e-10)
        assert (abs(slope) > 1e-4) == ((part, index[0]) != ("lookup", unread))


def z_loss(params, batch, config):
    """The loss with a pull on the normaliser, as PaLM's."""
    logsumexp = jax.nn.logsumexp(mg.forward(params, batch.tokens, config), axis=-1)
    return mg.loss(params, batch, config) + 0.1 * jnp.mean(logsumexp**2)


def test_the_head_part_in_closed_form(x64):
    """Row v is the mean over valid targets of (p_v - y_v) h. A shift or mask on one side only breaks it."""
    config, batch = float64(TINY), a_batch()
    params = params_of(config)
    h = np.asarray(jax.jit(mg.trunk, static_argnums=2)(params, mg.embed(params, batch.tokens, config), config))
    E = np.asarray(params["embed"]["embedding"])
    rows = []
    for v in range(config.vocab_size):
        terms = []
        for at in zip(*np.nonzero(batch.mask), strict=True):
            powers = np.exp(E @ h[at])
            terms.append((powers[v] / powers.sum() - (batch.targets[at] == v)) * h[at])
        rows.append(np.mean(terms, axis=0))
    split = tied_gradient(params, batch, config)
    np.testing.assert_allclose(split.head, rows, rtol=0, atol=1e-14)  # float64, entries below 1


@pytest.mark.parametrize("case", ["mask", "chunk_and_accumulate"])
def test_the_columns_of_the_head_part_sum_to_zero(case, x64):
    """Probabilities and one-hot both sum to 1 over V. Not so with a missing row, or a mask on one side."""
    config, _, split, _ = split_and_gradient(case, float64(DEEP))
    rounding = config.vocab_size * 2.0**-52 * np.linalg.norm(split.head)  # V float64 terms
    np.testing.assert_allclose(split.head.sum(axis=0), 0, atol=rounding)


def test_the_columns_do_not_sum_to_zero_with_a_z_loss(x64):
    """So that the sums above say something."""
    config, batch = float64(TINY), a_batch()
    pulled = jax.jit(jax.grad(z_loss), static_argnums=2)(mg.untie(params_of(config)), batch, mg.untied(config))
    head = pulled["head"]["embedding_out"]
    assert np.abs(head.sum(axis=0)).max() > 1e-3 * np.linalg.norm(head)


def test_only_rows_that_were_read_have_a_lookup_part(x64):
    """Read by a computation that counts: inputs up to the last valid target of their row. The head moves all rows."""
    config, params = float64(TINY), params_of(float64(TINY))
    tokens = np.array([[3, 1, 3, 7, 8], [5, 6, 5, 0, 0]], np.int32)
    targets = np.array([[1, 3, 7, 8, 2], [6, 5, 0, 0, 0]], np.int32)
    masks = {  # valid targets: whose inputs are read
        "all": (np.ones((2, 5), bool), {0, 1, 3, 5, 6, 7, 8}),
        "padding on the right": (np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool), {1, 3, 5, 6, 7, 8}),
        "a hole does not unread": (np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool), {1, 3}),
        "the first alone": (np.array([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]], bool), {3, 5}),
    }
    for name, (mask, read) in masks.items():
        split = tied_gradient(params, mg.Batch(tokens, targets, mask), config)
        assert set(np.flatnonzero(np.abs(split.lookup).any(axis=1))) == read, name
        assert np.abs(split.head).any(axis=1).all(), name
        unread = np.array(sorted(set(range(config.vocab_size)) - read))
        np.testing.assert_array_equal(split.grads["embed"]["embedding"][unread], split.head[unread])


def dot_generals(jaxpr):
    """Matrix products in a jaxpr, those of inner functions too."""
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))


@pytest.mark.parametrize(("layers", "options", "products"), [(1, {}, 27), (3, {}, 75), (1, {"chunk": 3}, 27)])
def test_both_parts_cost_one_backward_pass(layers, options, products):
    """As many matrix products as the plain gradient, not twice as many, nor one more a layer."""
    config = dataclasses.replace(TINY, n_layers=layers)
    plain, split = (
        dot_generals(jax.make_jaxpr(functools.partial(f, config=config, **options))(params_of(config), a_batch()).jaxpr)
        for f in (jax.value_and_grad(mg.loss), mg.tied_gradient)
    )
    # Forward 8 a layer and the head: attention's 4 projections and its 2 products, the feed-forward layer's 2.
    # Backward: 2 each. In chunks too: a chunk's gradient is taken while its logits are there.
    assert plain == products
    assert split == plain


def test_an_untied_model_has_no_parts_to_split():
    with pytest.raises(mg.InputError, match="tied: false") as caught:
        mg.tied_gradient(params_of(mg.untied(TINY)), a_batch(), mg.untied(TINY))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [11, -1])
@pytest.mark.parametrize("field", ["tokens", "targets"])
def test_tied_gradient_refuses_what_the_loss_refuses(field, bad):
    """A target that no logit stands for would leave its one-hot out, and the head part wrong."""
    batch = a_batch()
    getattr(batch, field)[1, 2] = bad
    with pytest.raises(mg.InputError, match=rf"{field}\[1, 2\] is {bad}"):
        mg.tied_gradient(params_of(TINY), batch, TINY)


def split_of(lookup, head, dtype=jnp.float32):
    return mg.TiedGradient(jnp.float32(0), jnp.asarray(lookup, dtype), jnp.asarray(head, dtype), {})


def test_squared_norm_is_both_squares_and_twice_the_product(x64):
    """|G|^2 = |lookup|^2 + |head|^2 + 2 <lookup, head>, to float64's rounding."""
    split = tied_gradient(params_of(float64(TINY)), a_batch(), float64(TINY))
    stats = mg.tied_stats(split)
    total = stats["lookup_l2_squared"] + stats["head_l2_squared"] + 2 * stats["inner_product"]
    gradient = np.asarray(split.grads["embed"]["embedding"])
    np.testing.assert_allclose(total, (gradient**2).sum(), rtol=1e-12)
    np.testing.assert_allclose(stats["sum_l2_squared"], total, rtol=1e-12)
    np.testing.assert_allclose(stats["sum_l2"] ** 2, total, rtol=1e-12)
    np.testing.assert_allclose(stats["inner_product"], stats["cosine"] * stats["lookup_l2"] * stats["head_l2"])
    assert abs(stats["cosine"]) > 1e-3, "orthogonal parts would hide the product"


# Row by row.

COUNTED = mg.Batch(
    np.array([[1, 2, 3, 4], [5, 5, 6, 1]], np.int32),
    np.array([[2, 3, 4, 0], [5, 6, 1, 7]], np.int32),
    np.array([[True, False, True, False], [False, True, False, False]]),
)


def test_the_token_table_by_hand():
    """Inputs count up to the last valid target of their row: 4 in the first row, 6 and 1 in the second do not."""
    split = tied_gradient(params_of(TINY), COUNTED, TINY)
    records = mg.token_table(split, COUNTED).records
    by_id = {record["id"]: record for record in records}
    assert sorted(by_id) == list(range(11)) and list(records[0]) == [
        "id", "inputs", "targets", "lookup_l2", "head_l2", "cosine", "softmax_only"
    ]  # fmt: skip
    assert {v: r["inputs"] for v, r in by_id.items() if r["inputs"]} == {1: 1, 2: 1, 3: 1, 5: 2}
    assert {v: r["targets"] for v, r in by_id.items() if r["targets"]} == {2: 1, 4: 1, 6: 1}
    assert {v for v, r in by_id.items() if r["softmax_only"]} == {0, 7, 8, 9, 10}
    lookup, head = np.asarray(split.lookup, np.float64), np.asarray(split.head, np.float64)
    for v, record in by_id.items():
        sizes = np.linalg.norm(lookup[v]), np.linalg.norm(head[v])
        np.testing.assert_allclose((record["lookup_l2"], record["head_l2"]), sizes, rtol=1e-6)  # float32
        if record["inputs"]:
            cosine = lookup[v] @ head[v] / (sizes[0] * sizes[1])
            np.testing.assert_allclose(record["cosine"], cosine, rtol=1e-5, atol=1e-6)
        else:
            assert record["lookup_l2"] == 0 and record["cosine"] is None
    heads = [record["head_l2"] for record in records]
    assert heads == sorted(heads, reverse=True)
    assert all(type(r[name]) is int for r in records for name in ("id", "inputs", "targets")), "JSON"
    every = mg.token_table(split, COUNTED._replace(mask=None)).records
    assert {r["id"]: r["inputs"] for r in every if r["inputs"]} == {1: 2, 2: 1, 3: 1, 4: 1, 5: 2, 6: 1}


def test_the_token_table_prints():
    """In 100 columns, texts in quotes; rows without a text are no tokens."""
    split = tied_gradient(params_of(TINY), COUNTED, TINY)
    texts = ["a", "\n", " the", "x" * 300, "'", "\t", "\u00e9", "h", "i"]
    table = mg.token_table(split, COUNTED, texts)
    assert sorted((record["id"], record["text"]) for record in table.records) == list(enumerate(texts))
    lines = str(table).splitlines()
    assert len(lines) == 1 + 9 and max(map(len, lines)) <= 100
    assert sum(line.endswith("softmax alone") for line in lines) == 3
    text = str(table)
    assert r"'\n'" in text and "' the'" in text and "xxx...xxx" in text
    rng = np.random.default_rng(4)
    longer = str(mg.token_table(split_of(*rng.normal(size=(2, 30, 3))), COUNTED)).splitlines()
    assert len(longer) == 22 and longer[-1] == "... and 10 more"


def test_treescope_shows_params_gradients_and_the_split():
    """Without an adapter: every path is there to be copied, every shape to be read."""
    treescope = pytest.importorskip("treescope", reason="treescope, of the extra `test`, is not installed")
    split = tied_gradient(params_of(TINY), a_batch(), TINY)
    for tree, prefix in ((params_of(TINY), ""), (split.grads, ""), (split, ".grads")):
        text = treescope.render_to_text(tree)
        html = treescope.render_to_html(tree, compressed=False)
        for path, leaf in leaf_paths(params_of(TINY)).items():
            keys = path.split("/")
            assert all(f"'{key}'" in text for key in keys)
            assert f'data-copy="{prefix}' + "".join(f"['{key}']" for key in keys) + '"' in html
            if leaf.ndim == 2:  # vectors are shown in full
                assert f"float32{leaf.shape}" in text and f"float32{leaf.shape}" in html
    assert "TiedGradient(" in text and "lookup=" in text and "head=" in text and "(11, 6)" in text


# Several devices.

ON_DEVICES = """
import pickle, sys
import jax, numpy as np
import minigpt_jax as mg
from jax.sharding import Mesh, NamedSharding, PartitionSpec

config, params, batch = pickle.load(open(sys.argv[1], "rb"))
grads = jax.jit(jax.value_and_grad(mg.loss), static_argnums=2, compiler_options={"xla_backend_optimization_level": 0})
results = {}
for n in (1, 2, 4):
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    split = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    assert len(split.tokens.sharding.device_set) == n
    results[n] = jax.device_get(grads(whole, split, config))
pickle.dump(results, open(sys.argv[2], "wb"))
"""


def test_data_parallel_gradients_equal_those_of_one_device(tmp_path):
    """accelerate#993, Megatron-LM#656: lookup part plus head part, on every device, over the whole batch's count.

    One device's rows have no valid target at all, and the others' counts differ: a mean of means would show.
    """
    batch = a_batch((4, 5))
    batch.mask[2] = False
    given, found = tmp_path / "given", tmp_path / "found"
    given.write_bytes(pickle.dumps((TINY, jax.device_get(params_of(TINY)), batch)))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", ON_DEVICES, given, found], check=True, env=environment, timeout=300)
    results = pickle.loads(found.read_bytes())
    value, grads = loss_and_grads(params_of(TINY), batch, TINY)
    for n in (1, 2, 4):
        # float32 sums over devices come in another order: relative to the largest entry of each leaf.
        np.testing.assert_allclose(results[n][0], value, rtol=1e-6)
        for path, leaf in leaf_paths(grads).items():
            atol = 1e-5 * float(np.abs(leaf).max())
            np.testing.assert_allclose(leaf_paths(results[n][1])[path], leaf, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": -1}, "accumulate is -1"),
        ({"chunk": 2.0}, "chunk is 2.0"),
        ({"chunk": 0}, "chunk is 0"),
    ],
    ids=str,
)
def test_ways_to_cut_a_batch_that_are_refused(options, words):
    with pytest.raises(mg.InputError, match=words):
        mg.tied_gradient(params_of(TINY), a_batch(), TINY, **options)


def test_ids_and_params_are_checked_however_the_batch_is_cut():
    wrong = a_batch()._replace(tokens=a_batch().tokens + TINY.vocab_size)
    with pytest.raises(mg.InputError, match="ids must be in"):
        mg.tied_gradient(params_of(TINY), wrong, TINY, accumulate=2)
    with pytest.raises(mg.InputError, match="do not fit the config"):
        mg.loss({"embed": params_of(TINY)["embed"]}, a_batch(), TINY, chunk=2)


def test_a_nan_is_not_a_part_of_size_zero():
    part = np.ones((2, 2), np.float32)
    broken = np.array([[np.nan, 1], [1, 1]], np.float32)
    stats = mg.tied_stats(mg.TiedGradient(np.float32(0), jnp.asarray(part), jnp.asarray(broken), {}))
    assert all(np.isnan(stats[name]) for name in ("cosine", "head_share_l2", "head_share_l1"))
