"""The command line: arguments to calls, nothing else. jax is imported inside the commands, so `--help` is instant."""

import contextlib
import dataclasses
import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

from . import __version__
from .config import Config, ModelConfig, Sampling, load_config
from .errors import InputError, require

PROG = "minigpt"
Flat = tyro.conf.arg(name="")
Positional = tyro.conf.Positional
RunDir = Annotated[Path, Positional, tyro.conf.arg(metavar="RUN")]


@dataclasses.dataclass(frozen=True)
class Params:
    """Where the parameters of a config are: paths, shapes, totals, what tying saves, FLOPs, cache."""

    config: Positional[Path]
    """A YAML config, such as configs/gpt2.yaml, or a run directory."""
    model: ModelConfig
    all: bool = False
    """Print every leaf of every block; by default deep models are folded."""

    def run(self) -> None:
        from .inspect import param_table

        print(param_table(self.model).render(every_leaf=self.all))


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a model on Shakespeare, the verb grammar, or your own text.

    Ctrl-C saves; `minigpt train RUN` goes on. Every option of the config can be overridden here.
    """

    config: Positional[Path]
    """A YAML config, such as configs/minigpt.yaml; or a run directory, to go on with it."""
    options: Annotated[Config, Flat]
    text: Path | None = None
    """Train on this UTF-8 text file instead of the config's corpus."""
    run_dir: Path | None = None
    """Where to keep the run; default: runs/NAME of the config, numbered if taken."""
    init: Path | None = None
    """Start from the weights, the shape and the tokenizer of this run directory or Hugging Face folder (fine-tuning).
    The config's context_len is then the length of the windows to train on."""

    def run(self) -> None:
        from .runs import train_run

        train_run(self.options, self.config, self.text, self.run_dir, self.init)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Loss, bits per character and perplexity of a run on all of its held-out text."""

    run_dir: RunDir
    """A run directory."""
    text: Path | None = None
    """Evaluate on all of this UTF-8 text file instead."""

    def run(self) -> None:
        from .runs import eval_run

        eval_run(self.run_dir, self.text)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Text written by a run."""

    run_dir: RunDir
    """A run directory."""
    prompt: str | None = None
    """What the text begins with; default: a new line, or the tokenizer's begin token."""
    tokens: int = 400
    """How many tokens to write."""
    sampling: Annotated[Sampling, Flat] = Sampling(temperature=0.8, top_p=0.95)  # noqa: RUF009  (frozen)
    seed: int = 0
    """Same seed, same text."""
    window: int | None = None
    """How far back attention looks; default: the training length. 0: no limit."""
    slide: bool = False
    """Where learned positions end, go on by reading the second half of the text anew."""

    def run(self) -> None:
        from .runs import sample_run

        sample_run(self.run_dir, self.prompt, self.tokens, self.sampling, self.seed, self.window, self.slide)


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a command that looks inside leaves its results, besides printing them."""

    json: Path | None = None
    """Write the numbers to this file as JSON; `-` prints them in place of the table."""
    plot: Path | None = None
    """Draw a picture into this PNG file."""


@dataclasses.dataclass(frozen=True)
class Grads:
    """The gradient of the tied table on a batch of held-out text, split into its lookup and head parts; by token, and
    beside the other leaves."""

    run_dir: RunDir
    """A run directory."""
    files: Annotated[Files, Flat]
    text: Path | None = None
    """Use a batch of this UTF-8 text file instead."""
    rows: int = 20
    """How many rows of the table to print; 0: none."""

    def run(self) -> None:
        from .views import grads_run

        grads_run(self.run_dir, self.text, self.rows, self.files.json, self.files.plot)


@dataclasses.dataclass(frozen=True)
class Lens:
    """What a run would say after each layer of a prompt: the logit lens, or a tuned lens."""

    run_dir: RunDir
    """A run directory."""
    prompt: str
    """The text to read."""
    files: Annotated[Files, Flat]
    layer: str | None = None
    """Print this layer alone, position by position: embed, block_0/ffn, block_1/ffn ..."""
    top_k: int = 5
    """How many of the most likely tokens to keep for each layer and position."""
    inside: bool = False
    """Also look between attention and feed-forward layer: block_0/attention ..."""
    tuned: bool = False
    """Read through an affine probe for each layer. Probes are trained at first use and kept beside the run."""
    tuned_steps: int | None = None
    """Train new probes with so many updates; default: use those beside the run, or make them with 300."""

    def run(self) -> None:
        from .views import lens_run

        lens_run(
            self.run_dir,
            self.prompt,
            self.top_k,
            self.inside,
            self.layer,
            self.tuned,
            self.tuned_steps,
            self.files.json,
            self.files.plot,
        )


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """The tokens whose vectors in the tied table are nearest to a token's, by cosine."""

    run_dir: RunDir
    """A run directory."""
    token: Annotated[str, Positional, tyro.conf.arg(metavar="TOKEN")]
    """The token's text, or its id as #7."""
    files: Annotated[Files, Flat]
    count: int = 10
    """How many to print."""

    def run(self) -> None:
        from .views import neighbours_run

        neighbours_run(self.run_dir, self.token, self.count, self.files.json, self.files.plot)


