"""The tuned lens: probes by hand, probes that are trained, probes on disk."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
from models import float64, noisy_params

import minigpt_jax as mg
from minigpt_jax.inspect.tuned import fingerprint

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = mg.ModelConfig(vocab_size=11, d_model=6, n_layers=2, n_heads=1, d_ff=5, context_len=8)
LAYERS = ("embed", "block_0/ffn", "block_1/ffn")
INSIDE = ("embed", "block_0/attention", "block_0/ffn", "block_1/attention", "block_1/ffn")
TOKENS = np.random.default_rng(3).integers(0, 11, (3, 4)).astype(np.int32)


def params_of(config):
    """Noise on every leaf, so that no scale is 1 and no bias 0."""
    return noisy_params(config, 0.5, 0.5)


def noisy_probes(config, inside=False):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), mg.init_probes(config, inside))


class Texts:
    """Any tokens, as a function of (seed, step)."""

    def __init__(self, config, mask=None):
        self.config, self.mask = config, mask

    def batch(self, seed, step, batch_size):
        tokens = np.random.default_rng((seed, step)).integers(0, self.config.vocab_size, (batch_size, 4))
        return mg.Batch(tokens, tokens, self.mask)


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def log_probs_by_numpy(params, tokens_BxT, config, points, probes=None):
    """(R, B, T, V): log p of the oracle's stream through x + x A + b, for all points but the last."""
    params, probes = oracle.to_float64(params), None if probes is None else oracle.to_float64(probes)
    stream, rows = oracle.residuals(params, tokens_BxT, config), []
    for r, name in enumerate(points):
        x = stream[name]
        if probes is not None and r < len(points) - 1:
            x = x + np.einsum("btd,de->bte", x, probes["kernel"][r]) + probes["bias"][r]
        rows.append(oracle.norm(x, params["norm_final"], config) @ oracle.head_table(params, config).T)
    return log_softmax(np.stack(rows))


def kl_by_numpy(log_RxBxTxV):
    """(R, B, T): KL(final || row) in bits."""
    return (np.exp(log_RxBxTxV[-1]) * (log_RxBxTxV[-1] - log_RxBxTxV)).sum(axis=-1) / np.log(2)


# By hand.


@pytest.mark.parametrize("inside", [False, True])
def test_fresh_probes_change_nothing(inside):
    probes = mg.init_probes(TINY, inside)
    R = len(INSIDE if inside else LAYERS)
    assert {name: x.shape for name, x in probes.items()} == {"kernel": (R - 1, 6, 6), "bias": (R - 1, 6)}
    plain = mg.logit_lens(params_of(TINY), TOKENS, TINY, inside=inside)
    tuned = mg.logit_lens(params_of(TINY), TOKENS, TINY, inside=inside, probes=probes)
    np.testing.assert_array_equal(tuned[-1], plain[-1])
    np.testing.assert_allclose(tuned, plain, rtol=1e-6, atol=1e-6)  # float32; x + 0 + 0 may be fused


@pytest.mark.parametrize("inside", [False, True])
def test_a_probe_is_x_plus_x_a_plus_b_before_the_final_norm(inside, x64):
    config, points = float64(TINY), INSIDE if inside else LAYERS
    params, probes = params_of(config), noisy_probes(config, inside)
    rows = mg.logit_lens(params, TOKENS, config, inside=inside, probes=probes)
    expected = log_probs_by_numpy(params, TOKENS, config, points, probes)
    np.testing.assert_allclose(log_softmax(np.asarray(rows)), expected, rtol=1e-11, atol=1e-11)  # float64
    np.testing.assert_array_equal(rows[-1], mg.forward(params, TOKENS, config))
    table = mg.lens_table(params, TOKENS, config, inside=inside, probes=probes)
    np.testing.assert_allclose(table.kl, kl_by_numpy(expected), rtol=1e-11, atol=1e-11)
    np.testing.assert_array_equal(table.top_ids[..., 0], expected.argmax(axis=-1))


