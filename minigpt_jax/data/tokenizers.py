"""Text to token ids and back. Every tokenizer has `kind`, `vocab_size`, `encode`, `decode`, `to_dict`, `fingerprint`.

Ids are int32 in [0, V). `decode` takes any sequence of ints, a NumPy or JAX array included.
"""

import abc
import codecs
import functools
import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minigpt_jax.data.patterns import BLANK_BETWEEN_WORDS, BPE_PATTERN, GPT2_PATTERN, blank_parts, recut
from minigpt_jax.errors import InputError, InputTypeError, replacing, require

NO_ENTRY = "\ufffd".encode()  # the text of an id that names no token


class Tokenizer(abc.ABC):
    """What all tokenizers share. Subclasses give `kind`, `vocab_size`, `encode`, `to_dict` and `_piece`."""

    kind: str
    vocab_size: int
    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids (n,), int32."""

    @abc.abstractmethod
    def to_dict(self) -> dict:
        """What `tokenizer_from_dict` needs to make it again, JSON-able, with its "kind"."""

    def _piece(self, token: int) -> bytes:
        """The token's text as UTF-8, or a part of it; tokenizers with a `_steps` of their own have none."""
        return b""

    def _steps(self):
        """What `StreamDecoder` drives: `push(id)` and `flush()`, for ids that are in the vocabulary."""
        return _Utf8Steps(self)

    def decode(self, ids) -> str:
        """The text of `ids`, flattened. Bytes that are not UTF-8 become U+FFFD. Refuses ids outside [0, V)."""
        steps = self._steps()
        return "".join([steps.push(token) for token in _checked_ids(ids, self.vocab_size)]) + steps.flush()

    def texts(self) -> list[str]:
        """The text of each id as it stands in the middle of a text."""
        return [self._piece(i).decode("utf-8", "replace") for i in range(self.vocab_size)]

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        """The same text in other pieces, which encoded one by one give the ids of the whole."""
        return iter(pieces)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON of `to_dict()`."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def __eq__(self, other) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


