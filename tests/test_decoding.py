"""Filters as pure functions of the logits, and cached generation against whole forwards and a NumPy model."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import minigpt_jax as mg
from minigpt_jax import decoding
from minigpt_jax.decoding import generate
from minigpt_jax.errors import InputError, InputTypeError
from minigpt_jax.functional import abstract_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = mg.Sampling(temperature=0)

# Generation. A tied model that was not trained repeats itself, and such a text shows little. So the blocks are strong
# here and the table weak: what comes next depends on all that came before.

BASE = mg.ModelConfig(vocab_size=23, d_model=16, n_layers=1, n_heads=4, d_ff=24, context_len=32)


def random_params(config, seed=4):
    random = np.random.default_rng(seed)

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        noise = random.normal(size=x.shape)
        if name.endswith(("embedding", "embedding_out")):  # no token is likelier than another by its length
            return (noise / np.linalg.norm(noise, axis=-1, keepdims=True)).astype(x.dtype)
        mean, std = (0.0, 1.0) if name.endswith(("kernel", "table")) else (float(name.endswith("scale")), 0.1)
        return (mean + std * noise).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))


def check_greedy(new, logits_BxTxV, length):
    """Each new id is the most likely one after all before it. One forward over the whole text shows that, since what
    comes later can't change it; it is what a loop of growing forwards would have chosen, step by step."""
    picked = logits_BxTxV[:, length - 1 : -1]
    best = np.sort(picked, axis=-1)
    clear = best[..., -1] - best[..., -2] > 1e-4  # closer ones float32 may order either way
    assert clear.mean() > 0.98
    np.testing.assert_array_equal(new[clear], picked.argmax(axis=-1)[clear])
    assert min(len(set(row)) for row in new.tolist()) > 2  # a text of one token would show little


KINDS = {
    "rope": {},
    "rope_half": {"rope_pairs": "half"},
    "learned": {"positions": "learned", "context_len": 80},
    "none": {"positions": "none"},
    "two_kv_heads": {"n_kv_heads": 2, "attention_bias": True, "ffn": "gelu_tanh"},
    "like_llama": {
        "n_layers": 2,
        "n_kv_heads": 1,
        "norm": "rmsnorm",
        "ffn": "swiglu",
        "ffn_bias": False,
        "tied": False,
    },
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_cached_generation_is_that_of_whole_forwards(options):
    """Length 80 in a batch of two: with RoPE far beyond context_len, and past where an off-by-one position shows."""
    config = dataclasses.replace(BASE, **options)
    params = random_params(config)
    prompt = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)
    new = generate(params, prompt, config, key=jax.random.key(0), max_new_tokens=75, sampling=GREEDY)
    assert new.shape == (2, 75) and new.dtype == np.int32
    whole = np.concatenate([prompt, new], axis=1)
    check_greedy(new, np.asarray(mg.forward(params, whole, config)), 5)


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17])
def test_cached_generation_near_the_bucket_s_border(length):
    """Prompts are padded to 16 or 32: nothing may depend on the padding. Against the NumPy model."""
    prompt = np.random.default_rng(length).integers(0, 23, (2, length))
    params = random_params(BASE)
    new = generate(params, prompt, BASE, key=jax.random.key(0), max_new_tokens=40 - length, sampling=GREEDY)
    assert new.shape == (2, 40 - length)
    whole = np.concatenate([prompt, new], axis=1)
    check_greedy(new, oracle.forward(oracle.to_float64(params), whole, BASE), length)


@pytest.mark.parametrize("window", [3, 5, 8, 20])
@pytest.mark.parametrize("options", [{}, {"n_layers": 2, "n_kv_heads": 2}], ids=["one_layer", "two_layers"])
def test_window_is_a_band_in_the_mask(window, options, monkeypatch):
    """Against the NumPy model with its mask cut to a band: a query sees its own position and window - 1 before."""
    config = dataclasses.replace(BASE, **options)
    params = random_params(config)
    prompt = np.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])
    new = generate(params, prompt, config, key=jax.random.key(0), max_new_tokens=34, sampling=GREEDY, window=window)
    causal = oracle.visible_keys
    monkeypatch.setattr(oracle, "visible_keys", lambda mask: causal(mask) & ~np.tri(len(mask), k=-window, dtype=bool))
    whole = np.concatenate([prompt, new], axis=1)
    check_greedy(new, oracle.forward(oracle.to_float64(params), whole, config), 6)


