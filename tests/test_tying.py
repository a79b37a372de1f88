"""Taking the tie apart and putting it back, what counts as tied, and interventions on the two parts.

V, D and F all differ where nothing else is said, so that a transposed table can't fit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from models import noisy_params

import minigpt_jax as mg
from minigpt_jax.functional import abstract_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=1, n_heads=1, d_ff=5, context_len=8)
FLOAT64 = dataclasses.replace(TINY, dtype="float64", param_dtype="float64")
RUN = mg.Config(TINY, train=mg.TrainConfig(steps=10, warmup_steps=0, peak_lr=1e-2, batch_size=2))
TABLE, HEAD = "embed/embedding", "head/embedding_out"

forward = jax.jit(mg.forward, static_argnums=2)
loss_and_grads = jax.jit(jax.value_and_grad(mg.loss), static_argnums=2)


def params_of(config=TINY):
    """A copy, since these tests write into trees and give arrays away."""
    return jax.tree.map(jnp.copy, noisy_params(config))


def a_batch(shape=(2, 5)):
    tokens, targets = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, *shape)).astype(np.int32)
    mask = np.ones(shape, bool)
    mask[0, 1] = mask[1, 3:] = False
    return mg.Batch(tokens, targets, mask)


def assert_equal(a, b):
    """Bit for bit, and the same structure."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def refused(function, *words):
    """The one line that `InputError` says, with all of `words` in it."""
    with pytest.raises(mg.InputError) as caught:
        function()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


# Apart and together.


def test_the_untied_tree_computes_the_same_bit_for_bit():
    tree, two = mg.untie(params_of()), mg.untied(TINY)
    assert not two.tied and dataclasses.replace(two, tied=True) == TINY
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, abstract_params(two))
    tokens = a_batch().tokens
    np.testing.assert_array_equal(forward(tree, tokens, two), forward(params_of(), tokens, TINY))
    value, _ = loss_and_grads(tree, a_batch(), two)
    np.testing.assert_array_equal(value, loss_and_grads(params_of(), a_batch(), TINY)[0])
    assert_equal(mg.retie(tree), params_of())


def test_the_heads_table_is_a_copy():
    """One buffer in two places can't be donated; and the tied tree must not gain a leaf."""
    params = params_of()
    tree = mg.untie(params)
    lookup, head = tree["embed"]["embedding"], tree["head"]["embedding_out"]
    assert lookup.unsafe_buffer_pointer() != head.unsafe_buffer_pointer()
    assert "head" not in params
    expected = jax.tree.map(lambda x: np.array(x) * 2, tree)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)(tree)
    assert_equal(doubled, expected)
    assert head.is_deleted(), "not donated"


def two_different_tables():
    tree = mg.untie(params_of())
    head = tree["head"]["embedding_out"].at[3, 2].add(0.5).at[7].add(-0.125)
    return {**tree, "head": {"embedding_out": head}}


def test_tables_that_differ_are_not_joined_unasked():
    tree = two_different_tables()
    refused(lambda: mg.retie(tree), TABLE, HEAD, "2 of 11 rows", "0.5;", "'lookup'", "'head'", "'mean'")
    lookup, head = np.asarray(tree["embed"]["embedding"]), np.asarray(tree["head"]["embedding_out"])
    for keep, expected in (("lookup", lookup), ("head", head), ("mean", (lookup + head) / np.float32(2))):
        joined = mg.retie(tree, keep=keep)
        mg.assert_tied(joined, TINY)
        np.testing.assert_array_equal(joined["embed"]["embedding"], expected)
        rest = {name: leaf for name, leaf in joined.items() if name != "embed"}
        assert_equal(rest, {name: tree[name] for name in rest})
    assert set(tree) - set(mg.retie(tree, keep="mean")) == {"head"}


