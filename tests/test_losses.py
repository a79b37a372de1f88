"""Cross-entropy from logits and the loss of a batch, against float64 NumPy and cases worked by hand."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minigpt_jax as mg
from minigpt_jax.losses import LossSum, cross_entropy_sum, loss_sum

TINY = mg.ModelConfig(vocab_size=5, d_model=4, n_layers=1, n_heads=2, d_ff=6, context_len=8)
CONFIGS = Path(__file__).parent.parent / "configs"

# Compiling is nearly all of these tests' time; what LLVM's optimizer does is no matter of theirs.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
mean_and_grad = quick_jit(jax.value_and_grad(mg.cross_entropy_from_logits))
loss = quick_jit(mg.loss, static_argnums=2)
loss_and_grads = quick_jit(jax.value_and_grad(mg.loss), static_argnums=2)


@functools.cache
def tiny_params():
    return mg.init(TINY, jax.random.key(0))


def nll_and_grad(logits, target):
    """-log softmax(logits)[target] and its slope, softmax - one-hot, in float64; the largest logit is taken off."""
    x = np.asarray(logits, np.float64)
    shifted = x - x.max()
    log_sum = math.log(np.exp(shifted).sum())
    return log_sum - shifted[target], np.exp(shifted - log_sum) - (np.arange(len(x)) == target)


def float32_steps(logits, steps=4):
    """A few units in the last place of float32 at the size of the largest logit: what log-sum-exp minus logit costs."""
    return steps * float(np.spacing(np.float32(max(1.0, np.abs(logits).max()))))


# Values and gradients.


@pytest.mark.parametrize(
    "logits",
    [
        [0, 0, 0],
        [1, 2, 3],
        [1000, 1001, 1002],
        [-1000, -999, -998],
        [1000, -1000, 0],
        [-1000, 1000, 1000],
        [3e38, -3e38, 0],
    ],
    ids=str,
)
@pytest.mark.parametrize("target", [0, 1, 2])
def test_value_and_gradient_equal_float64(logits, target):
    """exp overflows at 89 in float32 and log(0) is -inf: a loss by way of probabilities is inf or NaN here."""
    if logits[0] == 3e38 and target == 1:
        logits = [1.5e38, -1.5e38, 0]  # the loss, twice this, is still a float32
    expected, slope = nll_and_grad(logits, target)
    value, grad = mean_and_grad(jnp.asarray([logits], jnp.float32), np.array([target], np.int32))
    np.testing.assert_allclose(value, expected, rtol=0, atol=float32_steps(logits))
    np.testing.assert_allclose(grad[0], slope, rtol=0, atol=4e-7)  # probabilities: a few roundings of numbers below 1


@pytest.mark.parametrize(
    ("logits", "target", "expected", "atol"),
    [
        # Both printed in course notes: 142.0 is 92 + 50, the other logits being too small to matter.
        ([10, 92, 30, -50, 40], 3, 142.0, 1e-5),
        ([1.2, 4.7, 3.1, 0.5, 2.9], 2, 1.9453, 5e-5),
        ([0, 0, 0], 1, math.log(3), 1e-7),
        # ln(1 + e^-1 + e^-2)
        ([1, 2, 3], 2, 0.40760596, 1e-7),
    ],
)
def test_values_by_hand(logits, target, expected, atol):
    """atol: the digits given."""
    value = mg.cross_entropy_from_logits(jnp.asarray(logits, jnp.float32), np.int32(target))
    np.testing.assert_allclose(value, expected, rtol=0, atol=atol)


def test_adding_a_constant_to_the_logits_changes_nothing():
    """A log-sum-exp without its largest term taken off would overflow at 100 already."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(6, 9)).astype(np.float32), rng.integers(0, 9, 6).astype(np.int32)
    base, base_grad = mean_and_grad(jnp.asarray(logits), targets)
    for shift in (-300.0, 100.0, 1000.0):
        value, grad = mean_and_grad(jnp.asarray(logits + np.float32(shift)), targets)
        # Adding the shift already rounds each logit to the float32 grid there.
        np.testing.assert_allclose(value, base, rtol=0, atol=float32_steps(shift))
        np.testing.assert_allclose(grad, base_grad, rtol=0, atol=float32_steps(shift))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_logits_give_a_float32_loss(dtype):
    """optax#1020: a normaliser rounded to bfloat16 makes losses come in steps of 1/32."""
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(8, 100)) * 3, dtype)
    targets = rng.integers(0, 100, 8).astype(np.int32)
    value, grad = mean_and_grad(logits, targets)
    assert value.dtype == jnp.float32 and grad.dtype == logits.dtype
    pairs = [nll_and_grad(row, target) for row, target in zip(np.asarray(logits, np.float64), targets, strict=True)]
    # The same logits in float64: only float32 rounding is left, far below the 1e-3 that a half-precision sum misses.
    np.testing.assert_allclose(value, np.mean([nll for nll, _ in pairs]), rtol=1e-6)
    # The gradient is rounded once, when it is handed back in the logits' type.
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(grad, np.float64), np.stack([g for _, g in pairs]) / 8, rtol=step, atol=1e-6)


