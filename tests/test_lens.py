"""The logit lens: every row against the oracle's own stream, and the numbers against their definitions.

V, D, F and T all differ, so that a transposed or misplaced matrix can't fit.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from models import float64, noisy_params

import minigpt_jax as mg
from minigpt_jax.functional import readout

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERNORM = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=2, n_heads=1, d_ff=5, context_len=8)
CONFIGS = {
    "layernorm": LAYERNORM,
    "learned positions": dataclasses.replace(LAYERNORM, positions="learned"),
    "rmsnorm, grouped heads, untied": dataclasses.replace(
        LAYERNORM, norm="rmsnorm", ffn="swiglu", n_heads=3, n_kv_heads=1, tied=False
    ),
}
LAYERS = ("embed", "block_0/ffn", "block_1/ffn")
INSIDE = ("embed", "block_0/attention", "block_0/ffn", "block_1/attention", "block_1/ffn")
TOKENS = np.random.default_rng(3).integers(0, 11, (3, 4)).astype(np.int32)
# Padding on the left, on the right, and none.
MASK = np.array([[False, True, True, True], [True, True, True, False], [True, True, True, True]])

jitted_lens = jax.jit(mg.logit_lens, static_argnums=2, static_argnames="inside")


def params_of(config, seed=0):
    """Noise on every leaf, so that no scale is 1 and no bias 0; the norms' far from it, each column its own."""
    return noisy_params(config, 0.5, 0.5, seed)


def lens_by_numpy(params, tokens_BxT, config, points, mask=None):
    """(R, B, T, V) in float64: the oracle's stream, the final norm with statistics of that stream's own, the head."""
    params = oracle.to_float64(params)
    stream = oracle.residuals(params, tokens_BxT, config, mask)
    head = oracle.head_table(params, config)
    return np.stack([oracle.norm(stream[name], params["norm_final"], config) @ head.T for name in points])


def numbers_by_numpy(logits_RxTxV, tokens_T, targets_T, k):
    """What `LensTable` holds, one position at a time, from the definitions."""
    R, T, V = logits_RxTxV.shape
    numbers = {name: np.zeros((R, T)) for name in ("entropy", "kl", "rank_target", "rank_input")}
    numbers |= {"top_ids": np.zeros((R, T, k), int), "top_probs": np.zeros((R, T, k))}
    for r in range(R):
        for t in range(T):
            p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (logits_RxTxV[r, t], logits_RxTxV[-1, t]))
            order = sorted(range(V), key=lambda v, r=r, t=t: (-logits_RxTxV[r, t, v], v))  # ties to the lower id
            numbers["top_ids"][r, t], numbers["top_probs"][r, t] = order[:k], p[order[:k]]
            numbers["entropy"][r, t] = -sum(x * math.log2(x) for x in p)
            numbers["kl"][r, t] = sum(y * math.log2(y / x) for x, y in zip(p, q, strict=True))
            numbers["rank_target"][r, t] = -1 if targets_T[t] == -1 else order.index(targets_T[t])
            numbers["rank_input"][r, t] = order.index(tokens_T[t])
    return numbers


def assert_numbers(table, expected, rtol):
    for name, value in expected.items():
        if value.dtype == int or name.startswith("rank"):
            np.testing.assert_array_equal(getattr(table, name), value, err_msg=name)
        else:  # the last row's KL is 0 up to rounding
            np.testing.assert_allclose(getattr(table, name), value, rtol=rtol, atol=rtol, err_msg=name)


# Rows of logits.


def test_the_points_are_the_stream_after_each_layer_or_also_inside_it():
    assert mg.lens_points(LAYERNORM) == LAYERS
    assert mg.lens_points(LAYERNORM, inside=True) == INSIDE


