"""Cached generation against whole forwards, plain loops and a NumPy model; what it compiles, donates and refuses."""

import contextlib
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


# Greedy over 512 tokens, for every kind of position and norm, from prompts in three buckets.

NEW = 512
LENGTHS = (8, 80, 300)
LONG = mg.ModelConfig(vocab_size=257, d_model=32, n_layers=2, n_heads=4, d_ff=64, context_len=16)
LONG_KINDS = {
    "rope": {},
    "rope_half": {"rope_pairs": "half"},
    "learned": {"positions": "learned", "context_len": max(LENGTHS) + NEW},
    "none": {"positions": "none"},
}
LONG_KINDS |= {f"{name}_rmsnorm": options | {"norm": "rmsnorm"} for name, options in LONG_KINDS.items()}
LONG_KINDS |= {
    "two_kv_heads": {"n_kv_heads": 2, "attention_bias": True},
    "one_kv_head": {"n_kv_heads": 1, "norm": "rmsnorm", "ffn": "swiglu", "ffn_bias": False, "tied": False},
}


def wide_params(config):
    """Kernels wide enough for a text of many tokens, and a table whose rows are all as long, short enough for logits
    that float32 holds to 1e-6."""
    params = noisy_params(config, 0.2, seed=1)
    tables = {"embed": "embedding"} | ({} if config.tied else {"head": "embedding_out"})
    for name, leaf in tables.items():
        table = params[name][leaf]
        params = params | {name: {leaf: 0.3 * table / jnp.linalg.norm(table, axis=-1, keepdims=True)}}
    return params


@functools.partial(jax.jit, static_argnames=("config", "size"))
def cached_prefill(params, prompt_BxP, length, fixed, *, config, size):
    cache = decoding.empty_cache(config, len(prompt_BxP), size)
    return decoding._step(params, config, cache, prompt_BxP, 0, length - 1, fixed)


@functools.partial(jax.jit, static_argnames=("config",))
def cached_decode(params, cache, start, new_N, fixed, *, config):
    def one(cache, step):
        slot, token = step
        logits_1xV, cache = decoding._step(params, config, cache, token[None, None], slot, slot, fixed)
        return cache, logits_1xV[0]

    return jax.lax.scan(one, cache, (start + jnp.arange(len(new_N), dtype=jnp.int32), new_N))[1]


def cached_logits(params, text, length, config):
    """Logits after every token of the text from the prompt's last on, by one prefill and then a step for each."""
    size, bucket = decoding._bucket(len(text)), decoding._bucket(length)
    if config.positions == "learned":
        size = min(size, config.context_len)
    fixed = decoding._Fixed(None, jax.random.key(0), np.int32(2**30), np.int32(0), np.int32(-1), None)
    prompt = np.zeros((1, bucket), np.int32)
    prompt[0, :length] = text[:length]
    first, cache = cached_prefill(params, prompt, np.int32(length), fixed, config=config, size=size)
    rest = cached_decode(params, cache, np.int32(length), text[length:], fixed, config=config)
    return np.concatenate([first, rest])


def check_long(config, length, tolerance, every_logit=True):
    """One forward over the whole text is enough to compare with a loop of growing forwards: causality keeps what comes
    later out of each position's logits, and as long as all ids so far are equal, that loop would have read the same
    text. By induction, the ids are equal if each is the most likely one at its own position."""
    params = wide_params(config)
    prompt = np.random.default_rng(length).integers(0, config.vocab_size, length)
    options = dict(key=jax.random.key(0), max_new_tokens=NEW, sampling=GREEDY)
    new, logprobs = generate(params, prompt, config, return_logprobs=True, **options)
    text = np.concatenate([prompt, new]).astype(np.int32)
    padded = np.pad(text, (0, max(LENGTHS) + NEW - len(text)))  # one program for all lengths
    whole = np.asarray(mg.forward(params, padded, config))[length - 1 : len(text)]
    np.testing.assert_array_equal(new, whole[:-1].argmax(axis=-1))
    assert len(set(new.tolist())) >= 10
    expected = log_softmax(whole[:-1])[np.arange(NEW), new]
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=tolerance)
    if every_logit:
        np.testing.assert_allclose(cached_logits(params, text, length, config), whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["rope", "learned", "one_kv_head"])