@dataclasses.dataclass(frozen=True)
class Report:
    """One HTML page about a run: loss, parameters, tied gradient, lens, neighbours. It needs no network."""

    run_dir: RunDir
    """A run directory."""
    prompt: str | None = None
    """The text to show the lens on; default: the beginning of the held-out text."""
    out: Path | None = None
    """The file to write; default: report.html in the run directory."""

    def run(self) -> None:
        from .views import report_run

        report_run(self.run_dir, self.prompt, self.out)


@dataclasses.dataclass(frozen=True)
class Import:
    """Make a run directory of a Hugging Face checkpoint, for all other commands.

    Families: GPT-2, Llama, Qwen2, Qwen3, Gemma, GPT-NeoX (Pythia), from config.json, safetensors and the tokenizer's
    files. Neither torch nor transformers is needed.
    """

    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="DIR")]
    """A folder in Hugging Face's layout."""
    run_dir: RunDir
    """The run directory to make."""
    tied: bool | None = None
    """Whether one table serves both ends; default: what config.json says."""

    def run(self) -> None:
        from .exchange import import_run

        import_run(self.folder, self.run_dir, self.tied)


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run as a Hugging Face checkpoint, which transformers loads."""

    run_dir: RunDir
    """A run directory."""
    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="DIR")]
    """The folder to write."""

    def run(self) -> None:
        from .exchange import export_run

        export_run(self.run_dir, self.folder)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Training and generation speed on this machine, beside PyTorch's.

    Peers are transformers (from the extra `parity`) and a nanoGPT checkout. All get the same weights and batches, each
    run is a fresh process, and all run in turn. Progress goes to stderr, tables to stdout; Ctrl-C prints what there is.

    Examples: `minigpt bench` takes some minutes; `minigpt bench --configs S --rounds 1 --peers none` is a first look;
    `minigpt bench --configs S C C2 G G1k --nanogpt ../nanoGPT --out results.md` takes hours.
    """

    configs: tuple[str, ...] = ("S", "C", "C2")
    """S: the course's Mini-GPT, T=32. C: nanoGPT's recipe for CPUs, T=64. C2: its character model, D=384 T=256.
    G, G1k: GPT-2 124M at T=256 and T=1024, which need 4 GB of memory."""
    rounds: int = 3
    """How often each contender runs. Round one also measures compiling; ranges are over the rounds."""
    seconds: float = 3.0
    """How long a run repeats what it times, at least."""
    tasks: tuple[str, ...] = ("train", "decode", "startup")
    """What to measure: train, decode (S, C2 and G only), startup (our own commands)."""
    peers: tuple[str, ...] = ("transformers", "nanogpt")
    """Whom to measure beside us, or none."""
    rows: tuple[str, ...] = ("eager", "eager-hook", "compiled", "compiled-hook", "bf16")
    """Which settings of a peer: eager as installed; compiled (torch.compile, fused AdamW); both with -hook, which
    answers the vendor check of PyTorch's matrix library on AMD processors; bf16 (compiled, hook)."""
    nanogpt: Path | None = None
    """The folder of a nanoGPT checkout (with model.py)."""
    out: Path | None = None
    """Write the tables to this Markdown file too."""
    json: Path | None = None
    """Write the raw numbers to this file."""

    def run(self) -> None:
        from .bench.plan import Plan
        from .bench.run import bench_run

        plan = Plan(self.configs, self.rounds, self.seconds, self.tasks, self.peers, self.rows, self.nanogpt)
        bench_run(plan, self.out, self.json)