@pytest.mark.parametrize(
    "shapes",
    [
        {"kernel": (4, 6, 6), "bias": (4, 6)},
        {"kernel": (2, 4, 4), "bias": (2, 4)},
        {"kernel": (2, 6, 6), "bias": (2, 4)},
        {"kernel": (1, 6, 6), "bias": (2, 6)},
        {"bias": (2, 6)},
        {"kernel": (2, 6, 6)},
    ],
    ids=["inside", "narrower", "bias narrower", "kernel of fewer points", "no kernel", "no bias"],
)
def test_probes_of_another_shape_are_refused(shapes):
    probes = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for function in (mg.logit_lens, mg.lens_table):
        with pytest.raises(mg.InputError, match="probes"):
            function(params_of(TINY), TOKENS, TINY, probes=probes)


# Trained.

STEPS = 120


@functools.cache
def trained():
    source = Texts(TINY)
    return list(mg.train_probes(params_of(TINY), source, TINY, steps=STEPS, batch_size=5, peak_lr=3e-2, seed=7))


def test_the_first_kl_is_that_of_the_first_batch_before_any_step():
    tokens = Texts(TINY).batch(7, 0, 5).tokens
    expected = kl_by_numpy(log_probs_by_numpy(params_of(TINY), tokens, TINY, LAYERS)).mean(axis=(1, 2))
    # float32: logits of about 5 to 2e-5.
    np.testing.assert_allclose(trained()[0].kl, expected[:-1], rtol=1e-4)


def test_the_second_kl_is_that_of_the_probes_after_one_step():
    tokens = Texts(TINY).batch(7, 1, 5).tokens
    log = log_probs_by_numpy(params_of(TINY), tokens, TINY, LAYERS, trained()[0].probes)
    np.testing.assert_allclose(trained()[1].kl, kl_by_numpy(log).mean(axis=(1, 2))[:-1], rtol=1e-4)
    assert [progress.step for progress in trained()] == list(range(1, STEPS + 1))


def test_adam_moves_every_entry_by_the_rate_at_first_and_by_next_to_nothing_at_the_end():
    first, before, last = trained()[0].probes, trained()[-2].probes, trained()[-1].probes
    for name in ("kernel", "bias"):
        # Adam's first step is the gradient's sign, but for its epsilon, 1e-8, next to gradients of about 1e-3.
        np.testing.assert_allclose(np.abs(first[name]), 3e-2, rtol=1e-3)
        assert np.abs(last[name] - before[name]).max() < 1e-4


def test_the_kl_of_every_layer_falls():
    """On texts that were not trained on; which ones doesn't matter, since every token is equally likely in each."""
    tokens = Texts(TINY).batch(99, 0, 20).tokens
    before = kl_by_numpy(log_probs_by_numpy(params_of(TINY), tokens, TINY, LAYERS)).mean(axis=(1, 2))[:-1]
    after = kl_by_numpy(log_probs_by_numpy(params_of(TINY), tokens, TINY, LAYERS, trained()[-1].probes))
    assert (after.mean(axis=(1, 2))[:-1] < 0.5 * before).all(), (before, after.mean(axis=(1, 2)))
    rows = mg.logit_lens(params_of(TINY), TOKENS, TINY, probes=trained()[-1].probes)
    np.testing.assert_array_equal(rows[-1], mg.forward(params_of(TINY), TOKENS, TINY))


def test_training_follows_the_seed_and_leaves_the_params_as_they_are():
    """TransformerLens#671. The params are NumPy arrays here, which could be written to."""
    params = jax.tree.map(np.array, params_of(TINY))
    options = {"steps": STEPS, "batch_size": 5, "peak_lr": 3e-2}
    again = list(itertools.islice(mg.train_probes(params, Texts(TINY), TINY, seed=7, **options), 3))
    for a, b in zip(again, trained(), strict=False):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(np.testing.assert_array_equal, params, params_of(TINY))
    other = next(mg.train_probes(params, Texts(TINY), TINY, seed=8, **options))
    assert np.any(other.kl != again[0].kl) and np.any(other.probes["kernel"] != again[0].probes["kernel"])


