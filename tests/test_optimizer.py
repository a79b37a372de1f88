"""AdamW, its schedule and its decay groups, against float64 NumPy written from the papers."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minigpt_jax as mg
from minigpt_jax.functional import abstract_params
from minigpt_jax.optimizer import DECAY_RULES, describe_decay, leaf_paths

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
TINY = mg.ModelConfig(vocab_size=5, d_model=4, n_layers=1, n_heads=2, d_ff=6, context_len=8)
# Every kind of leaf there is, in one tree; values from 1 to 2, so that relative errors are absolute ones.
EVERY_LEAF = dataclasses.replace(TINY, positions="learned", tied=False, attention_bias=True, ffn="swiglu", qk_norm=True)

# Compiling is nearly all of these tests' time; what LLVM's optimizer does is no matter of theirs.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def values_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(1 + rng.random(leaf.shape), jnp.float32), tree)


# Which leaves decay.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("decay_embedding", [True, False])
def test_matrices_decay_and_vectors_do_not(path, decay_embedding):
    """By the number of axes, which the rules do not look at: names alone let a new bias decay unseen."""
    params = abstract_params(mg.load_config(path).model)
    decays = leaf_paths(mg.decay_mask(params, decay_embedding))
    assert decays.keys() == leaf_paths(params).keys()
    for name, leaf in leaf_paths(params).items():
        table = name in ("embed/embedding", "head/embedding_out")
        assert decays[name] is (decay_embedding if table else leaf.ndim == 2), name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("decay_embedding", [True, False])
def test_printed_groups_add_up_to_the_whole(path, decay_embedding):
    """The table qualifies as an embedding and as a matrix (nanoGPT#21): listed twice, the sums would be too high."""
    params = abstract_params(mg.load_config(path).model)
    config = mg.TrainConfig(decay_embedding=decay_embedding, weight_decay=0.25)
    lines = describe_decay(params, config)
    groups = [re.fullmatch(r"(decay 0\.25|no decay) +(\d+) leaves +([\d,]+) parameters +(\S+)", line) for line in lines]
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    assert sum(int(group[2]) for group in groups) == len(sizes)
    assert sum(int(group[3].replace(",", "")) for group in groups) == sum(sizes)
    expected = leaf_paths(mg.decay_mask(params, decay_embedding))
    for name in leaf_paths(params):
        (group,) = [group for group in groups if re.fullmatch(group[4], name)]
        assert (group[1] == "decay 0.25") is expected[name], name


def test_the_mask_is_a_plain_tree_like_the_params():
    """optax#1007: masks of another type are taken for functions, or fail deep inside."""
    params = values_like(abstract_params(EVERY_LEAF))
    mask = mg.decay_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert {type(leaf) for leaf in jax.tree.leaves(mask)} == {bool}


@pytest.mark.parametrize("name", ["adapter", "kernels", "Kernel"])
def test_a_leaf_that_no_rule_names_is_refused(name):
    """A typo in a pattern, or a new module, would silently not decay."""
    params = {**abstract_params(TINY), "block_0": {"ffn": {name: jnp.zeros((2, 2))}}}
    for use in (mg.decay_mask, mg.make_optimizer(mg.TrainConfig()).init):
        with pytest.raises(mg.InputError, match=f"'block_0/ffn/{name}' matches 0 weight-decay rules"):
            use(params)


def test_a_leaf_that_two_rules_name_is_refused():
    rules = (*DECAY_RULES, (r"norm_final/.*", True))
    with pytest.raises(mg.InputError, match="'norm_final/bias' matches 2 weight-decay rules"):
        mg.decay_mask(abstract_params(TINY), rules=rules)


@pytest.mark.parametrize("decay_embedding", [True, False])
def test_without_gradients_a_step_decays_each_matrix_exactly_once(decay_embedding):
    """nanoGPT#21: never twice, where a tied table stands in two groups; and biases and scales stay bit for bit."""
    config = mg.TrainConfig(
        steps=10, peak_lr=0.1, floor_lr=0.1, warmup_steps=0, weight_decay=0.5, decay_embedding=decay_embedding
    )
    params = values_like(abstract_params(EVERY_LEAF))
    optimizer = mg.make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = quick_jit(optimizer.update)(zeros, optimizer.init(params), params)
    after = leaf_paths(optax.apply_updates(params, updates))
    for name, leaf in leaf_paths(params).items():
        table = name in ("embed/embedding", "head/embedding_out")
        if leaf.ndim == 2 and (decay_embedding or not table):
            # lr * wd is 0.05; three float32 roundings of numbers below 2.
            np.testing.assert_allclose(after[name], np.asarray(leaf) * (1 - 0.1 * 0.5), rtol=3e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(after[name], leaf, err_msg=name)


# The schedule.


def rates(config, *updates):
    """The rate of update t = 1, 2, ...: `learning_rate` counts the updates before it."""
    return [float(mg.learning_rate(config)(t - 1)) for t in updates]


COSINE = mg.TrainConfig(steps=1000, warmup_steps=100, peak_lr=3e-4, floor_lr=3e-5)


def test_schedule_by_hand():
    """Warm-up from 0 is linear in t: 25 of 100 is a quarter of the peak. The cosine's middle is the mean of its ends.

    An update off by one is 1 % at t = 100 and a factor at t = 1. rtol: optax forms 1 - t / 100 in float32.
    """
    middle = (3e-4 + 3e-5) / 2
    quarter = 3e-5 + (3e-4 - 3e-5) * (1 + math.cos(math.pi / 4)) / 2
    found = rates(COSINE, 1, 25, 99, 100, 325, 550, 1000)
    np.testing.assert_allclose(found, [3e-6, 7.5e-5, 2.97e-4, 3e-4, quarter, middle, 3e-5], rtol=5e-6)
    assert rates(COSINE, 101)[0] < rates(COSINE, 100)[0], "the peak lasts one update"


def test_the_floor_is_reached_at_the_last_update_and_kept():
    """Not one update early or late: the cosine is flat there, to 3e-9 of the peak's 3e-4."""
    found = rates(COSINE, 900, 999, 1000, 1001, 5000)
    assert found[0] > found[1] > found[2]
    np.testing.assert_allclose(found[2:], 3e-5, rtol=1e-6)


def test_rates_never_rise_after_the_peak_or_fall_before_it():
    found = [float(x) for x in jax.vmap(mg.learning_rate(COSINE))(jnp.arange(1000))]
    assert np.all(np.diff(found[:100]) > 0) and np.all(np.diff(found[99:]) <= 0)
    assert max(found) == found[99]


def test_without_warm_up_the_first_update_is_full_size():
    """0/0 in the warm-up's slope; and no update of rate 0 before it starts."""
    config = dataclasses.replace(COSINE, warmup_steps=0)
    np.testing.assert_allclose(rates(config, 1, 500, 1000), [3e-4, (3e-4 + 3e-5) / 2, 3e-5], rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 50, 99, 100, 101])
def test_a_run_that_ends_in_its_warm_up_is_no_error(steps):
    """A trial run of a few steps keeps the config's warm-up; optax's schedule refuses decay_steps <= warmup_steps."""
    config = dataclasses.replace(COSINE, steps=steps)
    found = rates(config, 1, *range(1, steps + 1, 7))
    np.testing.assert_allclose(found, [3e-6, *[3e-6 * t for t in range(1, steps + 1, 7)]], rtol=1e-5)
    assert np.isfinite(rates(config, 10**6)[0])


# AdamW itself.


def adamw_by_numpy(params, grads_of_steps, config):
    """Loshchilov and Hutter 2019, algorithm 2, after clipping all leaves by one norm. Float64, leaf by leaf."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    m = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    v = {name: np.zeros_like(leaf) for name, leaf in params.items()}
    for t, grads in enumerate(grads_of_steps, start=1):
        grads = {name: np.asarray(leaf, np.float64) for name, leaf in grads.items()}
        norm = math.sqrt(sum((leaf**2).sum() for leaf in grads.values()))
        shrink = 1.0 if config.clip_norm is None or norm <= config.clip_norm else config.clip_norm / norm
        # Steps 1, 2, 3 of 3 without warm-up: the cosine from peak to floor.
        rate = config.floor_lr + (config.peak_lr - config.floor_lr) * (1 + math.cos(math.pi * t / config.steps)) / 2
        for name, leaf in params.items():
            g = grads[name] * shrink
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * g**2
            unbiased_m, unbiased_v = m[name] / (1 - config.beta1**t), v[name] / (1 - config.beta2**t)
            decay = config.weight_decay * leaf if leaf.ndim == 2 else 0
            params[name] = leaf - rate * (unbiased_m / (np.sqrt(unbiased_v) + config.adam_eps) + decay)
    return params


@pytest.mark.parametrize(("clip_norm", "jitted"), [(0.5, False), (0.5, True), (None, True), (1e6, True)])
def test_three_steps_equal_float64_numpy(clip_norm, jitted):
    """Clipping by one norm for all leaves, bias correction, epsilon outside the root, decay outside the gradient.

    Betas, epsilon and decay are large, so that each matters in the third digit.
    """
    config = mg.TrainConfig(
        steps=3, warmup_steps=0, peak_lr=0.1, floor_lr=0.01, beta1=0.7, beta2=0.8, adam_eps=0.05, weight_decay=0.3,
        clip_norm=clip_norm,
    )  # fmt: skip
    before = values_like(abstract_params(TINY))
    rng = np.random.default_rng(1)
    grads_of_steps = [
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale, jnp.float32), before)  # noqa: B023
        for scale in (0.01, 1.0, 0.3)  # of norms below and above 0.5
    ]
    optimizer = mg.make_optimizer(config)
    update = quick_jit(optimizer.update) if jitted else optimizer.update
    params, state = before, optimizer.init(before)
    for grads in grads_of_steps:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    expected = adamw_by_numpy(leaf_paths(before), [leaf_paths(grads) for grads in grads_of_steps], config)
    for name, leaf in leaf_paths(params).items():
        # float32 numbers between 1 and 2 after three additions of updates near 0.1.
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=2e-6, err_msg=name)


def test_state_has_moments_like_the_params_and_counts_updates():
    params = values_like(abstract_params(TINY))
    optimizer = mg.make_optimizer(mg.TrainConfig())
    state = optimizer.init(params)
    for name in ("mu", "nu"):
        moment = optax.tree.get(state, name)
        assert jax.tree.structure(moment) == jax.tree.structure(params)
        assert not any(leaf.any() for leaf in jax.tree.leaves(moment))
    _, state = quick_jit(optimizer.update)(params, state, params)
    counts = [leaf for _, leaf in optax.tree.get_all_with_path(state, "count")]
    assert counts and all(count == 1 for count in counts)