@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_is_the_oracles_in_float64_under_the_users_own_jit(name, x64):
    """TransformerLens#1076: the final layer's statistics, used again for every layer, made early rows uniform."""
    config = float64(CONFIGS[name])
    params = params_of(config)
    rows = jitted_lens(params, TOKENS, config, MASK, inside=True)
    # Sums of at most 11 float64 terms, two layers deep.
    np.testing.assert_allclose(rows, lens_by_numpy(params, TOKENS, config, INSIDE, MASK), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_is_the_oracles_in_float32(name):
    config, params = CONFIGS[name], params_of(CONFIGS[name])
    expected = lens_by_numpy(params, TOKENS, config, LAYERS)
    rows = mg.logit_lens(params, TOKENS, config)
    assert rows.shape == (3, 3, 4, 11) and rows.dtype == jnp.float32
    # Logits are about 5; float32's 6e-8 of it, times some ten roundings a layer.
    np.testing.assert_allclose(rows, expected, rtol=2e-5, atol=2e-5)
    if name == "layernorm":  # compiled once more
        single = mg.logit_lens(params, TOKENS[1].tolist(), config)
        np.testing.assert_allclose(single, expected[:, 1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["layernorm", "learned positions"])
def test_the_first_row_is_the_final_norm_of_the_embedding_times_the_table(name):
    params = oracle.to_float64(params_of(CONFIGS[name]))
    E, scale, bias = params["embed"]["embedding"], params["norm_final"]["scale"], params["norm_final"]["bias"]
    x = E[TOKENS] + (params["positions"]["table"][:4] if name == "learned positions" else 0)
    unit = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    row = mg.logit_lens(params_of(CONFIGS[name]), TOKENS, CONFIGS[name])[0]
    np.testing.assert_allclose(row, (unit * scale + bias) @ E.T, rtol=2e-5, atol=2e-5)  # float32


def test_a_block_that_writes_nothing_leaves_the_row_unchanged():
    params = params_of(LAYERNORM)
    block = params["block_0"]
    attention = block["attention"] | {"out": jax.tree.map(jnp.zeros_like, block["attention"]["out"])}
    ffn = block["ffn"] | {"down": jax.tree.map(jnp.zeros_like, block["ffn"]["down"])}
    rows = mg.logit_lens(params | {"block_0": block | {"attention": attention, "ffn": ffn}}, TOKENS, LAYERNORM)
    np.testing.assert_array_equal(rows[1], rows[0])
    assert not np.array_equal(rows[2], rows[1])


def a_probe(config, inside=False):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), mg.init_probes(config, inside))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_row_is_forward_bit_for_bit(name):
    config, params = CONFIGS[name], params_of(CONFIGS[name])
    logits = mg.forward(params, TOKENS, config, MASK)
    for inside in (False, True):
        for probes in (None, a_probe(config, inside)):
            rows = mg.logit_lens(params, TOKENS, config, MASK, inside, probes)
            np.testing.assert_array_equal(rows[-1], logits)
    if name == "layernorm":
        tokens = TOKENS[0].tolist()
        np.testing.assert_array_equal(mg.logit_lens(params, tokens, config)[-1], mg.forward(params, tokens, config))


def test_long_sequences_too():
    """From T = 256 on attention runs in two blocks of queries; with T odd they differ in length."""
    params, tokens = params_of(LAYERNORM), np.random.default_rng(1).integers(0, 11, 257)
    rows = mg.logit_lens(params, tokens, LAYERNORM, inside=True)
    np.testing.assert_array_equal(rows[-1], mg.forward(params, tokens, LAYERNORM))
    # As above; the softmax adds up to 257 terms.
    np.testing.assert_allclose(rows, lens_by_numpy(params, tokens[None], LAYERNORM, INSIDE)[:, 0], rtol=1e-4, atol=1e-4)


def test_a_bfloat16_model_has_float32_rows():
    config = dataclasses.replace(LAYERNORM, dtype="bfloat16")
    rows = mg.logit_lens(params_of(LAYERNORM), TOKENS, config)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows[-1], mg.forward(params_of(LAYERNORM), TOKENS, config))
    # bfloat16 keeps 8 bits: 0.4 % at each rounding, on logits of about 5 that are sums of six such products.
    np.testing.assert_allclose(rows[0], lens_by_numpy(params_of(LAYERNORM), TOKENS, config, LAYERS)[0], atol=0.2)


def test_readout_takes_any_stream_of_the_models_width():
    params, x = params_of(LAYERNORM), np.random.default_rng(2).normal(size=(3, 4, 6)).astype(np.float32)
    wide = oracle.to_float64(params)
    expected = oracle.norm(x.astype(np.float64), wide["norm_final"], LAYERNORM) @ wide["embed"]["embedding"].T
    np.testing.assert_allclose(readout(params, x, LAYERNORM), expected, rtol=2e-5, atol=2e-5)  # float32
    np.testing.assert_allclose(readout(params, x[0], LAYERNORM), expected[0], rtol=2e-5, atol=2e-5)
    with pytest.raises(mg.InputError, match=r"\(4, 5\)"):
        readout(params, x[0, :, :5], LAYERNORM)
    with pytest.raises(mg.InputError, match="do not fit the config"):
        readout({name: leaf for name, leaf in params.items() if name != "norm_final"}, x, LAYERNORM)


