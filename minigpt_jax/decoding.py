"""Text generation: filters as pure functions of the logits, and a cached decode compiled once for many lengths."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig, Sampling
from .errors import require
from .functional import check_context, check_ids, check_params
from .model import MiniGPT, wide


def _by_row(parameter, logits: jax.Array) -> jax.Array:
    """A parameter for all rows, or one for each, as it stands beside (..., V)."""
    parameter = jnp.asarray(parameter)
    return parameter if parameter.ndim == 0 else parameter[..., None]


def _keep_first(logits: jax.Array, descending: jax.Array, n: jax.Array) -> jax.Array:
    """-inf for all but the n largest, n (..., 1), given the logits in descending order. Of equal ones the lower ids
    stay. Values alone are sorted, which is much cheaper than an argsort of a large vocabulary."""
    last = jnp.take_along_axis(descending, jnp.clip(n - 1, 0, logits.shape[-1] - 1), axis=-1)
    above, equal = logits > last, logits == last
    room = n - jnp.sum(above, axis=-1, keepdims=True)
    return jnp.where(above | (equal & (jnp.cumsum(equal, axis=-1) <= room)), logits, -jnp.inf)


def keep_top_k(logits: jax.Array, k) -> jax.Array:
    """-inf for all but the k largest logits, (..., V) -> (..., V). Exactly min(k, V) stay; ties go to the lower id.

    `k` is a number, or (...) with one for each row.
    """
    k = jnp.broadcast_to(_by_row(k, logits), (*logits.shape[:-1], 1))
    return _keep_first(logits, -jnp.sort(-logits, axis=-1), jnp.minimum(k, logits.shape[-1]))


def keep_top_p(logits: jax.Array, p) -> jax.Array:
    """-inf outside the nucleus: the smallest set of most likely tokens whose probability is >= p.

    Holtzman et al. 2020, arXiv:1904.09751. The most likely token always stays; p = 1 keeps all. Ties as in top-k.
    `p` is a number, or (...) with one for each row.
    """
    p, descending = _by_row(p, logits), -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of the more likely tokens
    n = jnp.sum((before < p) | (before == 0) | (p >= 1), axis=-1, keepdims=True)
    return _keep_first(logits, descending, n)


def keep_min_p(logits: jax.Array, p) -> jax.Array:
    """-inf for tokens less likely than p times the most likely one (Nguyen et al. 2024, arXiv:2407.01082).

    0 keeps all; 1 keeps the most likely, and its equals. `p` is a number, or (...) with one for each row.
    """
    p = _by_row(p, logits)
    return jnp.where(logits - jnp.max(logits, axis=-1, keepdims=True) >= jnp.log(p), logits, -jnp.inf)


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty) -> jax.Array:
    """Logits of tokens that the text holds already, `seen` (..., V) bool, divided by the penalty where positive and
    multiplied where negative (Keskar et al. 2019, arXiv:1909.05858). 1 changes nothing; a number, or one for each row.
    """
    penalty = _by_row(penalty, logits)
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Filters(NamedTuple):
    """The values of a `Sampling`, traced, so that another value compiles nothing; None: that filter is left out."""

    temperature: jax.Array | None
    """None: greedy."""
    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None
    repetition_penalty: jax.Array | None


def _filters(sampling: Sampling, vocab_size: int) -> _Filters:
    s, tiny = sampling, float(np.finfo(np.float32).tiny)
    return _Filters(
        # By no less than float32's smallest number: a tiny temperature then makes -inf of the losers, never NaN.
        None if s.temperature == 0 else float(max(s.temperature, tiny)),
        None if s.top_k is None or s.top_k >= vocab_size else np.int32(s.top_k),
        None if s.top_p is None or s.top_p >= 1 else float(s.top_p),
        None if s.min_p is None or s.min_p == 0 else float(s.min_p),
        None if s.repetition_penalty == 1 else float(s.repetition_penalty),
    )


def filter_logits(logits: jax.Array, sampling: Sampling, seen: jax.Array | None = None) -> jax.Array:
    """Logits to draw from, (..., V) float32: the repetition penalty on those of `seen` tokens (..., V), then divided by
    the temperature, then top-k, then top-p, then min-p.

    Temperature 0 leaves only the most likely token, the lowest id among equals.
    """
    return _filter(logits, _filters(sampling, logits.shape[-1]), seen)


def _filter(logits: jax.Array, filters: _Filters, seen: jax.Array | None) -> jax.Array:
    logits = logits.astype(wide(logits.dtype))
    if filters.repetition_penalty is not None and seen is not None:
        logits = penalize_repetition(logits, seen, filters.repetition_penalty)
    if filters.temperature is None:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        ids = jax.lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
        return jnp.where(ids == best, logits, -jnp.inf)
    # Shifted first, so that a tiny temperature never makes inf or NaN of the winner.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / filters.temperature
    if filters.top_k is not None:
        logits = keep_top_k(logits, filters.top_k)
    if filters.top_p is not None:
        logits = keep_top_p(logits, filters.top_p)
    return logits if filters.min_p is None else keep_min_p(logits, filters.min_p)


def empty_cache(config: ModelConfig, batch: int, length: int) -> dict:
    """Key/value cache for `length` positions: 2 L G K S B values of `config.dtype`."""
    shape = (batch, length, config.kv_heads, config.head_dim)
    zeros = functools.partial(jnp.zeros, shape, config.dtype)
    return {f"block_{i}": {"key": zeros(), "value": zeros()} for i in range(config.n_layers)}


def _bucket(n: int) -> int:
    """The next power of two from 16 on: one compiled program serves every length in it."""
    return max(16, 1 << (n - 1).bit_length())


class _Fixed(NamedTuple):
    """What does not change while a text is written. All of it is traced: no value of it compiles anew."""

    pad_B: jax.Array | None
    """Empty slots before each row's prompt; None where no row has any."""
    key: jax.Array
    window: jax.Array
    vocab_limit: jax.Array
    stop_token: jax.Array
    filters: _Filters


