"""What the public functions refuse, and what they do where nothing can be refused: inside someone's jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minigpt_jax as mg

CONFIG = mg.ModelConfig(vocab_size=7, d_model=8, n_layers=2, n_heads=2, context_len=4)
PARAMS = mg.init(CONFIG, jax.random.key(0))


def refused(call, *parts):
    with pytest.raises(mg.InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return caught.value


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"n_layers": 1}, "block_1/attention/key/kernel is unknown"),
        ({"n_layers": 3}, "block_2/attention/key/kernel is missing"),
        ({"d_model": 16}, "block_0/attention/key/kernel is float32[8, 8] in the params, float32[16, 16] by the config"),
        ({"tied": False}, "head/embedding_out is missing"),
    ],
)
def test_params_of_another_config_are_refused(change, part):
    """Fewer layers would run, on half the model; an unused head would be ignored."""
    other = dataclasses.replace(CONFIG, **change)
    refused(lambda: mg.forward(PARAMS, [1, 2], other), "do not fit the config", part)


def test_an_untied_head_is_not_ignored_by_a_tied_config():
    untied = mg.init(dataclasses.replace(CONFIG, tied=False), jax.random.key(0))
    refused(lambda: mg.unembed(untied, jnp.zeros((3, 8)), CONFIG), "head/embedding_out is unknown")


def test_a_cast_copy_fits():
    """Other dtypes are fine: a bfloat16 copy of float32 parameters is the same model."""
    cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    assert mg.forward(cast, [1, 2], CONFIG).dtype == jnp.float32


@pytest.mark.parametrize("seam", [mg.trunk, mg.unembed])
@pytest.mark.parametrize("shape", [(3, 9), (8,), (1, 2, 3, 8)])
def test_a_stream_of_another_shape_is_refused(seam, shape):
    refused(lambda: seam(PARAMS, jnp.zeros(shape), CONFIG), str(shape), "D = d_model = 8")


@pytest.mark.parametrize("mask", [np.ones((1, 3), bool), np.ones(2, bool), [1, 1, 1], np.ones(3)])
def test_a_mask_of_another_shape_or_type_is_refused(mask):
    refused(lambda: mg.forward(PARAMS, [1, 2, 3], CONFIG, mask=mask), "mask")


@pytest.mark.parametrize("key", [None, -1, 0])
def test_a_seed_is_not_a_key(key):
    assert isinstance(refused(lambda: mg.init(CONFIG, key), "jax.random.key(0)"), mg.InputTypeError)


def test_float64_without_x64_is_refused():
    """JAX would train in float32, and the table of parameters would say 64."""
    config = dataclasses.replace(CONFIG, param_dtype="float64")
    refused(lambda: mg.init(config, jax.random.key(0)), "JAX_ENABLE_X64")
    refused(lambda: mg.param_table(config), "JAX_ENABLE_X64")
    with jax.enable_x64(True):
        assert mg.init(config, jax.random.key(0))["embed"]["embedding"].dtype == jnp.float64
    refused(lambda: mg.init(config, jax.random.key(0)), "JAX_ENABLE_X64")


@pytest.mark.parametrize("bad", [-100, -1, 7, 99])
def test_inside_jit_a_wrong_id_gives_nan(bad):
    """jax#3774, optax#1185: a wrapped or clamped id, or a target that no row stands for, gives a plausible loss."""
    good = jnp.array([[1, 2, 3]])
    wrong = good.at[0, 1].set(bad)
    loss = jax.jit(lambda tokens, targets, mask: mg.loss(PARAMS, mg.Batch(tokens, targets, mask), CONFIG))
    counted, left_out = jnp.ones((1, 3), bool), jnp.array([[True, False, True]])
    assert jnp.isfinite(loss(good, good, counted))
    assert jnp.isnan(loss(wrong, good, counted))
    assert jnp.isnan(loss(good, wrong, counted))
    assert jnp.isfinite(loss(good, wrong, left_out)), "a target that does not count may be anything"


def test_accumulation_needs_whole_micro_batches():
    """Six rows in four parts; and a single sequence, which would be cut along time."""
    config = mg.Config(model=CONFIG, train=mg.TrainConfig(batch_size=8, accumulate=4))
    state, step = mg.init_state(config), mg.make_train_step(config)
    for shape in ((6, 4), (8,)):
        ids = jnp.zeros(shape, jnp.int32)
        refused(lambda ids=ids: step(state, mg.Batch(ids, ids)), str(shape), "accumulate = 4")


def test_float16_parameters_are_not_trained():
    """AdamW's epsilon of 1e-8 is 0 there, and the first update NaN."""
    refused(lambda: mg.Config(model=dataclasses.replace(CONFIG, param_dtype="float16")), "float16")
