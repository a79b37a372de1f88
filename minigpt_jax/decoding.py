"""Text generation: a prefill and a cached decode, compiled once for many lengths and all values of the filters."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig, Sampling
from .errors import InputError, InputTypeError, require
from .functional import check_ids, check_params
from .model import MiniGPT, wide
from .sampling import Filters, draw, filters_of

# Positions are int32, and the cache's size is the next power of two.
MOST_SLOTS = 2**30


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
    filters: Filters


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
    drawn_B = draw(jax.random.fold_in(fixed.key, text.end), logits_BxV, fixed.filters, text.seen_BxV)
    new_B = jnp.where(text.stopped_B, fixed.stop_token, drawn_B).astype(text.ids_BxS.dtype)
    logprob_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BxV), drawn_B[:, None], axis=-1)[:, 0]
    logprob_B = jnp.where(text.stopped_B, 0, logprob_B).astype(text.logprobs_BxS.dtype)
    seen_BxV = text.seen_BxV
    if seen_BxV is not None:
        seen_BxV = seen_BxV.at[jnp.arange(new_B.size), new_B].set(True)
    return _Text(
        jax.lax.dynamic_update_slice_in_dim(text.ids_BxS, new_B[:, None], text.end, axis=1),
        jax.lax.dynamic_update_slice_in_dim(text.logprobs_BxS, logprob_B[:, None], text.end, axis=1),
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


def _padded(prompt, config: ModelConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """Prompts (B, T) with the shorter ones padded on the left, and by how much; None where all are equally long."""
    try:
        shapes = [np.shape(row) for row in prompt] if isinstance(prompt, (list, tuple)) else []
    except ValueError:
        raise InputError("a prompt holds rows of different lengths; give ids, or a list of prompts (T,)") from None
    if len(set(shapes)) < 2:
        wrong = f"prompt of shape {np.shape(prompt)}; give (T,) or (B, T), at least one token, or a list of prompts"
        require(0 not in np.shape(prompt), wrong)
        prompt = check_ids(prompt, config.vocab_size, "prompt")
        require(prompt.ndim in (1, 2), wrong)
        return np.atleast_2d(np.asarray(prompt, np.int32)), None
    for i, shape in enumerate(shapes):
        require(len(shape) == 1 and shape[0] > 0, f"prompt[{i}] has shape {shape}; give (T,), at least one token")
    rows = [np.asarray(check_ids(row, config.vocab_size, f"prompt[{i}]")) for i, row in enumerate(prompt)]
    pad_B = max(map(len, rows)) - np.array([len(row) for row in rows], np.int32)
    return np.stack([np.pad(row.astype(np.int32), (pad, 0)) for row, pad in zip(rows, pad_B, strict=True)]), pad_B


def _check_count(name: str, value, low: int, high: int = MOST_SLOTS) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise InputTypeError(f"{name} is {value!r}; give a whole number, at least {low}")
    require(low <= value <= high, f"{name} is {value}; it must be in [{low}, {high}]")


def _check_key(key) -> None:
    try:
        shape = jax.eval_shape(lambda: jax.random.fold_in(key, 0)).shape
    except (TypeError, ValueError):
        shape = None
    if shape is None:
        raise InputTypeError(f"key is {key!r}; give one random key, such as jax.random.key(0)".replace("\n", " "))


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
    if not isinstance(config, ModelConfig):
        raise InputTypeError(f"config is a {type(config).__name__}; give a ModelConfig")
    prompt_BxT, pad_B = _padded(prompt, config)
    _check_count("max_new_tokens", max_new_tokens, 0)
    _check_count("piece", piece, 1)
    if window is not None:
        _check_count("window", window, 1, 2**63)
    if vocab_limit is not None:
        _check_count("vocab_limit", vocab_limit, 1, config.vocab_size)
    if stop_token is not None:
        _check_count("stop_token", stop_token, 0, config.vocab_size - 1)
    _check_key(key)
    filters = filters_of(sampling, config.vocab_size)
    slide = slide and config.positions == "learned"
    total, wall = prompt_BxT.shape[1] + max_new_tokens, config.context_len
    require(not slide or wall > 1, "context_len is 1, which leaves no room to slide in")
    require(
        slide or config.positions != "learned" or total <= wall,
        f"{total} positions are asked for and context_len is {wall}; learned positions end there: ask for less, or let "
        "the text slide (RoPE has no such wall)",
    )
    require(total <= MOST_SLOTS, f"{total} positions are asked for; at most {MOST_SLOTS} are possible")
    check_params(params, config)
    fixed = _Fixed(
        pad_B,
        key,
        np.int32(MOST_SLOTS if window is None else min(window, MOST_SLOTS)),
        np.int32(config.vocab_size if vocab_limit is None else vocab_limit),
        np.int32(-1 if stop_token is None else stop_token),
        filters,
    )
    axes = _axes(prompt)
    pieces = _laps(params, prompt_BxT, config, fixed, int(max_new_tokens), slide, piece)
    return (Generated(*(x.reshape(*axes, -1) for x in new)) for new in pieces)


def _axes(prompt) -> tuple[int, ...]:
    """(B,), or () for one prompt alone."""
    return np.shape(prompt)[:-1] if hasattr(prompt, "shape") else (len(prompt),) * np.ndim(prompt[0])


def _laps(params, text_BxT, config, fixed: _Fixed, n: int, slide: bool, piece: int) -> Iterator[Generated]:
    """Write n tokens. Where the text slides, each time it fills context_len its second half is read anew from position
    0; a prompt that fills it begins so."""
    stopped_B, key, lap = np.zeros(len(text_BxT), bool), fixed.key, 0
    while n > 0 and not stopped_B.all():
        length, room = text_BxT.shape[1], n
        if slide:
            keep = length if length < config.context_len else config.context_len // 2
            if fixed.pad_B is not None:
                fixed = fixed._replace(pad_B=np.maximum(fixed.pad_B - (length - keep), 0))
            text_BxT, room = text_BxT[:, -keep:], min(n, config.context_len - keep)
        if lap > 0:
            fixed = fixed._replace(key=jax.random.fold_in(key, 2**31 + lap))  # no slot has such a number
        for new, stopped in _lap(params, text_BxT, stopped_B, config, fixed, room, piece):
            text_BxT, stopped_B = np.concatenate([text_BxT, new.ids], axis=1), stopped
            n -= new.ids.shape[1]
            yield new
        lap += 1


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
        end, stopped_B = int(text.end), np.array(text.stopped_B)
        # Copied: a view of the text's arrays would keep them from being donated, and alive as long as the piece.
        whole = jax.device_get((text.ids_BxS, text.logprobs_BxS))
        new = Generated(*(x[:, given:end].copy() for x in whole))
        del whole
        yield new, stopped_B
        given = end
        if given >= total or stopped_B.all():
            return
        text = _decode(params, text, np.int32(min(total, given + piece)), fixed, config=config)


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
    ends when all rows have, and shorter rows are filled up with it. Same key, same ids. `return_logprobs` gives
    `Generated`.

    Learned positions end at context_len: asking for more is an `InputError`, unless `slide`. Then, each time the text
    has context_len tokens, its second half (context_len // 2) is read anew from position 0 and all before is
    forgotten, by the repetition penalty too. Rows of different lengths slide together, when the longest is full.

    Programs are compiled for each bucket of prompt lengths and of prompt and new tokens together (powers of two, 16 at
    least), for each number of rows, and for which of the filters are on; not for their values.
    """
    options = {"sampling": sampling, "window": window, "vocab_limit": vocab_limit, "stop_token": stop_token}
    piece = max(1, max_new_tokens) if isinstance(max_new_tokens, (int, np.integer)) else 1
    pieces = stream(params, prompt, config, key=key, max_new_tokens=max_new_tokens, slide=slide, piece=piece, **options)
    none = np.zeros((*_axes(prompt), 0), np.int32)
    new = [Generated(none, none.astype(wide(config.dtype))), *pieces]
    joined = Generated(*(np.concatenate(x, axis=-1) for x in zip(*new, strict=True)))
    return joined if return_logprobs else joined.ids