def test_a_window_as_long_as_the_text_changes_nothing():
    params, prompt = random_params(BASE), np.array([[3, 1, 4], [1, 5, 9]])
    options = dict(key=jax.random.key(0), max_new_tokens=37, sampling=GREEDY)
    free = generate(params, prompt, BASE, **options)
    for window in (40, 41, 10**6):
        np.testing.assert_array_equal(generate(params, prompt, BASE, window=window, **options), free)
    assert (generate(params, prompt, BASE, window=2, **options) != free).any()


def test_batch_rows_are_those_of_single_prompts():
    params, prompts = random_params(BASE), np.array([[3, 1, 4], [1, 5, 9]])
    options = dict(key=jax.random.key(0), max_new_tokens=37, sampling=GREEDY)
    together = generate(params, prompts, BASE, **options)
    for row, prompt in zip(together, prompts, strict=True):
        np.testing.assert_array_equal(generate(params, prompt, BASE, **options), row)


# Shapes of what comes back

SMALL = mg.ModelConfig(vocab_size=7, d_model=8, n_layers=1, n_heads=2, d_ff=8, context_len=8)
LEARNED = dataclasses.replace(SMALL, positions="learned")


def test_new_ids_only():
    params, key = random_params(SMALL), jax.random.key(0)
    for prompt, shape in (
        ([1], (4,)),
        ((1, 2), (4,)),
        (np.array([[1, 2, 3]]), (1, 4)),
        (jnp.array([[1], [2]]), (2, 4)),
    ):
        new = generate(params, prompt, SMALL, key=key, max_new_tokens=4)
        assert isinstance(new, np.ndarray) and new.shape == shape and new.dtype == np.int32
        assert ((new >= 0) & (new < 7)).all()


def test_lower_precision_caches():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    new = generate(random_params(config), [1, 2], config, key=jax.random.key(0), max_new_tokens=5)
    assert new.shape == (5,) and decoding.empty_cache(config, 1, 16)["block_0"]["key"].dtype == jnp.bfloat16


def test_no_new_tokens():
    params, key = random_params(SMALL), jax.random.key(0)
    assert generate(params, [1, 2], SMALL, key=key, max_new_tokens=0).shape == (0,)
    assert generate(params, [[1, 2], [3, 4]], SMALL, key=key, max_new_tokens=0).shape == (2, 0)


def test_a_vocabulary_of_one():
    config = dataclasses.replace(SMALL, vocab_size=1)
    new = generate(random_params(config), [0], config, key=jax.random.key(0), max_new_tokens=5)
    assert new.tolist() == [0] * 5


@pytest.mark.parametrize("length", [1, 7, 8])
def test_learned_positions_up_to_the_last(length):
    params, prompt = random_params(LEARNED), np.arange(length) % 7
    new = generate(params, prompt, LEARNED, key=jax.random.key(0), max_new_tokens=8 - length, sampling=GREEDY)
    assert new.shape == (8 - length,)
    logits = np.asarray(mg.forward(params, np.concatenate([prompt, new]), LEARNED))
    np.testing.assert_array_equal(new, logits[length - 1 : -1].argmax(axis=-1)[: 8 - length])


@pytest.mark.parametrize(("length", "n"), [(7, 2), (8, 1), (9, 0), (9, 5), (100, 1)])
def test_learned_positions_past_the_last_are_refused(length, n):
    with pytest.raises(InputError, match=f"{length + n} positions.*context_len is 8"):
        generate(random_params(LEARNED), np.zeros(length, int), LEARNED, key=jax.random.key(0), max_new_tokens=n)


# Keys


def test_same_key_same_ids():
    params, prompt = random_params(SMALL), [[1, 2, 3]] * 4

    def ids(seed):
        return generate(params, prompt, SMALL, key=jax.random.key(seed), max_new_tokens=13)

    first = ids(0)
    np.testing.assert_array_equal(ids(0), first)
    assert (ids(1) != first).any()
    assert len({tuple(row) for row in first.tolist()}) == 4  # the same prompt in each row, another continuation


