"""Tokenizers that a `tokenizer.json` of Hugging Face's library `tokenizers` describes (the extra `tokenizers`)."""

import functools
import json
import re
from collections.abc import Iterable, Iterator

import numpy as np

from minigpt_jax.data.patterns import BLANK_BETWEEN_WORDS, recut
from minigpt_jax.data.tokenizers import NO_ENTRY, Tokenizer, _utf8, extra_module
from minigpt_jax.errors import InputError, require

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_PROBE = "The end of the day it 's 12 34 años y 日本 語 of the end"


@functools.cache
def byte_letters() -> dict[int, str]:
    """GPT-2's way to write each byte as one letter that can be seen: itself, or one from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(unseen)}


@functools.cache
def letter_bytes() -> dict[str, int]:
    return {letter: byte for byte, letter in byte_letters().items()}


class HFTokenizer(Tokenizer):
    """What a `tokenizer.json` says; `encode` needs the library, the usual decoders (byte-level, sentencepiece) don't.

    `encode` adds no special token, and text that looks like one ("<s>") is encoded as any text. Added tokens that are
    not special, such as runs of blanks, are found in the text as the file says. `decode` gives special tokens as they
    are written. Ids in [0, V) without an entry are never encoded to, and decode to U+FFFD.
    """

    kind = "hf"

    def __init__(self, json: str, bos_id: int | None = None, eos_id: int | None = None, pad_id: int | None = None):
        self.json, self.bos_id, self.eos_id, self.pad_id = json, bos_id, eos_id, pad_id
        self._parts, self.tokens = _parsed(json)
        self.vocab_size = max(self.tokens) + 1

    @functools.cached_property
    def backend(self):
        """The library's own object."""
        tokenizers = extra_module("tokenizers", self.kind, "tokenizers")
        try:
            backend = tokenizers.Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises nothing narrower
            raise InputError(
                f"tokenizers {tokenizers.__version__} can't read this tokenizer.json: {_line(error)}; upgrade it: "
                "pip install -U tokenizers"
            ) from None
        for token in self._parts["added_tokens"]:  # the library numbers them anew where they leave a gap
            text, given = token["content"], backend.token_to_id(token["content"])
            require(
                given == token["id"],
                f"tokenizers gives the added token {text!r} the id {given}, but tokenizer.json says {token['id']}; "
                "add it to the model.vocab of that file, too",
            )
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        if getattr(backend.model, "dropout", None):  # merges left out at random, for training
            backend.model.dropout = None
        return backend

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int32."""
        _utf8(text)
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"this tokenizer can't encode the text: {_line(error)}; change the text") from None
        return np.array(ids, np.int32)

    def cut(self, pieces: Iterable[str]) -> Iterator[str]:
        """Before a blank between two words where that makes no difference on a sample; else the text is one piece."""
        apart = [i for piece in re.split(BLANK_BETWEEN_WORDS, _PROBE) for i in self.encode(piece).tolist()]
        within = any(re.search(BLANK_BETWEEN_WORDS, token["content"]) for token in self._parts["added_tokens"])
        if within or apart != self.encode(_PROBE).tolist():
            return iter(["".join(pieces)])
        return recut(pieces, BLANK_BETWEEN_WORDS)

    @functools.cached_property
    def _pieces(self) -> list[bytes | str | int] | None:
        """Of each id: the bytes of a byte-level vocabulary, or text, or a byte's number; None for a rarer decoder."""
        kind = _decoder_kind(self._parts["decoder"])
        if kind is None:
            return None
        if kind == "bytes":
            return [self._bytes(self.tokens[i]) if i in self.tokens else NO_ENTRY for i in range(self.vocab_size)]
        pieces = []
        for i in range(self.vocab_size):
            text = self.tokens.get(i, NO_ENTRY.decode())
            byte = _BYTE_TOKEN.fullmatch(text) if kind.byte_fallback else None
            pieces.append(int(byte[1], 16) if byte else text.replace(kind.blank, " ") if kind.blank else text)
        return pieces

    @staticmethod
    def _bytes(token: str) -> bytes:
        table = letter_bytes()
        try:
            return bytes([table[letter] for letter in token])
        except KeyError:  # an added token is written as it is
            return token.encode()

    def _piece(self, token: int) -> bytes:
        return self._pieces[token]

    def _steps(self):
        kind = _decoder_kind(self._parts["decoder"])
        if kind is None:
            return _WholeSteps(self)
        return super()._steps() if kind == "bytes" else _SentenceSteps(self, kind)

    @property
    def first_id(self) -> int | None:
        """The token that the file's own rule (post_processor) puts before every text, or None."""
        return _first_id(self._parts["post_processor"])

    def texts(self) -> list[str]:
        if self._pieces is None:
            return [self.decode([i]) for i in range(self.vocab_size)]
        return [_alone(piece) for piece in self._pieces]

    def to_dict(self) -> dict:
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id}
        return {"kind": self.kind, "json": self.json} | {name: i for name, i in ids.items() if i is not None}