class _Text(NamedTuple):
    """The text so far. It is donated from call to call, so the cache is written in place."""

    ids_BxS: jax.Array
    logprobs_BxS: jax.Array
    end: jax.Array
    """Slots that hold a token; the last of them is not in the cache yet."""
    stopped_B: jax.Array
    seen_BxV: jax.Array | None
    """Which tokens each row holds, where the repetition penalty asks for it."""
    cache: dict


def _step(params, config: ModelConfig, cache, tokens, offset, last, fixed: _Fixed):
    """Logits (B, V) after slot `last`, and the cache with `tokens` (B, T) in the slots from `offset` on."""
    size = cache["block_0"]["key"].shape[1]
    mask = None if fixed.pad_B is None else jnp.arange(size)[None, :] >= fixed.pad_B[:, None]

    def run(m):
        x = m.lookup(tokens, offset, fixed.pad_B)
        h, _, new_cache = m.trunk(x, mask, cache, offset, fixed.window, fixed.pad_B)
        return m.unembed(jax.lax.dynamic_slice_in_dim(h, last - offset, 1, axis=1))[:, 0], new_cache

    return MiniGPT(config).apply({"params": params}, method=run)


def _append(text: _Text, logits_BxV, fixed: _Fixed) -> _Text:
    """Draw each row's next token, or repeat the stop token where a row has ended."""
    real = jnp.arange(logits_BxV.shape[-1]) < fixed.vocab_limit  # rows of the table beyond it stand for no token
    logits_BxV = jnp.where(real[None], logits_BxV, -jnp.inf)
    to_draw = _filter(logits_BxV, fixed.filters, text.seen_BxV)
    drawn_B = jax.random.categorical(jax.random.fold_in(fixed.key, text.end), to_draw)
    new_B = jnp.where(text.stopped_B, fixed.stop_token, drawn_B).astype(text.ids_BxS.dtype)
    logprob_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BxV), drawn_B[:, None], axis=-1)[:, 0]
    logprob_B = jnp.where(text.stopped_B, 0, logprob_B).astype(text.logprobs_BxS.dtype)
    seen_BxV = text.seen_BxV
    if seen_BxV is not None:
        seen_BxV = seen_BxV.at[jnp.arange(new_B.size), new_B].set(True)
    return _Text(
        jax.lax.dynamic_update_slice(text.ids_BxS, new_B[:, None], (0, text.end)),
        jax.lax.dynamic_update_slice(text.logprobs_BxS, logprob_B[:, None], (0, text.end)),
        text.end + 1,
        text.stopped_B | (new_B == fixed.stop_token),
        seen_BxV,
        text.cache,
    )