def test_inside_jit_one_has_to_say_which_table_stays():
    """The values are not known there, so a difference could not be seen."""
    refused(lambda: jax.jit(mg.retie)(mg.untie(params_of())), "inside jit", "'lookup'")
    tree = two_different_tables()
    joined = jax.jit(functools.partial(mg.retie, keep="head"))(tree)
    np.testing.assert_array_equal(joined["embed"]["embedding"], tree["head"]["embedding_out"])
    assert_equal(jax.jit(lambda p: mg.retie(mg.untie(p), keep="lookup"))(params_of()), params_of())


def test_what_can_not_be_taken_apart_or_joined_is_refused():
    refused(lambda: mg.retie(mg.untie(params_of()), keep="both"), "'both'", "'lookup'", "'head'", "'mean'")
    refused(lambda: mg.retie(params_of()), TABLE, HEAD)
    for no_params in (mg.untie(params_of()), {}, None, {"embed": {}}, mg.init_state(RUN)):
        refused(lambda: mg.untie(no_params), TABLE, HEAD)  # noqa: B023


@pytest.mark.parametrize("keep", [None, "mean"])
def test_tables_of_different_shapes_are_not_joined(keep):
    tree = mg.untie(params_of())
    tree["head"]["embedding_out"] = jnp.ones((12, 6))
    refused(lambda: mg.retie(tree, keep=keep), TABLE, HEAD, "11", "12")


def test_a_table_with_nan_is_the_same_table_after_both():
    """Where training has diverged one wants to look; NaN differs from itself."""
    params = params_of()
    params["embed"]["embedding"] = params["embed"]["embedding"].at[2, 1].set(jnp.nan)
    assert_equal(mg.retie(mg.untie(params)), params)


# What counts as tied.

SQUARE = mg.ModelConfig()  # V = D = 64, as are all of attention's kernels
LONG = dataclasses.replace(TINY, positions="learned", context_len=11)  # the table of positions is (V, D) too
MODELS = {"tiny": TINY, "square": SQUARE, "long": LONG}


@pytest.mark.parametrize("name", MODELS)
def test_what_holds_one_table_is_tied(name):
    config = MODELS[name]
    assert name != "square" or config.vocab_size == config.d_model
    params = mg.init(config, jax.random.key(0))
    opt_state = mg.make_optimizer(mg.TrainConfig()).init(params)
    trees = [params, jax.tree.map(jnp.ones_like, params), {"ema": params}, abstract_params(config)]
    trees += [optax.tree.get(opt_state, moment) for moment in ("mu", "nu")] + [{"embed": params["embed"]}]
    for tree in trees:
        assert mg.assert_tied(tree, config) is None
    _, grads = loss_and_grads(params_of(), a_batch(), TINY)
    mg.assert_tied(grads, TINY)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_table_is_named(name):
    """flax#1263, Megatron-LM#656: a second leaf ties nothing, however it is called or turned."""
    config = MODELS[name]
    params = mg.init(config, jax.random.key(0))
    E = params["embed"]["embedding"]
    for path, second in {
        HEAD: mg.untie(params),
        "lm_head/weight": {**params, "lm_head": {"weight": E}},
        "lm_head/kernel": {**params, "lm_head": {"kernel": E.T}},
        "wte/embedding": {**params, "wte": {"embedding": E[:5]}},
        "ema/embed/embedding": {"embed": params["embed"], "ema": params},
    }.items():
        refused(lambda: mg.assert_tied(second, config), "not tied", TABLE, path, "2 tables", "retie")  # noqa: B023


def test_no_table_and_a_wrong_one_are_refused():
    params, E = params_of(), params_of()["embed"]["embedding"]
    rest = {name: leaf for name, leaf in params.items() if name != "embed"}
    for nothing in (rest, {}, None):
        refused(lambda: mg.assert_tied(nothing, TINY), "no table", TABLE, "(11, 6)")  # noqa: B023
    for path, shape, wrong in (
        (TABLE, "[12, 6]", {**rest, "embed": {"embedding": jnp.ones((12, 6))}}),
        (TABLE, "[6, 11]", {**rest, "embed": {"embedding": E.T}}),
        ("wte/weight", "[11, 6]", {**rest, "wte": {"weight": E}}),
    ):
        refused(lambda: mg.assert_tied(wrong, TINY), path, shape, f"{TABLE} [11, 6]")  # noqa: B023
    refused(lambda: mg.assert_tied(params, mg.untied(TINY)), "tied: false")