def linear_block():
    """A model whose only block adds x M, M fixed: attention writes nothing, GELU is the identity far above zero, and
    the norm only divides by sqrt(1 + epsilon), since every row of E has a mean square of 1. Returns also M."""
    config = mg.ModelConfig(vocab_size=7, d_model=4, n_layers=1, n_heads=1, d_ff=5, context_len=8, norm="rmsnorm")
    params, rng = dict(params_of(config)), np.random.default_rng(4)
    E = rng.normal(size=(7, 4))
    up, down = rng.normal(size=(4, 5)) * 0.3, rng.normal(size=(5, 4))
    block = params["block_0"]
    silent = jax.tree.map(jnp.zeros_like, block["attention"])
    ffn = {
        "up": {"kernel": jnp.asarray(up, jnp.float32), "bias": jnp.full(5, 12.0)},
        "down": {"kernel": jnp.asarray(down, jnp.float32), "bias": jnp.asarray(-12.0 * down.sum(axis=0), jnp.float32)},
    }
    params["embed"] = {"embedding": jnp.asarray(E / np.sqrt((E**2).mean(axis=1, keepdims=True)), jnp.float32)}
    params["block_0"] = block | {"attention": silent, "ffn": ffn}
    scale = np.asarray(block["norm_ffn"]["scale"], np.float64)
    return config, params, scale[:, None] * up @ down / np.sqrt(1 + config.norm_eps)


def test_where_the_rest_of_the_model_is_linear_the_probe_is_that_map():
    config, params, M = linear_block()
    probes = {"kernel": jnp.asarray(M[None], jnp.float32), "bias": jnp.zeros((1, 4))}
    plain, tuned = (mg.logit_lens(params, TOKENS % 7, config, probes=p) for p in (None, probes))
    # float32: twelves are added and taken off again, which costs a digit.
    np.testing.assert_allclose(tuned[0], tuned[1], atol=1e-4)
    assert np.abs(plain[0] - plain[1]).max() > 1
    progress = list(mg.train_probes(params, Texts(config), config, steps=300, batch_size=5, peak_lr=3e-2))
    assert progress[0].kl[0] > 0.5 and progress[-1].kl[0] < 0.01 * progress[0].kl[0]


def test_padding_does_not_count():
    """As everywhere here: the mean is over the positions that predict something, wherever the batch has a mask."""
    mask = np.array([[True, True, False, False], [True, True, True, True], [True, False, False, False]])
    progress = next(mg.train_probes(params_of(TINY), Texts(TINY, mask), TINY, steps=1, batch_size=3))
    log = log_probs_by_numpy(params_of(TINY), Texts(TINY).batch(0, 0, 3).tokens, TINY, LAYERS)
    np.testing.assert_allclose(progress.kl, kl_by_numpy(log)[:-1, mask].mean(axis=1), rtol=1e-4)  # float32


def test_a_bfloat16_model_trains_float32_probes():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    options = {"steps": 2, "batch_size": 5, "seed": 7, "inside": True}
    first, second = mg.train_probes(params_of(TINY), Texts(TINY), config, **options)
    log = log_probs_by_numpy(params_of(TINY), Texts(TINY).batch(7, 0, 5).tokens, TINY, INSIDE)
    # bfloat16 keeps 8 bits, and the KL is of logits of about 5.
    np.testing.assert_allclose(first.kl, kl_by_numpy(log).mean(axis=(1, 2))[:-1], rtol=0.1)
    assert np.isfinite(second.kl).all() and {x.dtype for x in second.probes.values()} == {np.dtype("float32")}
    assert np.any(second.probes["kernel"] != 0)
    rows = mg.logit_lens(params_of(TINY), TOKENS, config, inside=True, probes=second.probes)
    assert rows.dtype == jnp.float32


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(steps):
    with pytest.raises(mg.InputError, match=f"steps is {steps}"):
        next(mg.train_probes(params_of(TINY), Texts(TINY), TINY, steps=steps))


# On disk.


