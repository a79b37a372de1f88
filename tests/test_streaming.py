"""Text as it is drawn, on its way to the terminal: in time, in whole characters, through closed pipes and Ctrl-C."""

import dataclasses
import os
import signal
import socket
import sys
import threading

import jax
import numpy as np
import pytest
from test_cli import Place

import minigpt_jax as mg
from minigpt_jax import runs
from minigpt_jax.cli import main
from minigpt_jax.data.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer
from minigpt_jax.decoding import Generated
from minigpt_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = mg.Config(model=mg.ModelConfig(vocab_size=400, d_model=8, n_layers=1, n_heads=2, d_ff=8, context_len=8))
LEARNED = mg.Config(model=dataclasses.replace(CONFIG.model, vocab_size=256, positions="learned"))
ANY = mg.Sampling(temperature=5.0)


def params_of(config):
    return mg.init(config.model, jax.random.key(0))


@pytest.fixture
def drawn(monkeypatch):
    """Makes `stream` draw given ids, three at a time; a list of what was asked for so far."""
    asked = []

    def install(ids):
        def stream(*arguments, **options):
            for i in range(0, len(ids), 3):
                asked.append(ids[i : i + 3])
                yield Generated(np.array(ids[i : i + 3]), np.zeros(len(ids[i : i + 3])))

        monkeypatch.setattr(runs, "stream", stream)
        return asked

    return install


def pieces_of(tokenizer, prompt, **options):
    return runs.text_pieces({}, tokenizer, CONFIG, prompt, 100, ANY, 0, **options)


def test_the_prompt_comes_before_anything_is_drawn_and_each_piece_in_time(drawn):
    asked = drawn(list(b"abcdefg"))
    pieces = pieces_of(ByteTokenizer(), "Zoë")
    assert next(pieces) == "Zoë" and asked == []
    assert next(pieces) == "abc" and len(asked) == 1
    assert next(pieces) == "def" and len(asked) == 2
    assert "".join(pieces) == "g"


def test_no_piece_ends_within_a_character(drawn):
    text = "né😀 señor ✓" * 3
    drawn(list(text.encode()))
    pieces = list(pieces_of(ByteTokenizer(), "😀"))
    assert "".join(pieces) == "😀" + text and not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_become_marks(drawn):
    drawn([0xC3, 0x41, 0xF0, 0x9F, 0x98])  # a lone first byte; a character that is never finished
    assert "".join(pieces_of(ByteTokenizer(), "x")) == "x\ufffdA\ufffd"


def test_special_tokens_are_not_text(drawn):
    tokenizer = WordTokenizer(("<pad>", "<bos>", "<eos>", "work", "-ed", "I"), {"worked": ("work", "-ed")})
    drawn([3, 4, 0, 5, 2, 2])
    assert "".join(pieces_of(tokenizer, "I")) == "I worked I"
    drawn([5, 3, 4])
    assert "".join(pieces_of(tokenizer, None)) == "I worked"


def test_text_pieces_are_what_generate_draws():
    params, tokenizer = params_of(CONFIG), ByteTokenizer()
    options = dict(key=jax.random.key(7), max_new_tokens=60, sampling=ANY)
    new = mg.generate(params, list(b"ab"), CONFIG.model, window=8, vocab_limit=256, **options)
    text = runs.write_text(params, tokenizer, CONFIG, "ab", 60, ANY, 7)
    assert text == "ab" + tokenizer.decode(new)
    free = mg.generate(params, list(b"ab"), CONFIG.model, vocab_limit=256, **options)
    assert runs.write_text(params, tokenizer, CONFIG, "ab", 60, ANY, 7, window=0) == "ab" + tokenizer.decode(free)


@pytest.mark.parametrize(("prompt", "room"), [("abc", 5), ("abcdefg", 1), ("abcdefgh", 0)])
def test_learned_positions_end_with_a_note(prompt, room, capsys):
    params = params_of(LEARNED)
    text = runs.write_text(params, CharTokenizer(map(chr, range(256))), LEARNED, prompt, 20, ANY, 0)
    assert text.startswith(prompt) and len(text) == 8
    assert f"note: {room} tokens, not 20" in capsys.readouterr().err