def test_float64_logits_keep_their_digits():
    """A cast to float32 would leave 1e-7."""
    rng = np.random.default_rng(2)
    logits, targets = rng.normal(size=(4, 6)), rng.integers(0, 6, 4)
    with jax.enable_x64(True):
        value = mg.cross_entropy_from_logits(jnp.asarray(logits), targets)
        expected = np.mean([nll_and_grad(row, target)[0] for row, target in zip(logits, targets, strict=True)])
        np.testing.assert_allclose(value, expected, rtol=1e-14)


def test_vocabulary_of_one_symbol_costs_nothing():
    """One possible token is certain: 0 exactly, whatever its logit, and no slope."""
    value, grad = mean_and_grad(jnp.asarray([[700.0], [-3.0]]), np.zeros(2, np.int32))
    assert value == 0 and not grad.any()
    config = dataclasses.replace(TINY, vocab_size=1)
    zeros = np.zeros((2, 3), np.int32)
    value, grads = loss_and_grads(mg.init(config, jax.random.key(0)), mg.Batch(zeros, zeros), config)
    assert value == 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# Masks.


def test_masked_mean_divides_by_the_number_of_valid_targets():
    """Not by all positions, and not as a mean of rows' means: the rows have 3 and 1 valid targets."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 4, 7)).astype(np.float32)
    targets = rng.integers(0, 7, (2, 4)).astype(np.int32)
    mask = np.array([[1, 1, 0, 1], [0, 0, 1, 0]], bool)
    value, grad = mean_and_grad(jnp.asarray(logits), targets, mask)
    pairs = [nll_and_grad(logits[at], targets[at]) for at in zip(*np.nonzero(mask), strict=True)]
    np.testing.assert_allclose(value, sum(nll for nll, _ in pairs) / 4, rtol=1e-6)  # four float32 terms
    np.testing.assert_allclose(grad[mask], np.stack([g for _, g in pairs]) / 4, rtol=0, atol=1e-7)
    assert not grad[~mask].any(), "a masked position has a gradient"
    summed = cross_entropy_sum(jnp.asarray(logits), targets, mask)
    assert summed.count == 4
    np.testing.assert_allclose(summed.total, sum(nll for nll, _ in pairs), rtol=1e-6)


def test_masked_positions_may_hold_anything():
    """An inf or NaN there does not reach the value, nor an id that means "ignore" elsewhere the gradient."""
    logits = jnp.asarray([[1.0, 2.0, 3.0], [jnp.inf, -jnp.inf, jnp.nan]])
    value = mg.cross_entropy_from_logits(logits, np.array([2, 0], np.int32), np.array([True, False]))
    np.testing.assert_allclose(value, 0.40760596, rtol=1e-6)
    value, grad = mean_and_grad(logits[:1].repeat(2, 0), np.array([2, -100], np.int32), np.array([True, False]))
    np.testing.assert_allclose(value, 0.40760596, rtol=1e-6)
    assert np.isfinite(grad).all() and not grad[1].any()


def test_no_valid_target_gives_zero_and_no_gradient():
    """The mean of nothing is 0/0; debug_nans raises where any step makes a NaN."""
    with jax.debug_nans(True):
        mask = np.zeros((2, 3), bool)
        value, grad = mean_and_grad(jnp.ones((2, 3, 5)), np.zeros((2, 3), np.int32), mask)
        assert value == 0 and not grad.any()
        tokens = np.array([[1, 2, 3], [4, 0, 1]], np.int32)
        value, grads = loss_and_grads(tiny_params(), mg.Batch(tokens, tokens, mask), TINY)
        assert value == 0 and not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_gradients_under_a_partial_mask_never_make_nan():
    tokens = np.array([[1, 2, 3], [4, 0, 1]], np.int32)
    mask = np.array([[True, True, False], [False] * 3])
    with jax.debug_nans(True):
        value, grads = loss_and_grads(tiny_params(), mg.Batch(tokens, tokens, mask), TINY)
    assert value > 0 and grads["embed"]["embedding"].any()


def test_sums_and_counts_add_up_to_the_joined_mean():
    """What micro-batches and evaluation rely on; the mean of the parts' means would be another number."""
    a, b = LossSum(jnp.float32(6.0), jnp.float32(1)), LossSum(jnp.float32(7.0), jnp.float32(7))
    joined = jax.tree.map(jnp.add, a, b)
    assert joined.mean() == 13 / 8 and (a.mean() + b.mean()) / 2 == 3.5
    assert LossSum(jnp.float32(0), jnp.float32(0)).mean() == 0