class _Sentence:
    """How a decoder of the sentencepiece family turns tokens into text."""

    def __init__(self, blank: str | None, byte_fallback: bool, strip: int, bare_first: bool):
        self.blank, self.byte_fallback, self.strip, self.bare_first = blank, byte_fallback, strip, bare_first


def _decoder_kind(decoder: dict) -> _Sentence | str | None:
    """The word "bytes", a `_Sentence`, or None for a decoder that only the library knows."""
    steps = decoder.get("decoders", [decoder])
    by_type = {step.get("type"): step for step in steps}
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"]:
        return "bytes"
    if types == ["Metaspace"]:
        scheme = decoder.get("prepend_scheme") or ("always" if decoder.get("add_prefix_space", True) else "never")
        return _Sentence(decoder.get("replacement", "▁"), False, 0, scheme != "never")
    known = [name for name in ("Replace", "ByteFallback", "Fuse", "Strip") if name in types]
    replace, strip = by_type.get("Replace", {}), by_type.get("Strip", {"start": 0})
    blank = (replace.get("pattern") or {}).get("String")
    if (
        types != known
        or not types
        or (replace and (blank is None or len(blank) != 1 or replace["content"] != " "))
        or ("Strip" in by_type and ("Fuse" not in by_type or strip["content"] != " " or strip["stop"] != 0))
    ):
        return None
    return _Sentence(blank, "ByteFallback" in types, strip["start"], False)


class _SentenceSteps:
    """Text after text. Byte tokens wait for the end of their run, which as a whole is UTF-8 or a U+FFFD for each."""

    def __init__(self, tokenizer: HFTokenizer, kind: _Sentence):
        self._tokenizer, self._kind = tokenizer, kind
        self._pieces, self._strip, self._first = tokenizer._pieces, kind.strip, True
        self._run = bytearray()

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._first and self._kind.bare_first:
            piece = self._tokenizer.tokens.get(token, piece).replace(self._kind.blank, "")
        self._first = False
        return self.flush() + self._stripped(piece)

    def flush(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return self._stripped(run.decode())
        except UnicodeDecodeError:
            return self._stripped(NO_ENTRY.decode() * len(run))

    def _stripped(self, text: str) -> str:
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
            else:
                self._strip, text = self._strip - 1, text[1:]
        return text


class _WholeSteps:
    """For decoders whose text may change with every further token: all of it at the end."""

    def __init__(self, tokenizer: HFTokenizer):
        self._tokenizer, self._ids = tokenizer, []

    def push(self, token: int) -> str:
        self._ids.append(token)
        return ""

    def flush(self) -> str:
        ids, self._ids = self._ids, []
        text, run = "", []
        for i in [*ids, None]:
            if i in self._tokenizer.tokens:
                run.append(i)
                continue
            text += self._tokenizer.backend.decode(run, skip_special_tokens=False) if run else ""
            text += NO_ENTRY.decode() if i is not None else ""
            run = []
        return text


def _alone(piece: bytes | str | int) -> str:
    if isinstance(piece, int):
        piece = bytes([piece])
    return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")


def _parsed(text: str) -> tuple[dict, dict[int, str]]:
    """The parts that we read ourselves, and each id's token, added tokens included."""
    try:
        tree = json.loads(text)
        vocab, added = tree["model"]["vocab"], tree["added_tokens"]
        tokens = dict(enumerate(t for t, _ in vocab)) if isinstance(vocab, list) else {i: t for t, i in vocab.items()}
        tokens |= {token["id"]: token["content"] for token in added}
        parts = {name: tree.get(name) or {} for name in ("decoder", "post_processor")} | {"added_tokens": added}
        known = min(tokens) >= 0
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    require(
        known,
        "not a tokenizer.json of the library tokenizers (it needs model.vocab and added_tokens); restore the file",
    )
    return parts, tokens


def _first_id(processor: dict) -> int | None:
    if processor.get("type") == "Sequence":
        found = [_first_id(step) for step in processor["processors"]]
        return next((i for i in found if i is not None), None)
    if processor.get("type") == "TemplateProcessing":
        name = next(iter(processor["single"]), {}).get("SpecialToken", {}).get("id")
        return processor["special_tokens"][name]["ids"][0] if name is not None else None
    return processor["cls"][1] if "cls" in processor else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
