"""From text to batches. A batch is a pure function of (seed, step), so a run resumes without any loader state."""

import abc
import codecs
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minigpt_jax.config import DataConfig
from minigpt_jax.data import shakespeare, verbs
from minigpt_jax.data.patterns import recut
from minigpt_jax.data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from minigpt_jax.data.wheels import cache_dir
from minigpt_jax.errors import InputError, replacing, require

PIECE_BYTES = 8 << 20
_ORDER_TAG = 0xDA7A  # keeps the data order's random stream apart from every other use of the same seed


class Batch(NamedTuple):
    """B examples of T tokens; a NamedTuple, so a pytree."""

    tokens: np.ndarray
    """(B, T) int32: what the model sees."""
    targets: np.ndarray
    """(B, T) int32: the token after each."""
    mask: np.ndarray | None = None
    """(B, T) bool: which targets count; None where all do."""


# Text files


def iter_text(path: str | Path, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
    r"""The text of a UTF-8 file in pieces, so that memory stays bounded; no byte-order mark, newlines as \n.

    Refuses missing files, folders, empty files, and bytes that are not UTF-8 (with their offset).
    """
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(utf8, translate=True)
    done, start, empty = 0, True, True
    try:
        with open(path, "rb") as file:
            while True:
                data, before = file.read(piece_bytes), done - len(utf8.buffer)
                text = newlines.decode(data, final=not data)
                done += len(data)
                if text and start:
                    start, text = False, text.removeprefix("\ufeff")
                if text:
                    empty = False
                    yield text
                if not data:
                    break
    except UnicodeDecodeError as error:
        at, byte = before + error.start, error.object[error.start]
        raise InputError(f"{path}: not UTF-8 at byte {at} (0x{byte:02x}); save the file as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot read the text: {error.strerror}; give a UTF-8 text file") from None
    require(not empty, f"{path}: the file is empty; give a text of at least context_len + 1 tokens")


def read_text(path: str | Path) -> str:
    """All of `iter_text` at once."""
    return "".join(iter_text(path))


# Token files


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds ids in [0, V)."""
    return np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def tokenize_to_file(pieces: Iterable[str], tokenizer: Tokenizer, path: str | Path) -> dict:
    """Write the tokens of a text as a raw array, and `path`.json beside it; both appear only when complete.

    The side file, which is returned, holds dtype, count, characters, vocab_size, tokenizer (fingerprint), text_sha256.
    Tokens do not depend on how the text was cut: see `Tokenizer.cut`.
    """
    dtype, sha = token_dtype(tokenizer.vocab_size), hashlib.sha256()
    count = characters = 0
    with replacing(path) as file:
        for piece in tokenizer.cut(pieces):
            ids = tokenizer.encode(piece)
            file.write(ids.astype(dtype).tobytes())
            sha.update(piece.encode())
            count, characters = count + len(ids), characters + len(piece)
    about = {
        "dtype": dtype.name,
        "count": count,
        "characters": characters,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "text_sha256": sha.hexdigest(),
    }
    with replacing(f"{path}.json") as file:
        file.write(json.dumps(about, indent=1).encode())
    return about


def open_tokens(path: str | Path, tokenizer: Tokenizer) -> np.ndarray:
    """What `tokenize_to_file` wrote: (count,), read-only, memory-mapped. Refuses a file that does not fit."""
    again = "tokenize the text again"
    try:
        about = json.loads(Path(f"{path}.json").read_bytes())
        dtype, count = np.dtype(about["dtype"]), about["count"]
        size = Path(path).stat().st_size
        found = {"vocab_size": about["vocab_size"], "tokenizer": about["tokenizer"]}
    except OSError as error:
        raise InputError(f"{error.filename}: cannot read the tokens: {error.strerror}; {again}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}.json: damaged; {again}") from None
    wanted = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint}
    for name, value in wanted.items():
        require(found[name] == value, f"{path}: made with {name} {found[name]}, but this one has {value}; {again}")
    require(
        dtype == token_dtype(tokenizer.vocab_size) and size == count * dtype.itemsize,
        f"{path}: {size} bytes, but {count} tokens of {dtype} were written; {again}",
    )
    require(count > 0, f"{path}: no tokens; give a text that is not empty")
    tokens = np.memmap(path, dtype, mode="r")
    require(
        int(tokens.max()) < tokenizer.vocab_size,
        f"{path}: holds id {tokens.max()}, but ids are in [0, {tokenizer.vocab_size}); {again}",
    )
    return tokens


# Sources of batches


class Source(abc.ABC):
    """Examples in a random order without replacement, epoch after epoch; and all of them in order, for evaluation."""

    length: int
    _masked: bool

    @abc.abstractmethod
    def __len__(self) -> int:
        """Examples per epoch."""

    def _phase(self, random: np.random.Generator) -> int:
        return 0

    @abc.abstractmethod
    def _example(self, index: np.ndarray, phase: int) -> tuple[np.ndarray, np.ndarray]:
        """(B,) indices to (B, T+1) tokens and (B,) numbers of targets that count."""

    def _eval_len(self) -> int:
        return len(self)

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """The batch of update `step` (from 0): depends on nothing but the arguments. It may straddle epochs."""
        n = len(self)
        number = step * batch_size + np.arange(batch_size, dtype=np.int64)
        rows, counts = [], []
        for epoch in range(number[0] // n, number[-1] // n + 1):
            order, phase = self._epoch(seed, int(epoch))
            tokens, count = self._example(order[number[number // n == epoch] % n], phase)
            rows.append(tokens)
            counts.append(count)
        return self._shift(np.concatenate(rows), np.concatenate(counts), self._masked)

    def eval_batches(self, batch_size: int, max_windows: int | None = None) -> Iterator[Batch]:
        """Every target once, in order; with `max_windows`, that many examples, evenly spread.

        Always with a mask; the last batch is filled up to `batch_size` with rows that do not count.
        """
        total = self._eval_len()
        picked = min(total, total if max_windows is None else max_windows)
        index = np.arange(picked) * total // max(1, picked)
        for start in range(0, picked, batch_size):
            part = index[start : start + batch_size]
            tokens, counts = self._example(np.resize(part, batch_size), 0)
            counts[len(part) :] = 0
            yield self._shift(tokens, counts, True)

    def _epoch(self, seed: int, epoch: int) -> tuple[np.ndarray, int]:
        """The epoch's order and phase. The latest two are kept, for speed only."""
        cache = self.__dict__.setdefault("_epochs", {})
        seed = int(seed)
        if (seed, epoch) not in cache:
            require(0 <= seed < 1 << 64, f"seed is {seed}; it must be in [0, 2**64)")
            # Two words for the seed whatever its size, so that no two (seed, epoch) give the same entropy.
            entropy = (_ORDER_TAG, seed & 0xFFFFFFFF, seed >> 32, epoch)
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
            while len(cache) > 1:
                cache.pop(next(iter(cache)))
            cache[seed, epoch] = random.permutation(len(self)), self._phase(random)
        return cache[seed, epoch]

    def _shift(self, tokens: np.ndarray, counts: np.ndarray, masked: bool) -> Batch:
        """(B, T+1) tokens to inputs and targets: the one place where targets are shifted."""
        tokens = tokens.astype(np.int32)
        mask = np.arange(self.length) < counts[:, None] if masked else None
        return Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), mask)