# The loss of a batch.


def hand_model():
    """Blocks that add nothing, V=3 and D=2: h = norm(E[x]) is (1, -1) or (-1, 1), so the logits are a bigram table."""
    config = mg.ModelConfig(
        vocab_size=3, d_model=2, n_layers=1, n_heads=1, d_ff=2, context_len=4, norm_eps=1e-12, init_std=0.0
    )
    params = mg.init(config, jax.random.key(0))  # std 0: every matrix is zero
    params["embed"]["embedding"] = jnp.asarray([[2.0, 0.0], [0.0, 2.0], [1.0, 3.0]])
    return config, params


# After token 0 the logits are (2, -2, -2), after 1 and after 2 they are (-2, 2, 2).
NLL_AFTER_0 = {0: math.log1p(2 * math.exp(-4)), 1: 4 + math.log1p(2 * math.exp(-4))}
NLL_AFTER_1 = {0: 4 + math.log(2 + math.exp(-4)), 2: math.log(2 + math.exp(-4))}


def test_loss_of_a_bigram_table_by_hand():
    """Targets shifted twice or not at all (MONAI#314) give another sum; `targets[t]` follows `tokens[t]`."""
    config, params = hand_model()
    tokens, targets = np.array([[0, 1, 2]], np.int32), np.array([[1, 2, 0]], np.int32)
    expected = [NLL_AFTER_0[1], NLL_AFTER_1[2], NLL_AFTER_1[0]]
    value = loss(params, mg.Batch(tokens, targets), config)
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-6)  # float32 numbers near 4
    mask = np.array([[True, False, True]])
    value = loss(params, mg.Batch(tokens, targets, mask), config)
    np.testing.assert_allclose(value, (expected[0] + expected[2]) / 2, rtol=1e-6)
    summed = quick_jit(loss_sum, static_argnums=2)(params, mg.Batch(tokens, targets, mask), config)
    np.testing.assert_allclose(summed, (expected[0] + expected[2], 2), rtol=1e-6)
    # One sequence without the batch axis.
    value = loss(params, mg.Batch(tokens[0], targets[0]), config)
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-6)


def test_a_model_that_copies_its_input_scores_badly():
    """After 0 this one says 0: right only if the target were the token that it sees."""
    config, params = hand_model()
    zeros, ones = np.zeros((1, 3), np.int32), np.ones((1, 3), np.int32)
    np.testing.assert_allclose(loss(params, mg.Batch(zeros, ones), config), NLL_AFTER_0[1], rtol=1e-6)
    np.testing.assert_allclose(loss(params, mg.Batch(zeros, zeros), config), NLL_AFTER_0[0], rtol=1e-5)


def test_loss_under_jit_and_vmap():
    """Over batches and over parameters; a check that needs concrete values would fail here."""
    rng = np.random.default_rng(4)
    tokens, targets = rng.integers(0, 5, (2, 3, 2, 4)).astype(np.int32)
    mask = rng.random((3, 2, 4)) < 0.7
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[mg.init(TINY, jax.random.key(i)) for i in range(3)])
    one_by_one = [
        loss(mg.init(TINY, jax.random.key(i)), mg.Batch(tokens[i], targets[i], mask[i]), TINY) for i in range(3)
    ]
    mapped = quick_jit(jax.vmap(lambda p, b: mg.loss(p, b, TINY)))(params, mg.Batch(tokens, targets, mask))
    np.testing.assert_allclose(mapped, one_by_one, rtol=1e-6)  # float32, sums in another order
    assert len({float(x) for x in one_by_one}) == 3


# What is refused, and what the message says.


@pytest.mark.parametrize(
    ("logits", "targets", "mask"),
    [((2, 3, 5), (2, 4), None), ((2, 3, 5), (1, 3), None), ((2, 3, 5), (2, 3), (2, 1)), ((2, 3, 5), (2, 3), ())],
)
def test_shapes_that_would_broadcast_are_refused(logits, targets, mask):
    """They all broadcast in jnp, to a mean over pairs that never belonged together."""
    with pytest.raises(mg.InputError, match="give") as caught:
        mg.cross_entropy_from_logits(
            jnp.zeros(logits), np.zeros(targets, np.int32), None if mask is None else np.ones(mask, bool)
        )
    wrong = logits if mask is None else mask
    assert str(wrong) in str(caught.value) and str(targets) in str(caught.value)


@pytest.mark.parametrize(("targets", "mask"), [((2, 4), None), ((1, 3), None), ((2, 3), (1, 3)), ((2, 3), (2,))])
def test_batches_of_unequal_shapes_are_refused(targets, mask):
    batch = mg.Batch(
        np.zeros((2, 3), np.int32), np.zeros(targets, np.int32), None if mask is None else np.ones(mask, bool)
    )
    with pytest.raises(mg.InputError, match="shape") as caught:
        mg.loss(tiny_params(), batch, TINY)
    message = str(caught.value)
    assert "(2, 3)" in message and str(targets if mask is None else mask) in message and "\n" not in message