def test_512_greedy_tokens_in_float32(kind):
    check_long(dataclasses.replace(LONG, **LONG_KINDS[kind]), LENGTHS[1], 1e-5, every_logit=False)


def test_512_greedy_tokens_in_float64(x64):
    check_long(float64(dataclasses.replace(LONG, **LONG_KINDS["two_kv_heads"])), LENGTHS[1], 1e-12)


# What changes keys, positions or the stream must be in the cache as it is in a whole forward.
CACHED_KINDS = {
    "wide_heads": {"d_head": 6, "n_kv_heads": 2},
    "rope_fraction": {"rope_fraction": 0.5, "rope_pairs": "half"},
    "rope_factor": {"rope_factor": 4.0},
    "rope_llama3": {"d_head": 8, "rope_base": 100.0, "rope_factor": 4.0, "rope_original_len": 32},
    "qk_norm": {"qk_norm": True},
    "norm_unit_offset": {"norm": "rmsnorm", "norm_unit_offset": True},
    "scale_embedding": {"scale_embedding": True, "positions": "learned"},
    "parallel_residual": {"parallel_residual": True, "out_bias": True},
}
CACHED_KINDS["everything"] = functools.reduce(dict.__or__, CACHED_KINDS.values()) | {"positions": "rope"}


@pytest.mark.parametrize("options", CACHED_KINDS.values(), ids=CACHED_KINDS)
def test_cached_logits_of_each_option_equal_the_numpy_model_s(options, x64):
    """A key cached before its norm or rotation, a position scaled in the prefill alone, a cache of another width."""
    config = float64(dataclasses.replace(BASE, vocab_size=7, d_ff=8, **options))
    params = random_params(config)
    text = np.random.default_rng(3).integers(0, 7, 11).astype(np.int32)
    expected = oracle.forward(oracle.to_float64(params), text[None], config)[0]
    np.testing.assert_allclose(cached_logits(params, text, 5, config), expected[4:], rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("options", LONG_KINDS.values(), ids=LONG_KINDS)
def test_512_greedy_tokens_of_every_kind_and_length(options):
    for length in LENGTHS:
        check_long(dataclasses.replace(LONG, **options), length, 1e-5)
    with jax.enable_x64(True):
        for length in LENGTHS:
            check_long(float64(dataclasses.replace(LONG, **options)), length, 1e-12)


# Prompts of different lengths: each row is that prompt alone

RAGGED_KINDS = {
    "rope": ({}, {}),
    "window": ({"n_layers": 2}, {"window": 5}),
    "learned": ({"positions": "learned", "context_len": 48}, {}),
    "none": ({"positions": "none", "norm": "rmsnorm", "n_kv_heads": 2}, {}),
    "penalty": ({"rope_pairs": "half"}, {"sampling": mg.Sampling(temperature=0, repetition_penalty=1.3)}),
}


@pytest.mark.parametrize(("options", "arguments"), RAGGED_KINDS.values(), ids=RAGGED_KINDS)
def test_rows_of_different_lengths_are_those_of_each_prompt_alone(options, arguments, x64):
    config = float64(dataclasses.replace(BASE, **options))
    params = random_params(config)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 23, length).tolist() for length in (5, 1, 16, 9)]
    arguments = dict(key=jax.random.key(0), max_new_tokens=32, return_logprobs=True, sampling=GREEDY) | arguments
    together = generate(params, prompts, config, **arguments)
    assert together.ids.shape == together.logprobs.shape == (4, 32)
    for row, logprobs, prompt in zip(*together, prompts, strict=True):
        alone = generate(params, prompt, config, **arguments)
        np.testing.assert_array_equal(row, alone.ids)
        np.testing.assert_allclose(logprobs, alone.logprobs, rtol=0, atol=1e-11)  # sums of another order
    assert len({tuple(row) for row in together.ids.tolist()}) == 4


# Log-probabilities