class StreamDecoder:
    """Decodes one token at a time: `push(id)` gives the text that is certain by now, `flush()` what is left.

    No part of a character is ever given out, so the pieces joined equal `tokenizer.decode` of all ids.
    A word tokenizer's text comes one word late, since a suffix may still change its spelling.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._size, self._steps = tokenizer.vocab_size, tokenizer._steps()

    def push(self, token) -> str:
        (token,) = _checked_ids([token], self._size)
        return self._steps.push(token)

    def flush(self) -> str:
        return self._steps.flush()


class _Utf8Steps:
    def __init__(self, tokenizer: Tokenizer):
        self._piece = tokenizer._piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._piece(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WordSteps:
    def __init__(self, tokenizer: "WordTokenizer"):
        self._tokenizer = tokenizer
        self._held: int | None = None
        self._space = ""

    def push(self, token: int) -> str:
        whole = self._tokenizer.joined.get((self._held, token))
        if whole is None:
            text = self.flush()
            self._held = token
            return text
        self._held = None
        return self._word(whole)

    def flush(self) -> str:
        if self._held is None:
            return ""
        held, self._held = self._held, None
        return self._word(self._tokenizer.words[held])

    def _word(self, word: str) -> str:
        text, self._space = self._space + word, " "
        return text


class CharTokenizer(Tokenizer):
    """One id per character, ids in code point order. `characters`: any iterable of characters; repeats are fine."""

    kind = "char"

    def __init__(self, characters: Iterable[str]):
        self.characters = "".join(sorted(set("".join(characters))))
        require(
            self.characters != "", "a character tokenizer needs at least one character; give a text that is not empty"
        )
        codes = np.array([ord(c) for c in self.characters])
        self.vocab_size = len(codes)
        # One entry more than the largest code, so that clipping sends every larger code to -1.
        self._table = np.full(codes[-1] + 2, -1, np.int32)
        self._table[codes] = np.arange(len(codes))

    def encode(self, text: str) -> np.ndarray:
        """(characters,) int32. Refuses characters outside the vocabulary, naming each once."""
        _check_str(text)
        ids, step = np.empty(len(text), np.int32), 1 << 16
        for i in range(0, len(text), step):  # in pieces that stay in cache: 20 times as fast as in one go
            codes = np.frombuffer(text[i : i + step].encode("utf-32-le", "surrogatepass"), np.uint32)
            self._table.take(codes, mode="clip", out=ids[i : i + step])
        if len(ids) and ids.min() < 0:
            unknown = "".join(sorted(set(text) - set(self.characters)))
            first = int(np.argmin(ids))
            raise InputError(
                f"unknown characters {_shortened(unknown)}, the first {text[first]!r} at position {first}; allowed are "
                f"the {self.vocab_size} of the training text: {_shortened(self.characters)}; change the text, "
                "or train with tokenizer 'byte', which takes every text"
            )
        return ids

    def _piece(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8", "replace")

    def to_dict(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids: V = 256, every text can be encoded."""

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """(bytes,) int32."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def _piece(self, token: int) -> bytes:
        return bytes([token])

    def to_dict(self) -> dict:
        return {"kind": self.kind}


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding: `tokens[i]` is the byte string of id i, which is also its merge rank.

    `specials`: further ids by their text, which no text is ever encoded to. An id that is neither decodes to U+FFFD.
    `BPETokenizer.train` needs the extra `bpe` (rustbpe), `encode` too (tiktoken); `decode` needs neither.
    """

    kind = "bpe"

    def __init__(
        self,
        tokens: Iterable[bytes],
        pattern: str = BPE_PATTERN,
        specials: dict[str, int] | None = None,
        bos_id: int | None = None,
        eos_id: int | None = None,
    ):
        self.tokens, self.pattern, self.specials = tuple(tokens), pattern, dict(specials or {})
        self.bos_id, self.eos_id = bos_id, eos_id
        filled = [token for token in self.tokens if token]  # b"" leaves a gap
        require(
            len(set(filled)) == len(filled) and {bytes([i]) for i in range(256)} <= set(filled),
            "the tokens of a byte-pair encoding must be distinct and hold all 256 bytes; train it again",
        )
        self._special_bytes = {i: text.encode() for text, i in self.specials.items()}
        require(
            len(self._special_bytes) == len(self.specials)
            and all(i >= len(self.tokens) or (i >= 0 and not self.tokens[i]) for i in self._special_bytes),
            f"two tokens of a byte-pair encoding have one id; its specials are {_shortened(str(self.specials))}; give "
            "ids behind those of the tokens",
        )
        self.vocab_size = max([len(self.tokens) - 1, *self._special_bytes]) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Merges the most frequent pairs until `vocab_size` ids exist, or no pair is left. Deterministic."""
        require(vocab_size >= 256, f"bpe_vocab is {vocab_size}; it must be at least 256, the number of bytes")
        trainer = extra_module("rustbpe", "bpe", "bpe").Tokenizer()
        trainer.train_from_iterator(iter(texts), vocab_size, pattern=BPE_PATTERN)
        return cls(bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1]))

    @functools.cached_property
    def _encoding(self):
        ranks = {token: i for i, token in enumerate(self.tokens) if token}
        tiktoken = extra_module("tiktoken", "bpe", "bpe")
        return tiktoken.Encoding("run", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int32."""
        _utf8(text)
        parts = blank_parts(text) if self.pattern == GPT2_PATTERN else [text]
        ids = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in parts]
        return np.concatenate(ids).astype(np.int32)

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        return recut(pieces) if self.pattern == BPE_PATTERN else recut(pieces, BLANK_BETWEEN_WORDS)

    def _piece(self, token: int) -> bytes:
        text = self.tokens[token] if token < len(self.tokens) else b""
        return text or self._special_bytes.get(token, NO_ENTRY)

    def to_dict(self) -> dict:
        tree = {
            "kind": self.kind,
            "pattern": self.pattern,
            "tokens": [token.decode("latin-1") for token in self.tokens],
        }
        more = {"specials": self.specials, "bos_id": self.bos_id, "eos_id": self.eos_id}
        return tree | {name: value for name, value in more.items() if value not in (None, {})}