@pytest.mark.parametrize("bad", [5, 6, -1, -100, 2**31 - 1])
@pytest.mark.parametrize("field", ["tokens", "targets"])
def test_ids_outside_the_table_are_named_with_their_position(field, bad):
    """jnp clamps, wraps or drops them without a word (optax#1185, jax#3774)."""
    arrays = {"tokens": np.zeros((2, 3), np.int32), "targets": np.zeros((2, 3), np.int32)}
    arrays[field][1, 2] = bad
    for compute in (mg.loss, jax.grad(mg.loss)):
        with pytest.raises(mg.InputError) as caught:
            compute(tiny_params(), mg.Batch(**arrays), TINY)
        message = str(caught.value)
        assert f"{field}[1, 2] is {bad}" in message and "[0, 5)" in message and "\n" not in message


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("field", ["tokens", "targets"])
def test_ids_that_are_no_integers_are_refused(field, dtype):
    """A bool indexes rows 0 and 1, a float is rounded: both train without an error."""
    arrays = {"tokens": np.zeros((2, 3), np.int32), "targets": np.zeros((2, 3), np.int32)}
    arrays[field] = arrays[field].astype(dtype)
    for compute in (mg.loss, jax.jit(mg.loss, static_argnums=2)):
        with pytest.raises(mg.InputTypeError, match=f"{field} of type {dtype}; give integer"):
            compute(tiny_params(), mg.Batch(**arrays), TINY)


def test_smallest_and_largest_id_are_accepted():
    ids = np.array([[0, 4]], np.int32)
    assert np.isfinite(loss(tiny_params(), mg.Batch(ids, ids[:, ::-1]), TINY))


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_every_integer_type_of_ids_gives_the_same_loss(dtype):
    """In 8 bits `arange(V) == target` must not wrap: V = 300 has ids that agree in their low byte."""
    config = dataclasses.replace(TINY, vocab_size=300)
    params = mg.init(config, jax.random.key(0))
    ids = np.array([[3, 250, 44]])
    expected = loss(params, mg.Batch(ids.astype(np.int32), ids.astype(np.int32)), config)
    assert loss(params, mg.Batch(ids.astype(dtype), ids.astype(dtype)), config) == expected


# The loss that training starts from.


@pytest.mark.parametrize("one_block", [False, True], ids=["all_blocks", "one_block"])
@pytest.mark.parametrize("name", ["minigpt", "minigpt_v512", "shakespeare"])
def test_initial_loss_is_near_ln_v(name, one_block):
    """The scale of a tied matrix: Flax's default init, 1/sqrt(D), starts a nat or more above (espnet#3454).

    Targets are uniform and independent of the input. The expected excess is half the variance of the logits: with
    h of length sqrt(D) they have std 0.02 sqrt(D), 0.16 to 0.23 here, so some 0.013 to 0.026; and the 4,096 targets
    sample it to 0.01.
    """
    config = mg.load_config(CONFIGS / f"{name}.yaml").model
    if one_block:
        config = dataclasses.replace(config, n_layers=1)
    rng = np.random.default_rng(5)
    shape = (4096 // config.context_len, config.context_len)
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape)).astype(np.int32)
    value = float(loss(mg.init(config, jax.random.key(0)), mg.Batch(tokens, targets), config))
    assert abs(value - math.log(config.vocab_size)) < 0.15
    # It is no accident of a loss that ignores the model: a table at Flax's default scale is told apart.
    wide = dataclasses.replace(config, init_std=1 / math.sqrt(config.d_model))
    value = float(loss(mg.init(wide, jax.random.key(0)), mg.Batch(tokens, targets), wide))
    assert value - math.log(config.vocab_size) > 0.3


def test_a_fresh_tied_model_favours_its_own_input():
    """The tie's mark at init: the input's own logit is |E[x]| sqrt(D) = 0.02 D = 1.28 higher, less by the blocks."""
    config = mg.ModelConfig(kernel_init="fixed")  # small blocks: others turn h away from E[x], and hide it
    tokens = np.arange(64, dtype=np.int32)
    for tied, low, high in ((True, 0.7, 1.4), (False, -0.1, 0.1)):
        config = dataclasses.replace(config, tied=tied)
        logits = quick_jit(mg.forward, static_argnums=2)(mg.init(config, jax.random.key(0)), tokens, config)
        own = np.diag(logits).mean()
        rest = (logits.sum() - own * 64) / (64 * 63)
        # 64 own logits of std 0.16 average to within 0.02; the two blocks turn h away from E[x], to 0.9 at this key.
        assert low < own - rest < high