@functools.partial(jax.jit, static_argnames=("config", "size"))
def _prefill(params, prompt_BxP, length, stopped_B, fixed: _Fixed, *, config, size) -> _Text:
    """Read the prompt, `length` slots of the P, and draw the first token."""
    B, P = prompt_BxP.shape
    # Padding behind the prompt is in the cache too, but its slots are overwritten before any query can see them.
    logits_BxV, cache = _step(params, config, empty_cache(config, B, size), prompt_BxP, 0, length - 1, fixed)
    seen_BxV = None
    if fixed.filters.repetition_penalty is not None:
        start = 0 if fixed.pad_B is None else fixed.pad_B[:, None]
        real = (jnp.arange(P)[None, :] < length) & (jnp.arange(P)[None, :] >= start)
        seen_BxV = jnp.zeros((B, config.vocab_size), bool).at[jnp.arange(B)[:, None], prompt_BxP].max(real)
    ids_BxS = jax.lax.dynamic_update_slice(jnp.zeros((B, size), jnp.int32), prompt_BxP, (0, 0))
    blank = jnp.zeros((B, size), wide(config.dtype))
    text = _Text(ids_BxS, blank, length, stopped_B, seen_BxV, cache)
    return _append(text, logits_BxV, fixed)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def _decode(params, text: _Text, until, fixed: _Fixed, *, config) -> _Text:
    """Go on to `until` slots, or until every row has stopped."""

    def more(text: _Text):
        return (text.end < until) & ~jnp.all(text.stopped_B)

    def one(text: _Text) -> _Text:
        token_Bx1 = jax.lax.dynamic_slice_in_dim(text.ids_BxS, text.end - 1, 1, axis=1)
        logits_BxV, cache = _step(params, config, text.cache, token_Bx1, text.end - 1, text.end - 1, fixed)
        return _append(text._replace(cache=cache), logits_BxV, fixed)

    return jax.lax.while_loop(more, one, text)


class Generated(NamedTuple):
    """New tokens, (n,) or (B, n)."""

    ids: np.ndarray
    logprobs: np.ndarray
    """Log-probability of each by the model itself, in nats, before penalty, temperature and filters; 0 after a stop."""


def _padded(prompt, config: ModelConfig) -> tuple[np.ndarray, np.ndarray | None, bool]:
    """Prompts (B, T) with the shorter ones padded on the left, by how much (None: nowhere), and whether there was one
    prompt alone."""
    ragged = isinstance(prompt, (list, tuple)) and len({np.shape(row) for row in prompt}) > 1
    if not ragged:
        prompt = check_ids(prompt, config.vocab_size, "prompt")
        require(
            prompt.ndim in (1, 2) and 0 not in prompt.shape,
            f"prompt of shape {prompt.shape}; give (T,) or (B, T) with at least one token, or a list of prompts",
        )
        return np.atleast_2d(np.asarray(prompt, np.int32)), None, prompt.ndim == 1
    for i, shape in enumerate(map(np.shape, prompt)):
        require(len(shape) == 1 and shape[0] > 0, f"prompt[{i}] has shape {shape}; give (T,), at least one token")
    rows = [np.asarray(check_ids(row, config.vocab_size, f"prompt[{i}]")) for i, row in enumerate(prompt)]
    length = max(map(len, rows))
    pad_B = np.array([length - len(row) for row in rows], np.int32)
    return (
        np.stack([np.pad(row, (pad, 0)) for row, pad in zip(rows, pad_B, strict=True)]).astype(np.int32),
        pad_B,
        False,
    )


def stream(
    params,
    prompt,
    config: ModelConfig,
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
    window: int | None = None,
    vocab_limit: int | None = None,
    stop_token: int | None = None,
    slide: bool = False,
    piece: int = 8,
) -> Iterator[Generated]:
    """As `generate`, in pieces of at most `piece` tokens as soon as they are drawn; the first is one token. The tokens
    do not depend on `piece`. Arguments are checked before the first piece is asked for."""
    prompt_BxT, pad_B, single = _padded(prompt, config)
    for name, value, low in (
        ("max_new_tokens", max_new_tokens, 0),
        ("window", window, 1),
        ("vocab_limit", vocab_limit, 1),
        ("stop_token", stop_token, 0),
        ("piece", piece, 1),
    ):
        whole = isinstance(value, (int, np.integer)) or (value is None and name not in ("max_new_tokens", "piece"))
        require(whole and (value is None or value >= low), f"{name} is {value}; give a whole number, at least {low}")
    slide = slide and config.positions == "learned"
    if not slide:
        check_context(prompt_BxT.shape[1] + max_new_tokens, config)
    check_params(params, config)
    fixed = _Fixed(
        pad_B,
        key,
        np.int32(2**31 - 1 if window is None else window),
        np.int32(config.vocab_size if vocab_limit is None else vocab_limit),
        np.int32(-1 if stop_token is None else stop_token),
        _filters(sampling, config.vocab_size),
    )
    pieces = _laps(params, prompt_BxT, config, fixed, int(max_new_tokens), slide, piece)
    return (Generated(*(x[0] for x in new)) for new in pieces) if single else pieces