COMMANDS = {
    "train": Train,
    "eval": Eval,
    "sample": Sample,
    "params": Params,
    "grads": Grads,
    "lens": Lens,
    "neighbours": Neighbours,
    "report": Report,
    "import": Import,
    "export": Export,
    "bench": Bench,
}


def _config_named_in(arguments: list[str]) -> tuple[Path, Config]:
    """The config file or run directory that the arguments name: its values are the defaults of all options."""
    sections = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    switches = {"-h", "--help", "--all"}
    switches |= {
        f"--{section}.{prefix}{field.name}".replace("_", "-")
        for section, cls in sections.items()
        for field in dataclasses.fields(cls)
        for prefix in ("", "no-")
        if field.type is bool
    }
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            path = Path(argument)
            file = path / "config.yaml" if path.is_dir() else path
            require(
                file.suffix in (".yaml", ".yml"),
                f"{argument} is neither a config file (.yaml) nor a run directory; try configs/minigpt.yaml",
            )
            require(
                file.is_file() or not path.is_dir(), f"{argument} is a directory, but holds no run (no config.yaml)"
            )
            return path, load_config(file)
        if "=" not in argument and argument.replace("_", "-") not in switches:
            next(rest, None)  # the option's value
    return tyro.MISSING, Config()


def _init_named_in(arguments: list[str]) -> Path | None:
    """The value of --init, whose model gives the defaults of the model's options."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, _, value = argument.partition("=")
        if name == "--init" and (value or following):
            return Path(value or following)
    return None


def _parse(arguments: list[str]):
    path, config = _config_named_in(arguments[1:]) if arguments[:1] in (["train"], ["params"]) else (tyro.MISSING, None)
    init = _init_named_in(arguments) if arguments[:1] == ["train"] else None
    if init is not None:
        from .exchange import starting_config

        config = starting_config(init, config)
    defaults = {
        "train": lambda: Train(path, config),
        "params": lambda: Params(path, config.model),
    }
    union = None
    for name, cls in COMMANDS.items():
        default = defaults[name]() if name in defaults and config is not None else tyro.MISSING_NONPROP
        member = Annotated[cls, tyro.conf.subcommand(name, default=default)]
        union = member if union is None else union | member
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                union,
                prog=PROG,
                args=arguments,
                description="A small GPT in JAX with one tied embedding: train it, run it, look inside.",
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(_one_line(complaint.getvalue())) from None


def _one_line(box: str) -> str:
    """tyro's boxed message as one line: what was wrong, the nearest names."""
    # The first line is the box's title; lines are in colour on a terminal, and ASCII where stdout is not UTF-8.
    lines = [line.strip("│╰╯| ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()[1:]]
    text = " ".join(line for line in lines if line)
    text = re.split(r"\s*[─-]{3,}\s*For full", text)[0]
    text = re.sub(r"^[─-]{3,}\s*|Error parsing \S+: | in minigpt \w+ --help", "", text)
    text = re.sub(r"\s*[─-]{3,}\s*", "; ", text)
    return re.sub(r"\s+", " ", text).strip("; ─") or "the arguments could not be understood; see minigpt --help"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 when done, 2 with one line on stderr for wrong input, 130 for a second Ctrl-C."""
    if arguments is None:  # the system hands over bytes, UTF-8 whatever the locale says
        arguments = [os.fsencode(argument).decode("utf-8", "replace") for argument in sys.argv[1:]]
    for stream in (sys.stdout, sys.stderr):  # a console that can't show a character must not end a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        if arguments == ["--version"]:
            print(PROG, __version__)
            return 0
        command = _parse(arguments or ["--help"])
        command.run()
        sys.stdout.flush()
    except InputError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `minigpt params ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, a folder that can't be written
        print(f"{PROG}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