def test_draws_do_not_depend_on_how_many_are_asked_for():
    params, key = random_params(SMALL), jax.random.key(0)
    long = generate(params, [1, 2], SMALL, key=key, max_new_tokens=14)
    np.testing.assert_array_equal(generate(params, [1, 2], SMALL, key=key, max_new_tokens=5), long[:5])
    # and in another bucket
    np.testing.assert_array_equal(generate(params, [1, 2], SMALL, key=key, max_new_tokens=30)[:14], long)


def test_positions_draw_with_keys_of_their_own():
    """A flat distribution over 7 tokens: one key used at every position would repeat one draw."""
    params = jax.tree.map(jnp.zeros_like, random_params(SMALL))
    new = generate(params, [1], SMALL, key=jax.random.key(0), max_new_tokens=60)
    assert len(set(new.tolist())) == 7


def test_old_and_new_style_keys():
    params = random_params(SMALL)
    new = [
        generate(params, [1], SMALL, key=key, max_new_tokens=8) for key in (jax.random.key(5), jax.random.PRNGKey(5))
    ]
    np.testing.assert_array_equal(*new)


# Statistics


def fixed_distribution(probabilities):
    """Parameters whose next-token distribution is the same after every text: the final norm gives a constant."""
    V = len(probabilities)
    config = dataclasses.replace(SMALL, vocab_size=V)
    params = mg.init(config, jax.random.key(0))
    params["norm_final"] = {"scale": jnp.zeros(8), "bias": jnp.zeros(8).at[0].set(1.0)}
    params["embed"] = {"embedding": jnp.zeros((V, 8)).at[:, 0].set(jnp.log(jnp.asarray(probabilities)))}
    return params, config


HALF_AND_LESS = [0.50, 0.20, 0.15, 0.10, 0.05]
MANY = np.zeros((250, 1), int)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (mg.Sampling(), [0.50, 0.20, 0.15, 0.10, 0.05]),
        (mg.Sampling(top_p=0.8), [50 / 85, 20 / 85, 15 / 85, 0, 0]),
        (mg.Sampling(temperature=0.5, top_k=3, top_p=0.9), [25 / 29, 4 / 29, 0, 0, 0]),
    ],
    ids=repr,
)
def test_frequencies_are_the_distribution_s(sampling, expected):
    params, config = fixed_distribution(HALF_AND_LESS)
    n = 250 * 40
    new = generate(params, MANY, config, key=jax.random.key(1), max_new_tokens=40, sampling=sampling)
    frequencies, expected = np.bincount(new.ravel(), minlength=5) / n, np.asarray(expected)
    # Five standard deviations of a count; exact where the probability is 0 or 1.
    assert (np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / n) + 1e-12).all()


@pytest.mark.parametrize("sampling", [mg.Sampling(5.0), mg.Sampling(5.0, 100, 1.0), GREEDY], ids=repr)
def test_rows_without_a_token_are_never_drawn(sampling):
    """V = 65 padded to 128, and the padding far more likely than the rest: 10,000 ids, all below 65."""
    params, config = fixed_distribution([1e-6] * 65 + [1.0] * 63)
    new = generate(params, MANY, config, key=jax.random.key(0), max_new_tokens=40, sampling=sampling, vocab_limit=65)
    assert new.size == 10_000 and new.max() < 65
    assert len(np.unique(new)) == (1 if sampling == GREEDY else 65)


def test_without_a_limit_every_row_is_a_token():
    params, config = fixed_distribution([1e-6] * 65 + [1.0] * 63)
    new = generate(params, MANY, config, key=jax.random.key(0), max_new_tokens=40, sampling=mg.Sampling(5.0))
    assert new.max() == 127


# Stopping


def test_stop_token_ends_rows_and_fills_them():
    params, config = fixed_distribution(HALF_AND_LESS)
    options = dict(key=jax.random.key(4), max_new_tokens=40)
    free = generate(params, MANY, config, **options)
    new = generate(params, MANY, config, stop_token=0, **options)
    ends = []
    for row, unstopped in zip(new.tolist(), free.tolist(), strict=True):
        end = row.index(0)
        ends.append(end)
        assert row[: end + 1] == unstopped[: end + 1]  # same draws up to there
        assert row[end:] == [0] * (len(row) - end)
    assert len(set(ends)) > 3 and new.shape[1] == max(ends) + 1 < 40  # over with the last row