def _laps(params, text_BxT, config, fixed: _Fixed, n: int, slide: bool, piece: int) -> Iterator[Generated]:
    """Write n tokens. Where positions end at context_len and the text slides, each time it is full the second half of
    it is read anew from position 0."""
    stopped_B, lap, key = np.zeros(len(text_BxT), bool), 0, fixed.key
    while n > 0 and not stopped_B.all():
        length = text_BxT.shape[1]
        if slide and length >= config.context_len:
            keep = config.context_len - 1 if lap == 0 else max(1, config.context_len // 2)
            if fixed.pad_B is not None:
                fixed = fixed._replace(pad_B=np.maximum(fixed.pad_B - (length - keep), 0))
            text_BxT = text_BxT[:, -keep:]
            continue
        room = min(n, config.context_len - length) if slide else n
        before_B = stopped_B
        for new, stopped_B in _lap(params, text_BxT, before_B, config, fixed, room, piece):  # noqa: B007
            text_BxT = np.concatenate([text_BxT, new.ids], axis=1)
            n -= new.ids.shape[1]
            yield new
        lap += 1
        if n > 0:
            fixed = fixed._replace(key=jax.random.fold_in(key, 2**31 + lap))


def _lap(params, prompt_BxT, stopped_B, config, fixed: _Fixed, n: int, piece: int):
    """Write at most n tokens behind a prompt that fits: pieces, each with which rows have stopped by then."""
    B, length = prompt_BxT.shape
    total = length + n
    size = _bucket(total)
    if config.positions == "learned":
        size = min(size, config.context_len)
    padded = np.zeros((B, min(_bucket(length), size)), np.int32)
    padded[:, :length] = prompt_BxT
    text = _prefill(params, padded, np.int32(length), stopped_B, fixed, config=config, size=size)
    given = length
    while True:
        ids, logprobs, end, stopped_B = jax.device_get((text.ids_BxS, text.logprobs_BxS, text.end, text.stopped_B))
        yield Generated(ids[:, given:end], logprobs[:, given:end]), stopped_B
        given = int(end)
        if given >= total or stopped_B.all():
            return
        until = np.int32(min(total, given + piece))
        text = _decode(params, text, until, fixed, config=config)


def generate(
    params,
    prompt,
    config: ModelConfig,
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
    window: int | None = None,
    vocab_limit: int | None = None,
    stop_token: int | None = None,
    slide: bool = False,
    return_logprobs: bool = False,
) -> np.ndarray | Generated:
    """New ids only: prompt (T,) -> (n,), or (B, T) -> (B, n), int32 with n <= max_new_tokens. Prompts of different
    lengths are a list of lists, and the distributions drawn from are those of each prompt alone.

    `window` lets attention look back at most so many positions, which keeps RoPE at distances it was trained on.
    `vocab_limit`: ids from it on are never drawn (rows of the table without a token). `stop_token` ends a row; a batch
    ends when all rows have, and shorter rows are filled up with it. Same key, same ids. Learned positions end at
    context_len: asking for more is an `InputError`, unless `slide` lets the text go on by reading its second half anew
    each time it is full. `return_logprobs` gives `Generated`.
    """
    options = {"sampling": sampling, "window": window, "vocab_limit": vocab_limit, "stop_token": stop_token}
    piece = max(1, max_new_tokens) if isinstance(max_new_tokens, (int, np.integer)) else 1
    pieces = stream(params, prompt, config, key=key, max_new_tokens=max_new_tokens, slide=slide, piece=piece, **options)
    single = np.ndim(prompt[0]) == 0
    none = np.zeros((0,) if single else (len(prompt), 0), np.int32)
    new = [Generated(none, none.astype(np.float32)), *pieces]
    joined = Generated(*(np.concatenate(x, axis=-1) for x in zip(*new, strict=True)))
    return joined if return_logprobs else joined.ids