def test_learned_positions_slide_without_a_note(capsys):
    params, tokenizer = params_of(LEARNED), CharTokenizer(map(chr, range(256)))
    for prompt in ("abc", "abcdefgh", "a prompt longer than the context"):
        text = runs.write_text(params, tokenizer, LEARNED, prompt, 20, ANY, 0, slide=True)
        assert text.startswith(prompt) and len(text) == len(prompt) + 20
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match=r"29 positions.*context_len is 8.*slide"):
        runs.write_text(params, tokenizer, LEARNED, "nine char", 20, ANY, 0)


# The real command

TEXT = "né😀 señor ✓ año " * 400
SAMPLE = ["sample", "run", "--prompt", "né😀 ", "--seed", "1"]
# A background job may be started with Ctrl-C ignored, and so its children.
ALERT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from minigpt_jax.cli import main
raise SystemExit(main())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run on bytes of a text full of characters of two to four bytes."""
    place = Place(tmp_path_factory.mktemp("streaming"))
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    options = ["--data.tokenizer", "byte", "--train.steps", "150", "--train.eval-every", "0"]
    place.minigpt("train", "tiny.yaml", "--run-dir", "run", *options)
    options += ["--model.positions", "learned"]
    place.minigpt("train", "tiny.yaml", "--run-dir", "learned", *options)
    return place


@pytest.mark.slow
def test_each_write_is_whole_characters(place):
    """Standard output is a socket that keeps each write apart."""
    read, write = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writes = []

    def receive():
        while data := read.recv(1 << 16):
            writes.append(data)

    thread = threading.Thread(target=receive)
    thread.start()
    process = place.start(*SAMPLE, "--tokens", "300", stdout=write, env={"PYTHONUTF8": "1"})
    write.close()
    _, err = process.communicate(timeout=120)
    thread.join()
    read.close()
    assert process.returncode == 0 and err == b""
    texts = [data.decode() for data in writes]  # raises where a character is cut
    assert len(texts) > 20 and texts[0] == "né😀 "
    assert sum(not text.isascii() for text in texts[1:]) > 10
    assert "".join(texts) == place.minigpt(*SAMPLE, "--tokens", "300", env={"PYTHONUTF8": "1"}).stdout
    assert sum(character in "éñ✓😀" for character in "".join(texts[1:])) > 10  # it has learned to write some


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(place):
    """`minigpt sample run | head -c 1`."""
    process = place.start(*SAMPLE, "--tokens", "2000")
    assert process.stdout.read(1) == b"n"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert err == b"" and process.wait(timeout=60) in (0, 141)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_printed(place, monkeypatch):
    monkeypatch.setattr("test_cli.COMMAND", [sys.executable, "-c", ALERT])
    process = place.start(*SAMPLE, "--tokens", "60000", "--window", "0", env={"PYTHONUTF8": "1"})
    begun = b""
    while len(begun) < 100:
        begun += os.read(process.stdout.fileno(), 1000)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"minigpt: interrupted\n")
    text = (begun + rest).decode()
    assert text.startswith("né😀 ") and text.endswith("\n") and len(text) < 59_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0"],
        ["--top-k", "3"],
        ["--top-k", "1000"],
        ["--min-p", "0.2"],
        ["--repetition-penalty", "1.5"],
        ["--temperature", "1e-30", "--top-p", "0"],
        ["--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1"],
    ],
    ids=" ".join,
)
def test_sampling_options(place, options, monkeypatch, capsys):
    monkeypatch.chdir(place.folder)
    for run in (["run"], ["learned", "--slide"]):
        outs = []
        for _ in range(2):
            assert main(["sample", *run, "--prompt", "a", "--tokens", "40", *options]) == 0
            outs.append(capsys.readouterr())
        assert outs[0] == outs[1] and outs[0].err == "" and outs[0].out.startswith("a")