def test_stop_token_in_the_prompt_does_not_stop():
    params, config = fixed_distribution(HALF_AND_LESS)
    new = generate(params, [0, 0], config, key=jax.random.key(4), max_new_tokens=5, stop_token=0, vocab_limit=1)
    assert new.tolist() == [0]
    assert (
        generate(params, [0, 4], config, key=jax.random.key(4), max_new_tokens=5, stop_token=4, vocab_limit=4).size == 5
    )


# What is refused


def programs():
    """Compiled programs of generation."""
    return decoding._prefill._cache_size() + decoding._decode._cache_size()


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ([], InputError, ""),
        (np.zeros(0, int), InputError, "at least one token"),
        (np.zeros((0, 3), int), InputError, "at least one token"),
        (np.zeros((3, 0), int), InputError, "at least one token"),
        (3, InputError, "shape ()"),
        ([[[1]]], InputError, "shape (1, 1, 1)"),
        ([[1], []], InputError, "prompt[1] has shape (0,)"),
        ([[1], [2, 7]], InputError, "prompt[1][1] is 7"),
        ([[1], [[2, 3]]], InputError, "prompt[1] has shape (1, 2)"),
        ([1.0], InputTypeError, "float"),
        ([True], InputTypeError, "bool"),
        (np.float32([1, 2]), InputTypeError, "float32"),
        ("abc", InputTypeError, ""),
        (None, InputTypeError, ""),
        ([7], InputError, "prompt[0] is 7; ids must be in [0, 7)"),
        ([-1], InputError, "prompt[0] is -1; ids must be in [0, 7)"),
        ([[0, 6], [1, 99]], InputError, "prompt[1, 1] is 99"),
        (np.array([2**40]), InputError, "is 1099511627776"),  # 0 in 32 bits
        (np.array([2**32 + 1]), InputError, "is 4294967297"),
    ],
    ids=repr,
)
def test_prompts_that_are_refused(prompt, kind, words):
    before = programs()
    with pytest.raises(kind) as caught:
        generate({}, prompt, SMALL, key=jax.random.key(0), max_new_tokens=3)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert programs() == before  # before anything is compiled


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint32])
def test_prompts_of_every_integer_type(dtype):
    params = random_params(SMALL)
    new = generate(params, np.array([0, 6], dtype), SMALL, key=jax.random.key(0), max_new_tokens=3)
    np.testing.assert_array_equal(new, generate(params, [0, 6], SMALL, key=jax.random.key(0), max_new_tokens=3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"window": 0}, "window is 0"),
        ({"window": -5}, "window is -5"),
        ({"vocab_limit": 0}, "vocab_limit is 0"),
        ({"vocab_limit": -3}, "vocab_limit is -3"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        generate({}, [1], SMALL, **{"key": jax.random.key(0), "max_new_tokens": 3} | options)


# Compilations


@contextlib.contextmanager
def compilations():
    """A list that gets an entry for each program XLA is asked for."""
    names = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_two_programs_and_none_the_second_time():
    config = dataclasses.replace(BASE, vocab_size=29)  # of no other test, so nothing is compiled yet
    params, key = random_params(config), jax.random.key(0)
    cached = programs()
    with compilations() as count:
        generate(params, [1, 2, 3], config, key=key, max_new_tokens=32)
    assert 2 <= len(count) <= 3
    with compilations() as count:
        for prompt, n in (([5], 40), (list(range(16)), 20), ([1] * 9, 55)):  # within the buckets 16 and 64
            generate(params, prompt, config, key=key, max_new_tokens=n, window=n, vocab_limit=n, stop_token=n)
        generate(params, [1, 2, 3], config, key=jax.random.key(9), max_new_tokens=33)
    assert count == []
    assert programs() - cached == 2


def test_compilations_are_seen_by_the_counter():
    with compilations() as count:
        jax.jit(lambda x: x * 3.25 + 17)(np.float32(1))
    assert len(count) == 1


@pytest.mark.parametrize(("n", "size"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1000, 1024), (1025, 2048)])
def test_buckets(n, size):
    assert decoding._bucket(n) == size