def log_softmax(logits):
    """In float64, by NumPy; -inf stays out."""
    logits = np.float64(logits) - np.max(logits, axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("limit", [None, 19])
def test_logprobs_are_the_model_s_own(limit):
    """Whatever is drawn from: before penalty, temperature and filters; over the rows that stand for tokens."""
    params, prompt = random_params(BASE), np.array([[3, 1, 4, 1], [5, 9, 2, 6]])
    sampling = mg.Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.3)
    options = dict(key=jax.random.key(2), max_new_tokens=25, sampling=sampling, vocab_limit=limit)
    new = generate(params, prompt, BASE, return_logprobs=True, **options)
    assert new.logprobs.dtype == np.float32
    np.testing.assert_array_equal(new.ids, generate(params, prompt, BASE, **options))
    logits = oracle.forward(oracle.to_float64(params), np.concatenate([prompt, new.ids], axis=1), BASE)[:, 3:-1]
    logits[..., 23 if limit is None else limit :] = -np.inf
    expected = np.take_along_axis(log_softmax(logits), new.ids[..., None], axis=-1)[..., 0]
    # Against NumPy in float64: logits of up to 4 behind kernels of standard deviation 1.
    np.testing.assert_allclose(new.logprobs, expected, rtol=0, atol=1e-4)


def test_logprobs_after_a_stop_are_0():
    params, config = fixed_distribution(HALF_AND_LESS)
    options = dict(key=jax.random.key(4), max_new_tokens=40, stop_token=0, return_logprobs=True)
    ids, logprobs = generate(params, MANY, config, **options)
    after = np.cumsum(ids == 0, axis=1) - (ids == 0) > 0
    assert after.any() and (logprobs[after] == 0).all()
    np.testing.assert_allclose(logprobs[~after], np.log(HALF_AND_LESS)[ids[~after]], rtol=1e-5)


# The repetition penalty


@pytest.mark.parametrize("prompts", [[[1]], [[4, 3]], [[1], [2, 3, 4]], [[0, 1], [3], [1, 1, 1]]], ids=str)
def test_the_penalty_is_on_what_the_text_holds_and_not_on_padding(prompts):
    """Id 0 is the most likely and the one that fills up short prompts."""
    params, config = fixed_distribution(HALF_AND_LESS)
    penalized = mg.Sampling(temperature=0, repetition_penalty=3.0)
    new = generate(params, prompts, config, key=jax.random.key(0), max_new_tokens=12, sampling=penalized)
    for row, prompt in zip(new.tolist(), prompts, strict=True):
        text = list(prompt)
        for _ in range(12):
            scores = [math.log(p) * (3.0 if i in text else 1.0) for i, p in enumerate(HALF_AND_LESS)]
            text.append(int(np.argmax(scores)))
        assert row == text[len(prompt) :]
    assert all(row[0] == 0 for row, prompt in zip(new.tolist(), prompts, strict=True) if 0 not in prompt)


# Sliding, for learned positions