class WordTokenizer(Tokenizer):
    """Whole words, separated by blanks; `,` and `/` stand alone. Ids 0, 1, 2 are <pad>, <bos>, <eos>.

    `compounds` maps a spelling to the two words that encode it: "worked" to ("work", "-ed").
    """

    kind = "word"
    pad_id, bos_id, eos_id = 0, 1, 2
    specials = ("<pad>", "<bos>", "<eos>")

    def __init__(self, words: Iterable[str], compounds: dict[str, tuple[str, str]]):
        self.words, self.compounds = tuple(words), {k: tuple(v) for k, v in compounds.items()}
        require(self.words[:3] == self.specials, f"a word vocabulary starts with {', '.join(self.specials)}")
        self.vocab_size = len(self.words)
        index = {word: i for i, word in enumerate(self.words)}
        pairs = {text: (index[base], index[suffix]) for text, (base, suffix) in self.compounds.items()}
        self._ids = pairs | {word: (i,) for word, i in index.items()}
        self.joined = {pair: text for text, pair in pairs.items()}

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int32. Refuses unknown words, naming each once."""
        _check_str(text)
        words = re.findall(r"[,/]|[^\s,/]+", text)
        unknown = dict.fromkeys(word for word in words if word not in self._ids)
        if unknown:
            raise InputError(
                f"unknown words {_shortened(', '.join(unknown))}; allowed are the {self.vocab_size} of the verb "
                f"grammar, {_shortened(', '.join(self.words[3:]))}, and their -ed and -en forms; change the text"
            )
        return np.array([i for word in words for i in self._ids[word]], np.int32)

    def _steps(self):
        return _WordSteps(self)

    def texts(self) -> list[str]:
        return list(self.words)

    def to_dict(self) -> dict:
        return {
            "kind": self.kind,
            "words": list(self.words),
            "compounds": {k: list(v) for k, v in self.compounds.items()},
        }


def tokenizer_from_dict(tree: dict) -> Tokenizer:
    """The inverse of `to_dict`."""
    makers = {
        "char": lambda: CharTokenizer(tree["characters"]),
        "byte": ByteTokenizer,
        "bpe": lambda: BPETokenizer(
            [token.encode("latin-1") for token in tree["tokens"]],
            tree["pattern"],
            **{name: tree[name] for name in ("specials", "bos_id", "eos_id") if name in tree},
        ),
        "word": lambda: WordTokenizer(tree["words"], tree["compounds"]),
        "hf": lambda: _hf(**{name: value for name, value in tree.items() if name != "kind"}),
    }
    kind = tree.get("kind") if isinstance(tree, dict) else None
    require(
        kind in makers, f"tokenizer kind {kind!r}; known: {', '.join(makers)}; give a tokenizer that was saved here"
    )
    try:
        return makers[kind]()
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
        raise InputError(f"a damaged {kind} tokenizer ({error!r}); restore the file or train again") from None


def _hf(**tree) -> Tokenizer:
    from minigpt_jax.data.hf import HFTokenizer  # it builds on this module

    return HFTokenizer(**tree)


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write `to_dict()` as JSON, UTF-8."""
    with replacing(path) as file:
        file.write(json.dumps(tokenizer.to_dict(), ensure_ascii=False, indent=1).encode())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read what `save_tokenizer` wrote. No training, no extra packages."""
    try:
        return tokenizer_from_dict(json.loads(Path(path).read_bytes()))
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the tokenizer: {error.strerror}; give a file that was saved here"
        ) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except ValueError:
        raise InputError(f"{path}: not JSON in UTF-8; restore the file or train again") from None


def _check_str(text: Any) -> None:
    if not isinstance(text, str):
        raise InputTypeError(f"the text is a {type(text).__name__}; give a str")


def _utf8(text: str) -> bytes:
    _check_str(text)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds {text[error.start]!r} at position {error.start}, half of a character, which UTF-8 cannot "
            "hold; give text that was decoded as UTF-8"
        ) from None


def _checked_ids(ids: Any, vocab_size: int) -> list[int]:
    ids = np.asarray(ids).ravel()
    if ids.size == 0:
        return []
    if ids.dtype.kind not in "iu":
        raise InputTypeError(f"token ids have type {ids.dtype}; give integers in [0, {vocab_size})")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InputError(
            f"token id {outside[0]} is not in the vocabulary; V = {vocab_size}: give ids in [0, {vocab_size})"
        )
    return ids.tolist()


def _shortened(text: str, limit: int = 100) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")


def extra_module(name: str, kind: str, extra: str):
    """The module of an optional package."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"tokenizer {kind!r} needs {name}; run: pip install 'minigpt_jax[{extra}]'") from None