# Interventions. Both parts come from the oracle's reverse pass, in float64.


def by_use(lookup, head, dtype=jnp.float32):
    return {
        "embed": {"embedding": jnp.asarray(lookup, dtype)},
        "head": {"embedding_out": jnp.asarray(head, dtype)},
        "norm_final": {"scale": jnp.asarray([3.0, 4.0])},
    }


def applied(transformation, grads):
    """Its updates, on host; with the state of the tied params, as in training."""
    return jax.device_get(transformation.update(grads, transformation.init(params_of()))[0])


def lookup_and_head(lookup_size, head_size):
    rng = np.random.default_rng(1)
    lookup, head = rng.normal(size=(2, 7, 4)).astype(np.float32)
    return lookup * np.float32(lookup_size), head * np.float32(head_size)


@pytest.mark.parametrize("c", [0.0, 1.0, 5.0])
def test_scaling_multiplies_the_lookup_part_alone(c):
    lookup, head = lookup_and_head(1, 1)
    scaled = applied(mg.scale_lookup_gradient(c), by_use(lookup, head))
    assert_equal(scaled, jax.device_get(by_use(np.float32(c) * lookup, head)))
    tied = applied(optax.chain(mg.scale_lookup_gradient(c), mg.tie_gradients()), by_use(lookup, head))
    assert set(tied) == {"embed", "norm_final"} and set(tied["embed"]) == {"embedding"}
    np.testing.assert_array_equal(tied["embed"]["embedding"], np.float32(c) * lookup + head)
    np.testing.assert_array_equal(tied["norm_final"]["scale"], [3, 4])


def test_clipping_takes_the_head_part_down_to_the_lookups_length():
    """The direction stays; a shorter head part, the lookup part and all else stay bit for bit."""
    lookup, head = lookup_and_head(0.1, 1)
    clipped = applied(mg.clip_head_gradient(), by_use(lookup, head))
    length = np.linalg.norm(lookup.astype(np.float64))
    expected = head * (length / np.linalg.norm(head.astype(np.float64)))
    np.testing.assert_allclose(clipped["head"]["embedding_out"], expected, rtol=1e-6)  # float32
    assert_equal({**clipped, "head": 0}, {**jax.device_get(by_use(lookup, head)), "head": 0})
    lookup, head = lookup_and_head(1, 0.1)
    assert_equal(applied(mg.clip_head_gradient(), by_use(lookup, head)), jax.device_get(by_use(lookup, head)))


def test_clipping_parts_that_are_zero():
    """Nothing is read: the head part is clipped to length 0. No part at all: 0, not 0/0."""
    for lookup_size, head_size in ((0, 1), (1, 0), (0, 0)):
        lookup, head = lookup_and_head(lookup_size, head_size)
        clipped = applied(mg.clip_head_gradient(), by_use(lookup, head))
        assert_equal(clipped, jax.device_get(by_use(lookup, head if lookup_size else 0 * head)))


def test_interventions_keep_the_type():
    lookup, head = lookup_and_head(0.1, 1)
    for transformation in (mg.scale_lookup_gradient(2.5), mg.clip_head_gradient(), mg.tie_gradients()):
        changed = applied(transformation, by_use(lookup, head, jnp.bfloat16))
        changed.pop("norm_final")
        assert {leaf.dtype for leaf in jax.tree.leaves(changed)} == {jnp.dtype(jnp.bfloat16)}


def test_interventions_act_in_the_order_of_the_chain():
    lookup, head = lookup_and_head(1, 3)
    length = np.linalg.norm(lookup.astype(np.float64))
    unit = head / np.linalg.norm(head.astype(np.float64))
    scale, clip, tie = mg.scale_lookup_gradient(2.0), mg.clip_head_gradient(), mg.tie_gradients()
    for chain, limit in (((scale, clip, tie), 2 * length), ((clip, scale, tie), length)):
        tied = applied(optax.chain(*chain), by_use(lookup, head))["embed"]["embedding"]
        np.testing.assert_allclose(tied, 2 * lookup + limit * unit, rtol=1e-5, atol=1e-6)  # float32
    _, grads = loss_and_grads(params_of(), a_batch(), TINY)
    for transformation in (scale, clip, tie, optax.chain(tie, scale)):
        given = grads if transformation in (scale, clip, tie) else by_use(lookup, head)
        refused(lambda: applied(transformation, given), "by use", "untie(params)", "untied(config)")  # noqa: B023