# Numbers.


def test_the_numbers_are_those_of_the_oracles_logits(x64):
    config = float64(LAYERNORM)
    params = params_of(config)
    logits = lens_by_numpy(params, TOKENS, config, INSIDE)
    table = mg.lens_table(params, TOKENS, config, top_k=3, inside=True)
    assert table.points == INSIDE
    np.testing.assert_array_equal(table.tokens, TOKENS)
    np.testing.assert_array_equal(table.targets[:, :-1], TOKENS[:, 1:])
    np.testing.assert_array_equal(table.targets[:, -1], -1)
    for b, row in enumerate(TOKENS):
        ours = table._replace(**{name: getattr(table, name)[:, b] for name in table._fields[3:]})
        assert_numbers(ours, numbers_by_numpy(logits[:, b], row, [*row[1:], -1], 3), rtol=1e-11)  # float64
    # One sequence alone, with targets of one's own.
    targets = np.array([4, 0, 10, 7])
    table = mg.lens_table(params, TOKENS[1], config, targets, top_k=3)
    assert table.points == LAYERS
    assert_numbers(table, numbers_by_numpy(logits[::2, 1], TOKENS[1], targets, 3), rtol=1e-11)
    np.testing.assert_array_equal(table.targets, targets)


def test_float32_numbers_are_near_and_no_kl_is_below_zero():
    params = params_of(LAYERNORM)
    logits = lens_by_numpy(params, TOKENS, LAYERNORM, LAYERS)
    table = mg.lens_table(params, TOKENS, LAYERNORM)
    assert np.min(table.kl) >= 0 and np.max(table.kl[-1]) < 1e-5 < 0.1 < np.min(table.kl.mean(axis=(1, 2))[:-1])
    expected = numbers_by_numpy(logits[:, 2], TOKENS[2], [*TOKENS[2, 1:], -1], 5)
    nearly = params | {"block_1": jax.tree.map(lambda leaf: 1e-4 * leaf, params["block_1"])}
    assert np.min(mg.lens_table(nearly, TOKENS, LAYERNORM).kl) >= 0, "rounding"
    for name in ("entropy", "kl", "top_probs"):  # errors of the logits, 2e-5, in bits
        np.testing.assert_allclose(getattr(table, name)[:, 2], expected[name], rtol=1e-4, atol=1e-4)


@functools.cache
def tied_up():
    """A model of silent blocks whose table is made of unit vectors and zeros, so that many logits are exactly equal."""
    config = mg.ModelConfig(vocab_size=7, d_model=4, n_layers=1, n_heads=1, d_ff=5, context_len=8, norm="rmsnorm")
    params = jax.tree.map(jnp.zeros_like, params_of(config))
    e0, e1, zero = np.eye(4)[0], np.eye(4)[1], np.zeros(4)
    params["embed"]["embedding"] = jnp.asarray([e1, e0, e0, zero, e1, zero, e0], jnp.float32)
    params["norm_final"]["scale"] = jnp.ones(4)
    return config, params