def plain_loop(params, prompts, config, n, penalty=1.0):
    """Greedy, with no cache: the documented rule, token by token, and one forward over what each row still remembers.
    Returns ids and log-probabilities (B, n)."""
    texts, wall = [list(prompt) for prompt in prompts], config.context_len
    new = [([], []) for _ in prompts]
    for _ in range(n):
        if max(map(len, texts)) >= wall:
            texts = [text[-(wall // 2) :] for text in texts]  # flush right, so all lose the same places
        for text, (ids, logprobs) in zip(texts, new, strict=True):
            padded = np.pad(text, (0, wall - len(text)))
            logits = np.asarray(mg.forward(params, padded, config))[len(text) - 1]
            scores = logits.copy()
            for token in set(text):
                scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            ids.append(int(scores.argmax()))
            logprobs.append(log_softmax(logits)[ids[-1]])
            text.append(ids[-1])
    return tuple(np.array(x) for x in zip(*new, strict=True))


@pytest.mark.parametrize(
    ("prompts", "context_len", "penalty"),
    [
        ([[3, 1, 4]], 8, 1.0),
        ([[3, 1, 4, 1, 5, 9, 2]], 9, 1.0),
        ([[3, 1, 4, 1, 5, 9, 2, 6]], 8, 1.0),  # full
        ([list(range(20))], 8, 1.0),  # more than full
        ([[1], [2, 7, 1, 8, 2], list(range(11))], 12, 1.3),
        ([[1], list(range(20)), [3, 1, 4]], 9, 1.0),
        ([[5, 6]], 2, 1.0),
    ],
    ids=str,
)
def test_sliding_against_a_plain_loop(prompts, context_len, penalty, x64):
    config = float64(dataclasses.replace(BASE, positions="learned", context_len=context_len))
    params = random_params(config)
    sampling = mg.Sampling(temperature=0, repetition_penalty=penalty)
    options = dict(key=jax.random.key(0), max_new_tokens=30, sampling=sampling, slide=True, return_logprobs=True)
    new = generate(params, prompts, config, **options)
    ids, logprobs = plain_loop(params, prompts, config, 30, penalty)
    np.testing.assert_array_equal(new.ids, ids)
    np.testing.assert_allclose(new.logprobs, logprobs, rtol=0, atol=1e-11)
    assert context_len == 2 or len(set(ids.ravel().tolist())) > 3


def test_sliding_changes_nothing_before_the_wall_or_without_one():
    params, options = random_params(LEARNED), dict(key=jax.random.key(0), max_new_tokens=5)
    fits = generate(params, [1, 2, 3], LEARNED, **options)
    np.testing.assert_array_equal(generate(params, [1, 2, 3], LEARNED, slide=True, **options), fits)
    more = generate(params, [1, 2, 3], LEARNED, slide=True, **options | {"max_new_tokens": 20})
    np.testing.assert_array_equal(more[:5], fits)
    params, options = random_params(SMALL), dict(key=jax.random.key(0), max_new_tokens=20)
    rope = generate(params, [1, 2, 3], SMALL, **options)
    np.testing.assert_array_equal(generate(params, [1, 2, 3], SMALL, slide=True, **options), rope)


def test_a_long_prompt_is_its_own_end():
    params, prompt = random_params(LEARNED), np.arange(100) % 7
    options = dict(key=jax.random.key(0), max_new_tokens=15, slide=True)
    np.testing.assert_array_equal(
        generate(params, prompt, LEARNED, **options), generate(params, prompt[-8:], LEARNED, **options)
    )


def test_each_lap_draws_with_a_key_of_its_own():
    """A flat distribution: laps of 4 tokens would repeat if each began from one key."""
    params = jax.tree.map(jnp.zeros_like, random_params(LEARNED))
    new = generate(params, [1, 1, 1, 1], LEARNED, key=jax.random.key(0), max_new_tokens=40, slide=True)
    assert len({tuple(lap) for lap in new.reshape(10, 4).tolist()}) == 10


# In pieces


@pytest.mark.parametrize("piece", [1, 3, 8, 100])
@pytest.mark.parametrize(
    ("config", "prompt", "options"),
    [
        ("SMALL", [1, 2, 3], {}),
        ("SMALL", [[1, 2], [3, 4], [5, 6]], {"stop_token": 3}),
        ("SMALL", [[1, 2], [3], [4, 5, 6]], {"stop_token": 0, "sampling": mg.Sampling(0.9, 5, 0.9, 0.01, 1.1)}),
        ("LEARNED", [[1, 2, 3], [4]], {"slide": True, "stop_token": 2}),
    ],
    ids=["one", "stop", "ragged", "slide"],
)
def test_pieces_joined_are_the_whole(config, prompt, options, piece):
    config = {"SMALL": SMALL, "LEARNED": LEARNED}[config]
    params, options = random_params(config), dict(key=jax.random.key(3), max_new_tokens=21) | options
    whole = generate(params, prompt, config, return_logprobs=True, **options)
    pieces = list(mg.stream(params, prompt, config, piece=piece, **options))
    for name in ("ids", "logprobs"):
        parts = [getattr(new, name) for new in pieces]
        np.testing.assert_array_equal(np.concatenate(parts, axis=-1), getattr(whole, name))
        assert parts[0].shape == (*whole.ids.shape[:-1], 1) and all(0 < part.shape[-1] <= piece for part in parts)
        assert all(part.base is None or part.base.size <= part.size for part in parts)  # holds on to no more memory


def test_nothing_is_drawn_before_it_is_asked_for(monkeypatch):
    calls = []
    for name in ("_prefill", "_decode"):
        real = getattr(decoding, name)
        monkeypatch.setattr(decoding, name, lambda *a, real=real, name=name, **k: calls.append(name) or real(*a, **k))
    params = random_params(SMALL)
    pieces = mg.stream(params, [1, 2], SMALL, key=jax.random.key(0), max_new_tokens=9, piece=4)
    assert calls == []
    next(pieces)
    assert calls == ["_prefill"]
    next(pieces)
    assert calls == ["_prefill", "_decode"]
    assert [new.ids.shape for new in pieces] == [(4,)] and len(calls) == 3  # 1 + 4 + 4
    assert list(mg.stream(params, [1, 2], SMALL, key=jax.random.key(0), max_new_tokens=0)) == []


# The cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_cache_bytes(dtype, kv_heads, x64):
    config = dataclasses.replace(BASE, n_layers=3, n_kv_heads=kv_heads, dtype=dtype)
    L, H, K, S, B = 3, kv_heads or 4, 4, 64, 5
    cache = decoding.empty_cache(config, B, S)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == 2 * L * H * K * S * B * jnp.dtype(dtype).itemsize


def test_the_cache_is_donated(monkeypatch):
    """Each call writes into the arrays of the one before: the old ones are gone, the new ones in their place."""
    real, steps = decoding._decode, []

    def watched(params, text, *arguments, **options):
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(text)]
        new = real(params, text, *arguments, **options)
        steps.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(text)))
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new.cache)] == places[-2:]
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
        memory = real.lower(params, new, *arguments, **options).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(new))
        return new

    monkeypatch.setattr(decoding, "_decode", watched)
    params = jax.tree.map(jnp.asarray, random_params(SMALL))
    pieces = list(mg.stream(params, [[1, 2], [3, 4]], SMALL, key=jax.random.key(0), max_new_tokens=9, piece=4))
    assert steps == [True, True] and len(pieces) == 3