def test_a_chain_with_an_optimizer_by_hand(x64):
    """params - rate * (c lookup + head), and - rate * gradient for every other leaf."""
    params = params_of(FLOAT64)
    optimizer = optax.chain(mg.scale_lookup_gradient(3.0), mg.tie_gradients(), optax.sgd(0.1))
    _, grads = loss_and_grads(mg.untie(params), a_batch(), mg.untied(FLOAT64))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    _, expected, lookup, head = oracle.backward(params, *a_batch()[:2], FLOAT64, a_batch().mask)
    expected["embed"]["embedding"] = 3.0 * lookup + head
    expected = jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * g, params, expected)
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)  # float64
    jax.tree.map(near, optax.apply_updates(params, updates), expected)


OPTIONS = {
    "off": {},
    "scaled": {"lookup_gradient_scale": 3.0},
    "not_read": {"lookup_gradient_scale": 0.0},
    "clipped": {"clip_head_gradient": True},
    "both": {"lookup_gradient_scale": 0.5, "clip_head_gradient": True},
    "both_accumulated": {"lookup_gradient_scale": 0.5, "clip_head_gradient": True, "accumulate": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_training_step_intervenes_as_its_config_says(name, x64):
    """On the whole batch's parts: scale, clip, add, and only then the optimizer with its own clipping."""
    t = dataclasses.replace(RUN.train, clip_norm=0.05, **OPTIONS[name])
    config, params = mg.Config(FLOAT64, train=t), params_of(FLOAT64)
    params["embed"]["embedding"] *= 0.3  # so that the head part is the larger one
    state = mg.init_state(config)._replace(params=params)
    after, metrics = jax.jit(mg.make_train_step(config))(state, a_batch())
    _, grads, lookup, head = oracle.backward(params, *a_batch()[:2], FLOAT64, a_batch().mask)
    lookup = lookup * t.lookup_gradient_scale
    if t.clip_head_gradient:
        assert np.linalg.norm(head) > np.linalg.norm(lookup) > 0, "nothing to clip"
        head = head * (np.linalg.norm(lookup) / np.linalg.norm(head))
    grads["embed"]["embedding"] = lookup + head
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
    assert norm > t.clip_norm
    optimizer = mg.make_optimizer(t)
    updates, opt_state = optimizer.update(grads, optimizer.init(params), params)
    # float64; the first moment is a tenth of the clipped gradient, and Adam's step magnifies what is near zero.
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    jax.tree.map(near, *(optax.tree.get(tree, "mu") for tree in (after.opt_state, opt_state)))
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-8)
    jax.tree.map(near, after.params, optax.apply_updates(params, updates))


def test_no_intervention_is_the_plain_step_bit_for_bit():
    explicit = dataclasses.replace(RUN.train, lookup_gradient_scale=1, clip_head_gradient=False)
    after, metrics = jax.jit(mg.make_train_step(dataclasses.replace(RUN, train=explicit)))(
        mg.init_state(RUN), a_batch()
    )
    plain, _ = jax.jit(mg.make_train_step(RUN))(mg.init_state(RUN), a_batch())
    assert_equal(after, plain)
    assert set(metrics) == {"loss", "lr", "grad_norm", "targets"}


@pytest.mark.parametrize("option", [{"lookup_gradient_scale": 2.0}, {"clip_head_gradient": True}, {"inspect_every": 5}])
def test_an_untied_model_has_no_parts_to_intervene_on(option):
    refused(lambda: mg.Config(mg.untied(TINY), train=mg.TrainConfig(**option)), *option, "tied: false")