def test_probes_and_their_model_come_back_bit_for_bit(tmp_path):
    probes = noisy_probes(TINY)
    mg.save_probes(probes, tmp_path / "new" / "probes.safetensors", params_of(TINY))
    for path in (tmp_path / "new" / "probes.safetensors", str(tmp_path / "new" / "probes.safetensors")):
        loaded, model = mg.load_probes(path)
        assert model == fingerprint(params_of(TINY))
        assert {name: x.dtype for name, x in loaded.items()} == dict.fromkeys(probes, jnp.float32)
        jax.tree.map(np.testing.assert_array_equal, loaded, probes)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["probes.safetensors"]


KERNEL, BIAS = np.zeros((2, 6, 6), np.float32), np.zeros((2, 6), np.float32)
GOOD = safetensors.numpy.save({"kernel": KERNEL, "bias": BIAS}, metadata={"params_sha256": "5"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"To be, or not to be:\nthat is the question.\n",
        GOOD[:-7],
        b"\xff" * 8 + GOOD[8:],
        safetensors.numpy.save({"kernel": KERNEL, "bias": BIAS}),
        safetensors.numpy.save({"kernel": KERNEL, "bias": BIAS}, metadata={"made by": "someone"}),
        safetensors.numpy.save({"kernel": KERNEL, "bias": BIAS}, metadata={"step": "5"}),
        safetensors.numpy.save({"bias": BIAS}, metadata={"params_sha256": "5"}),
        safetensors.numpy.save({"kernel": KERNEL}, metadata={"params_sha256": "5"}),
        safetensors.numpy.save({"embed/embedding": BIAS}, metadata={"params_sha256": "5"}),
    ],
    ids=["empty", "text", "cut", "header", "no metadata", "no model", "only a step", "no kernel", "no bias", "a model"],
)
def test_a_file_that_holds_no_probes_is_refused_in_one_line(data, tmp_path):
    (tmp_path / "probes.safetensors").write_bytes(data)
    with pytest.raises(mg.InputError, match=r"probes\.safetensors holds no probes of a tuned lens") as error:
        mg.load_probes(tmp_path / "probes.safetensors")
    assert "\n" not in str(error.value) and error.value.__suppress_context__


def test_a_missing_file_and_a_folder_are_refused_in_one_line(tmp_path):
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(mg.InputError, match="holds no probes") as error:
            mg.load_probes(path)
        assert "\n" not in str(error.value)
    with pytest.raises(mg.InputError, match="is a folder"):
        mg.save_probes(noisy_probes(TINY), tmp_path, params_of(TINY))


def test_a_fingerprint_is_of_every_value_and_its_place():
    """Probes matched by the step alone were read with another model of as many steps, without a word."""
    params = params_of(TINY)
    other = jax.tree.map(lambda x: x, params)
    other["norm_final"]["scale"] = np.asarray(params["norm_final"]["scale"]).copy()
    assert fingerprint(other) == fingerprint(params)
    other["norm_final"]["scale"][-1] += 1e-6
    assert fingerprint(other) != fingerprint(params)
    swapped = {**params, "block_0": params["block_1"], "block_1": params["block_0"]}
    assert fingerprint(swapped) != fingerprint(params)


def test_spare_rows_have_no_say_in_the_probes():
    """The same KL as the lens shows: without the rows that stand for no token."""
    limit = TINY.vocab_size - 2
    tokens = Texts(TINY).batch(0, 0, 3).tokens % limit
    source = type("Source", (), {"batch": lambda self, seed, step, n: mg.Batch(tokens, tokens, None)})()
    progress = next(mg.train_probes(params_of(TINY), source, TINY, steps=1, batch_size=3, vocab_limit=limit))
    shown = np.asarray(mg.lens_table(params_of(TINY), tokens, TINY, vocab_limit=limit).kl).mean(axis=(1, 2))
    np.testing.assert_allclose(progress.kl, shown[:-1], rtol=1e-4)  # float32 sums over the positions in another order
    every = next(mg.train_probes(params_of(TINY), source, TINY, steps=1, batch_size=3))
    assert np.abs(every.kl - progress.kl).min() > 1e-3 * progress.kl.min()