class Windows(Source):
    """Windows of T + 1 tokens from one long stream, which share their border token.

    An epoch has N // T - 1 windows (at least one), side by side, after a random phase of its own: windows differ
    between epochs, and in time every token is reached. In evaluation they start at 0 and the last may be partial.
    `tokens`: (N,), N >= T + 1; for evaluation alone N >= 2.
    """

    _masked = False

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(1, len(self.tokens) // self.length - 1)

    def _phase(self, random: np.random.Generator) -> int:
        span = len(self) * self.length
        require(
            len(self.tokens) > span,
            f"the text has {len(self.tokens)} tokens; context_len {self.length} needs at least {span + 1}; "
            "give a longer text or lower model.context_len",
        )
        return int(random.integers(len(self.tokens) - span))

    def _example(self, index: np.ndarray, phase: int) -> tuple[np.ndarray, np.ndarray]:
        starts, last = phase + index * self.length, len(self.tokens) - 1
        at = starts[:, None] + np.arange(self.length + 1)
        return self.tokens[np.minimum(at, last)], np.minimum(last - starts, self.length)

    def _eval_len(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)


class Rows(Source):
    """Rows of tokens of their own, each of 2 to T + 1 tokens, padded at the end; the mask leaves the padding out."""

    _masked = True

    def __init__(self, rows: Sequence[Sequence[int]], length: int, pad_id: int):
        sizes = [len(row) for row in rows]
        require(
            bool(sizes) and min(sizes) >= 2, "a row needs at least 2 tokens, one to see and one to predict; drop others"
        )
        require(
            max(sizes) <= length + 1,
            f"the longest example has {max(sizes)} tokens; context_len {length} holds {length + 1}; "
            f"set model.context_len to at least {max(sizes) - 1}",
        )
        self.length = length
        self._tokens = np.full((len(rows), length + 1), pad_id, np.int32)
        for i, row in enumerate(rows):
            self._tokens[i, : len(row)] = row
        self._counts = np.array(sizes) - 1

    def __len__(self) -> int:
        return len(self._tokens)

    def _example(self, index: np.ndarray, phase: int) -> tuple[np.ndarray, np.ndarray]:
        return self._tokens[index], self._counts[index]


# Whole data sets


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What `load_dataset` gives."""

    tokenizer: Tokenizer
    train: Source
    val: Source | None
    """None where nothing is held out."""
    text_sha256: str
    """Of the whole text as UTF-8: the data's identity."""
    tokens_per_char: float | None
    """Of the text; bits per character are nats per token * this / ln 2. None for the verb grammar."""
    notes: list[str]
    """Lines to show to the user."""
    train_tokens: int
    val_tokens: int


def load_dataset(data: DataConfig, context_len: int, tokenizer: Tokenizer | None = None) -> Dataset:
    """The corpus, tokenized and split. With `tokenizer`, that of a saved run; else one is made from the whole text.

    Tokens are kept in `cache_dir()`/tokens and reused. Refuses a text of fewer than context_len + 1 tokens.
    """
    require(context_len >= 1, f"context_len is {context_len}; it must be at least 1")
    kinds = ("hf", "bpe") if data.tokenizer == "pretrained" else (data.tokenizer,)
    require(
        tokenizer is None or tokenizer.kind in kinds,
        f"data.tokenizer is {data.tokenizer!r}, but the saved one is {getattr(tokenizer, 'kind', None)!r}; use that",
    )
    if data.tokenizer == "word":
        return _load_verbs(data, context_len, tokenizer)
    if data.corpus == "shakespeare":
        text = shakespeare.fetch()
        name, pieces = "Shakespeare", lambda: [text]
    else:
        name, pieces = data.path, lambda: iter_text(data.path)
    sha, characters, alphabet = hashlib.sha256(), 0, set()
    for piece in pieces():
        sha.update(piece.encode())
        characters += len(piece)
        if data.tokenizer == "char":
            alphabet.update(piece)
    if isinstance(tokenizer, CharTokenizer):
        unknown = "".join(sorted(alphabet - set(tokenizer.characters)))
        require(
            not unknown,
            f"{name}: characters {unknown!r} are not in the run's vocabulary; use the run's own text or train anew",
        )
    notes = []
    tokenizer = tokenizer or _make_tokenizer(data, alphabet, pieces, notes)
    folder = cache_dir() / "tokens"
    path = folder / f"{sha.hexdigest()[:24]}-{tokenizer.fingerprint[:24]}.bin"
    try:
        tokens = open_tokens(path, tokenizer)
    except InputError:
        about = tokenize_to_file(pieces(), tokenizer, path)
        if about["text_sha256"] != sha.hexdigest():
            path.unlink()  # or the new text's tokens would stand for the old text from now on
            raise InputError(f"{name} changed while it was read; run again") from None
        tokens = open_tokens(path, tokenizer)
    count = len(tokens)
    require(
        count > context_len,
        f"{name}: {count} tokens; context_len {context_len} needs at least {context_len + 1}; "
        "give a longer text or lower model.context_len",
    )
    held_out = int(count * data.val_fraction)
    if held_out < 2 or count - held_out <= context_len:
        if data.val_fraction > 0:
            notes.append(
                f"{name}: {count} tokens are too few to hold any out; all are trained on, with no validation loss"
            )
        held_out = 0
    return Dataset(
        tokenizer=tokenizer,
        train=Windows(tokens[: count - held_out], context_len),
        val=Windows(tokens[count - held_out :], context_len) if held_out else None,
        text_sha256=sha.hexdigest(),
        tokens_per_char=count / characters,
        notes=notes,
        train_tokens=count - held_out,
        val_tokens=held_out,
    )


def _make_tokenizer(data: DataConfig, alphabet: set, pieces, notes: list[str]) -> Tokenizer:
    if data.tokenizer == "char":
        return CharTokenizer(alphabet)
    if data.tokenizer == "byte":
        return ByteTokenizer()
    require(
        data.tokenizer != "pretrained",
        "data.tokenizer 'pretrained' is the one that came with imported weights, and none were given; use --init DIR, "
        "or choose char, byte or bpe",
    )
    tokenizer = BPETokenizer.train(recut(pieces()), data.bpe_vocab)
    if tokenizer.vocab_size < data.bpe_vocab:
        notes.append(f"the text has pairs for {tokenizer.vocab_size} byte-pair tokens only, not {data.bpe_vocab}")
    return tokenizer


def _load_verbs(data: DataConfig, context_len: int, tokenizer: Tokenizer | None) -> Dataset:
    spanish = data.corpus == "verbs"
    tokenizer = tokenizer or verbs.word_tokenizer(spanish)
    texts = verbs.split(spanish=spanish)
    train, val = (verbs.token_rows(part, tokenizer) for part in texts)
    return Dataset(
        tokenizer=tokenizer,
        train=Rows(train, context_len, tokenizer.pad_id),
        val=Rows(val, context_len, tokenizer.pad_id),
        text_sha256=hashlib.sha256("\n".join(texts[0] + texts[1]).encode()).hexdigest(),
        tokens_per_char=None,
        notes=[f"held out is the 'going to' future of {', '.join(verbs.HELD_OUT)}; their other forms are trained on"],
        train_tokens=sum(map(len, train)),
        val_tokens=sum(map(len, val)),
    )