def test_keys_are_cached_after_rotation():
    """Slot t holds position t's key, turned by t: the NumPy model's. Slots behind the text hold nothing of it."""
    params, text = random_params(BASE), np.array([3, 1, 4, 1, 5, 9])
    fixed = decoding._Fixed(None, jax.random.key(0), np.int32(2**30), np.int32(23), np.int32(-1), None)
    _, cache = cached_prefill(params, np.pad(text, (0, 10))[None], np.int32(6), fixed, config=BASE, size=32)
    exact = oracle.to_float64(params)
    normed = oracle.norm(exact["embed"]["embedding"][text], exact["block_0"]["norm_attention"], BASE)
    keys = oracle.linear(normed, exact["block_0"]["attention"]["key"])
    for head in range(4):
        rotated = oracle.rotate(keys[:, 4 * head : 4 * head + 4], BASE)
        np.testing.assert_allclose(cache["block_0"]["key"][0, :6, head], rotated, rtol=0, atol=1e-5)  # float32
    assert cache["block_0"]["key"].shape == (1, 32, 4, 4) and not cache["block_0"]["key"][0, 16:].any()


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
        (range(3), (4,)),
        ([np.int8([1, 2]), [3], (4, 5, 6)], (3, 4)),
        (([1], [2, 3]), (2, 4)),
        ([jnp.array([1, 2]), np.array([3])], (2, 4)),
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
        ([], InputError, "shape (0,)"),
        ([[], []], InputError, "shape (2, 0)"),
        ([[1, [2, 3]], [4]], InputError, "rows of different lengths"),
        ([1, [2]], InputError, "prompt[0] has shape ()"),
        ([[1], None], InputError, "prompt[1] has shape ()"),
        ([[1], [2.5, 3]], InputTypeError, "float64"),
        ([[1], [True, False]], InputTypeError, "bool"),
        (["ab", "c"], InputTypeError, ""),
        ({1, 2}, InputTypeError, ""),
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
    ("options", "kind", "words"),
    [
        ({"max_new_tokens": -1}, InputError, "max_new_tokens is -1"),
        ({"max_new_tokens": 2.0}, InputTypeError, "max_new_tokens is 2.0"),
        ({"max_new_tokens": True}, InputTypeError, "max_new_tokens is True"),
        ({"max_new_tokens": None}, InputTypeError, "max_new_tokens is None"),
        ({"max_new_tokens": 10**12}, InputError, "max_new_tokens is 1000000000000"),
        ({"max_new_tokens": 2**30}, InputError, "1073741825 positions"),
        ({"window": 0}, InputError, "window is 0"),
        ({"window": -5}, InputError, "window is -5"),
        ({"window": 1.5}, InputTypeError, "window is 1.5"),
        ({"vocab_limit": 0}, InputError, "vocab_limit is 0"),
        ({"vocab_limit": -3}, InputError, "vocab_limit is -3"),
        ({"vocab_limit": 8}, InputError, "vocab_limit is 8; it must be in [1, 7]"),
        ({"vocab_limit": 2**40}, InputError, "[1, 7]"),
        ({"stop_token": 7}, InputError, "stop_token is 7; it must be in [0, 6]"),
        ({"stop_token": -1}, InputError, "stop_token is -1"),
        ({"stop_token": "a"}, InputTypeError, "stop_token is 'a'"),
        ({"key": None}, InputTypeError, "key is None; give one random key"),
        ({"key": 0}, InputTypeError, "key is 0"),
        ({"key": np.array([1.0, 2.0])}, InputTypeError, "one random key"),
        ({"key": np.zeros((3, 2), np.uint32)}, InputTypeError, "one random key"),
        ({"sampling": None}, InputTypeError, "sampling is None; give a Sampling"),
        ({"sampling": 0.8}, InputTypeError, "sampling is 0.8"),
        ({"config": None}, InputTypeError, "config is a NoneType"),
        ({"config": mg.Config()}, InputTypeError, "config is a Config; give a ModelConfig"),
        ({"params": None}, InputError, "params do not fit"),
        ({"config": dataclasses.replace(LEARNED, context_len=1), "slide": True}, InputError, "context_len is 1"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(options, kind, words):
    arguments = {"params": {}, "prompt": [1], "config": SMALL, "key": jax.random.key(0), "max_new_tokens": 3} | options
    before = programs()
    for function in (generate, mg.stream):  # a stream refuses at once, not at its first piece
        with pytest.raises(kind) as caught:
            function(**arguments)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert programs() == before


@pytest.mark.parametrize("piece", [0, -1, 1.0, None])
def test_pieces_that_are_refused(piece):
    with pytest.raises(InputError, match=f"piece is {piece}"):
        mg.stream({}, [1], SMALL, key=jax.random.key(0), max_new_tokens=3, piece=piece)


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
            limits = {"window": n, "vocab_limit": 29 - n % 5, "stop_token": n % 5}
            generate(params, prompt, config, key=key, max_new_tokens=n, **limits)
        generate(params, [1, 2, 3], config, key=jax.random.key(9), max_new_tokens=33)
    assert count == []
    assert programs() - cached == 2


def test_other_values_of_sampling_compile_nothing():
    config = dataclasses.replace(BASE, vocab_size=31)  # of no other test
    params, key = random_params(config), jax.random.key(0)
    arguments = dict(key=key, max_new_tokens=9, return_logprobs=True)
    generate(params, [[1, 2], [3]], config, sampling=mg.Sampling(0.8, 5, 0.9, 0.1, 1.2), **arguments)
    before = programs()
    with compilations() as count:
        for sampling in (mg.Sampling(2, 1, 0, 1.0, 0.5), mg.Sampling(1e-9, 30, 0.999, 1e-9, 7)):
            new = generate(params, [[1], [2, 3]], config, sampling=sampling, **arguments)
            assert new.ids.shape == (2, 9)
        for _ in mg.stream(params, [[1], [2, 3]], config, key=key, max_new_tokens=11, sampling=sampling, piece=2):
            pass
    assert count == [] and programs() == before


def test_sliding_compiles_no_more_with_every_lap():
    config = dataclasses.replace(LEARNED, vocab_size=31)  # of no other test
    before, options = programs(), dict(key=jax.random.key(0), sampling=GREEDY, slide=True)
    generate(random_params(config), [1, 2], config, max_new_tokens=14, **options)
    assert programs() - before == 2
    with compilations() as count:
        generate(random_params(config), [1, 2, 3], config, max_new_tokens=60, **options)
    assert count == [] and programs() - before == 2


def test_compilations_are_seen_by_the_counter():
    with compilations() as count:
        jax.jit(lambda x: x * 3.25 + 17)(np.float32(1))
    assert len(count) == 1


@pytest.mark.parametrize(("n", "size"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1000, 1024), (1025, 2048)])
def test_buckets(n, size):
    assert decoding._bucket(n) == size