def test_ties_go_to_the_lower_id_and_more_than_all_tokens_are_all_of_them():
    config, params = tied_up()
    table = mg.lens_table(params, [2, 0, 3], config, [6, 3, 5], top_k=99)
    expected = [[1, 2, 6, 0, 3, 4, 5], [0, 4, 1, 2, 3, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    np.testing.assert_array_equal(table.top_ids, [expected, expected])
    np.testing.assert_array_equal(table.rank_input, [[1, 0, 3]] * 2)
    np.testing.assert_array_equal(table.rank_target, [[2, 4, 5]] * 2)
    # e0 has root mean square 1/2, so its unit is 2: three logits of 2 (epsilon: 1e-5 of 1/4), four of 0.
    np.testing.assert_allclose(table.top_probs[0, 0, 0], math.e**2 / (3 * math.e**2 + 4), rtol=1e-4)
    assert [line.split() for line in table.render(list("abcdefg")).split("\n")[-4:]] == [
        "input c a d".split(), "embed b a a".split(), "block_0/ffn b a a".split(), "target g d f".split()
    ]  # fmt: skip


def test_uniform_logits_have_log2_v_bits_and_cost_nothing():
    config, params = tied_up()
    params = params | {"embed": {"embedding": jnp.zeros((7, 4))}}
    table = mg.lens_table(params, [2, 0, 3], config, top_k=7)
    np.testing.assert_allclose(table.entropy, math.log2(7), rtol=1e-6)  # float32
    np.testing.assert_array_equal(table.kl, 0)


def test_a_uniform_row_costs_what_the_last_one_knows():
    """KL(p || uniform) = log2 V - H(p): token 3 enters as zeros, and the block's bias makes something of it."""
    config, params = tied_up()
    down = {"kernel": jnp.zeros((5, 4)), "bias": jnp.asarray([2.0, -1.0, 0.5, 0.0])}
    params = params | {"block_0": params["block_0"] | {"ffn": params["block_0"]["ffn"] | {"down": down}}}
    table = mg.lens_table(params, [3, 3, 3], config, top_k=7)
    assert np.max(table.entropy[1]) < 2.4 < math.log2(7)
    np.testing.assert_allclose(table.kl[0], math.log2(7) - table.entropy[1], rtol=1e-5)  # float32


def test_spare_rows_have_no_probability_and_no_rank(x64):
    """build-nanogpt#81: rows that only round V up are no tokens, though their logits may be the largest."""
    config = float64(LAYERNORM)
    params = dict(params_of(config))
    params["embed"] = {"embedding": params["embed"]["embedding"].at[9:].multiply(30.0)}
    tokens, targets = np.minimum(TOKENS[0], 8), np.array([8, 0, 3, 5])
    logits = lens_by_numpy(params, tokens[None], config, LAYERS)[:, 0]
    assert (logits.argmax(axis=-1) >= 9).mean() > 0.5, "no spare row is ahead, so this would show nothing"
    expected = numbers_by_numpy(logits[..., :9], tokens, targets, 9)
    table = mg.lens_table(params, tokens, config, targets, top_k=50, vocab_limit=9)
    assert table.top_ids.shape == (3, 4, 9)
    assert_numbers(table, expected, rtol=1e-11)


def test_an_id_beyond_the_vocabularys_end_is_refused_not_ranked_first():
    for tokens, targets in [([1, 9, 2], None), ([1, 2, 3], [2, 3, 10])]:
        with pytest.raises(mg.InputError, match=r"9|10"):
            mg.lens_table(params_of(LAYERNORM), tokens, LAYERNORM, targets, vocab_limit=9)


@pytest.mark.parametrize("tokens", [[1, 11], [1, -1], [1.0, 2.0], [], [[[1]]], [[1, 2], [3]]])
def test_what_is_no_text_is_refused(tokens):
    for function in (mg.logit_lens, mg.lens_table):
        with pytest.raises(mg.InputError, match="tokens"):
            function(params_of(LAYERNORM), tokens, LAYERNORM)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"vocab_limit": 0}, "vocab_limit is 0"),
        ({"vocab_limit": -1}, "vocab_limit is -1"),
        ({"vocab_limit": 12}, "vocab_limit is 12"),
        ({"targets": [1, 2, 3]}, r"\(3,\)"),
        ({"targets": [[1, 2, 3, 4]]}, r"\(1, 4\)"),
        ({"targets": [1, 2, 3, 11]}, r"targets\[3\] is 11"),
        ({"targets": [1.0, 2.0, 3.0, 4.0]}, "targets of type float"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, says):
    with pytest.raises(mg.InputError, match=says):
        mg.lens_table(params_of(LAYERNORM), TOKENS[0], LAYERNORM, **options)


def test_a_text_longer_than_the_learned_positions_is_refused():
    config = CONFIGS["learned positions"]
    for function in (mg.logit_lens, mg.lens_table):
        with pytest.raises(mg.InputError, match="context_len is 8"):
            function(params_of(config), np.zeros(9, int), config)


def test_the_lens_leaves_the_params_as_they_are():
    """TransformerLens#671: a tool that folds and centres needs a second table. NumPy arrays can be written to."""
    params = jax.tree.map(np.array, params_of(LAYERNORM))
    mg.logit_lens(params, TOKENS, LAYERNORM)
    mg.lens_table(params, TOKENS, LAYERNORM)
    jax.tree.map(np.testing.assert_array_equal, params, params_of(LAYERNORM))


def test_a_table_s_targets_can_be_given_back():
    table = mg.lens_table(params_of(LAYERNORM), TOKENS, LAYERNORM)
    again = mg.lens_table(params_of(LAYERNORM), TOKENS, LAYERNORM, targets=table.targets)
    np.testing.assert_array_equal(table.rank_target, again.rank_target)
    with pytest.raises(mg.InputError, match="is -2"):
        mg.lens_table(params_of(LAYERNORM), TOKENS, LAYERNORM, targets=np.full_like(TOKENS, -2))
