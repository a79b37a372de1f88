"""What the commands do with run directories, and what they show on the terminal."""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .checkpoint import Run, create_run, open_run
from .compiled import keep_compiled_programs
from .config import Config, Sampling
from .data import Dataset, StreamDecoder, Windows, load_dataset, ngram_cross_entropy, read_text
from .decoding import stream
from .errors import InputError, require
from .exchange import starting_weights
from .inspect import param_table
from .inspect.pictures import plot_loss, plot_tied
from .optimizer import describe_decay
from .train import TOKENS_PER_CALL, TrainState, bits, evaluate, evaluation_due, init_state, state_of, train

keep_compiled_programs()

NGRAM_ORDER = 3
fcntl = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # POSIX only


def unit(dataset: Dataset) -> str:
    return "character" if dataset.tokens_per_char else "token"


def fit_vocabulary(config: Config, dataset: Dataset) -> tuple[Config, list[str]]:
    """Make the table large enough for the tokenizer, and say so. A larger table stays: its spare rows are not drawn."""
    need, have = dataset.tokenizer.vocab_size, config.model.vocab_size
    if need > have:
        model = dataclasses.replace(config.model, vocab_size=need)
        return dataclasses.replace(config, model=model), [f"model.vocab_size is now {need}: this text needs {need} ids"]
    spare = have - need
    return config, [f"rows of the table without a token: {spare} of {have}"] if spare else []


def _free_run_dir(stem: str) -> Path:
    base = Path("runs") / stem
    numbered = (base.with_name(f"{stem}-{i}") for i in range(2, 10**6))
    return base if not base.exists() else next(path for path in numbered if not path.exists())


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks for a stop at the next safe place; a second Ctrl-C is the usual one."""
    asked = []

    def ask(number, frame):
        asked.append(number)
        print("\nsaving; Ctrl-C again to leave at once", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _locked(run: Run) -> Iterator[None]:
    """Keep a second process from training in the same directory. The system lets go of the lock when we die."""
    folder = os.open(run.path, os.O_RDONLY) if fcntl else None
    try:
        if fcntl:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise InputError(f"another process trains in {run.path}; stop it, or choose another --run-dir") from None
    try:
        yield
    finally:
        if fcntl:
            os.close(folder)


@contextlib.contextmanager
def _metrics_writer(run: Run) -> Iterator[Callable[[dict], None]]:
    """Observer: a JSON line for each training step, inspection and evaluation."""
    # Line by line: a kill right after a checkpoint must not take the records of the steps before it along.
    with open(run.path / "metrics.jsonl", "a", encoding="utf-8", buffering=1) as file:

        def write(record: dict) -> None:
            if record["kind"] in ("train", "inspect", "eval"):
                file.write(json.dumps(record) + "\n")

        yield write


@contextlib.contextmanager
def _progress_bar(console: Console, config: Config, start: int, per: str) -> Iterator[Callable[[dict], None]]:
    """Observer: a live line on a terminal; elsewhere nothing."""
    columns = [TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=config.train.steps, completed=start)
        loss = None

        def show(record: dict) -> None:
            nonlocal loss
            if record["kind"] == "train":
                loss = record["loss"] if loss is None else 0.9 * loss + 0.1 * record["loss"]
                value = f"loss {loss:.3f}  {loss * record['bits'] / max(record['loss'], 1e-9):.2f} bits/{per}"
                text = f"{value}  {record['tokens_per_s'] / 1000:,.0f}k tokens/s"
                progress.update(task, completed=record["step"], description=text)

        yield show


def _printer(console: Console, per: str) -> Callable[[dict], None]:
    """Observer: a line for each evaluation, and the samples."""

    def show(record: dict) -> None:
        if record["kind"] == "eval":
            part = "all held-out text" if record["full"] else "part of the held-out text"
            line = f"step {record['step']:>6}  loss {record['loss']:.4f}  {record['bits']:.3f} bits per {per}  ({part})"
            console.print(line)
        elif record["kind"] == "sample":
            console.print(f"--- step {record['step']}\n{record['text']}\n---")

    return show


def train_run(config: Config, source: Path, text: Path | None, run_dir: Path | None, start: Path | None = None) -> None:
    """Start a run from a config, or go on with the run directory `source`; see `minigpt train --help`."""
    if text is not None:
        tokenizer = "char" if config.data.tokenizer == "word" else config.data.tokenizer
        data = dataclasses.replace(config.data, corpus="text", path=str(text), tokenizer=tokenizer)
        config = dataclasses.replace(config, data=data)
    if config.data.path is not None:  # so that the run can be used from any folder
        path = str(Path(config.data.path).resolve())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))
    state = None
    if (source / "config.yaml").is_file():
        require(run_dir in (None, source), f"{source} goes on where it is; leave out --run-dir")
        require(start is None, f"{source} goes on with its own weights; leave out --init, or name a config file")
        run = open_run(source)
        require(
            config.model == run.config.model and (text is not None or config.data == run.config.data),
            f"{source} can't change its model or data when it goes on; change train options only, or start a new run",
        )
        dataset, notes = load_dataset(config.data, config.window, run.tokenizer), []
        run = dataclasses.replace(run, config=config)
    else:
        params, tokenizer = (None, None) if start is None else starting_weights(start, config.model)
        dataset = load_dataset(config.data, config.window, tokenizer)
        config, notes = fit_vocabulary(config, dataset)
        if params is not None:
            notes.append(f"weights and tokenizer of {start}, in windows of {config.window} tokens")
            state = state_of(params, config.train)

        def save(run: Run) -> None:  # at once: a run that is cut short must not go on from random weights
            if state is not None:
                run.save(state, dataset.text_sha256)

        run = create_run(run_dir or _free_run_dir(source.stem), config, dataset.tokenizer, save)
    with _locked(run):
        _train(run, dataset, notes, state)


def _train(run: Run, dataset: Dataset, notes: list[str], state: TrainState | None = None) -> None:
    """Train from `state`, or the run's newest checkpoint, or from the start where it has none."""
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    config, per = run.config, unit(dataset)
    if state is None:
        state = run.load_state(dataset.text_sha256) if run.steps() else init_state(config)
    start = int(state.step)
    evaluated = any(r["kind"] == "eval" and r["step"] == start for r in run.metrics())
    due = evaluation_due(start, config.train) if start else bool(run.steps())  # weights from elsewhere: how good?
    owed = due and dataset.val is not None and not evaluated
    if start >= config.train.steps and not owed:
        more = f"minigpt train {run.path} --train.steps {2 * start}"
        console.print(f"already trained to step {start}; for more, at the rates of that longer schedule: {more}")
        return
    if start:
        console.print(f"going on with {run.path} at step {start} of {config.train.steps}")
    run.start(start)
    table = param_table(config.model)
    console.print(f"run directory {run.path}")
    console.print(
        f"{table.total:,} parameters, {table.embedding:,} of them the {'tied ' if config.model.tied else ''}table; "
        f"{dataset.train_tokens:,} tokens to train on, {dataset.val_tokens:,} held out; {jax.devices()[0].platform}"
    )
    for note in [*dataset.notes, *notes]:
        console.print(f"note: {note}")
    for line in describe_decay(state.params, config.train):
        console.print(f"  {line}")

    def sample(params, step):
        sampling, slide = Sampling(temperature=0.8, top_p=0.95), config.model.context_len > 1
        return write_text(params, dataset.tokenizer, config, None, 200, sampling, step, slide=slide)

    save = functools.partial(run.save, data_sha256=dataset.text_sha256)
    began, last = time.perf_counter(), {}
    with (
        _stop_on_signal() as should_stop,
        _metrics_writer(run) as metrics,
        _progress_bar(console, config, start, per) as progress,
    ):
        observers = (metrics, progress, _printer(console, per))
        for record in train(config, dataset, state, save, sample, should_stop, evaluate_first=owed):
            last = record
            for observe in observers:
                observe(record)
    seconds = time.perf_counter() - began
    try:
        records = run.metrics()
        plot_loss(records, run.path / "loss.png", per)
        console.print(f"loss over steps: {run.path / 'loss.png'}")
        if any(record["kind"] == "inspect" for record in records):
            plot_tied(records, run.path / "tied.png")
            console.print(f"the two parts of the tied gradient over steps: {run.path / 'tied.png'}")
    except InputError as error:
        console.print(f"note: {error}")
    if last["kind"] == "stopped":
        console.print(f"saved at step {last['step']}; go on with: minigpt train {run.path}")
    else:
        console.print(f"trained {config.train.steps - start} steps in {seconds:.0f} s; saved in {run.path}")
        console.print(f"read what it writes: minigpt sample {run.path}")


def eval_run(run_dir: Path, text: Path | None) -> None:
    """Print the loss on all held-out text, or on all of `text`, beside an n-gram of the training text."""
    run = open_run(run_dir)
    config, tokenizer, T = run.config, run.tokenizer, run.config.window
    note = None
    try:
        dataset = load_dataset(config.data, T, tokenizer)
    except InputError as error:
        if text is None:
            raise
        dataset, note = None, f"note: no n-gram to compare with: {error}"
    params, step = run.load_params(dataset.text_sha256 if text is None else None)
    if text is None:
        source, per_char = dataset.val, dataset.tokens_per_char
        require(source is not None, f"{run_dir} holds no text out; evaluate a file: minigpt eval {run_dir} --text FILE")
    else:
        content = read_text(text)
        tokens = tokenizer.encode(content)
        require(len(tokens) >= 2, f"{text} has {len(tokens)} tokens; evaluation needs at least 2")
        source, per_char = Windows(tokens, T), len(tokens) / len(content)
    result = evaluate(params, source, config.model, max(1, TOKENS_PER_CALL // T))
    loss, per = float(result.mean()), "character" if per_char else "token"
    print(
        f"step {step}: loss {loss:.4f} nats per token, {bits(per_char, loss):.3f} bits per {per}, "
        f"perplexity {math.exp(loss):.2f}, over {int(result.count):,} tokens"
    )
    if dataset is None:
        print(note)
    elif isinstance(source, Windows) and tokenizer.vocab_size**NGRAM_ORDER < 1 << 40:
        baseline = ngram_cross_entropy(dataset.train.tokens, source.tokens, NGRAM_ORDER, tokenizer.vocab_size)
        verdict = "beats" if loss < baseline else "does not beat"
        print(
            f"order-{NGRAM_ORDER} n-gram with add-one smoothing: loss {baseline:.4f}, {bits(per_char, baseline):.3f} "
            f"bits per {per}; the model {verdict} it, by {abs(baseline - loss):.3f} nats"
        )


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens, behind the begin token where the vocabulary has one."""
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids += tokenizer.encode(prompt).tolist()
    require(bool(ids), "the prompt is empty; give at least one character")
    return ids


def text_pieces(
    params,
    tokenizer,
    config: Config,
    prompt: str | None,
    tokens: int,
    sampling: Sampling,
    seed: int,
    window: int | None = None,
    slide: bool = False,
) -> Iterator[str]:
    """Prompt and continuation as pieces of text, none of which ends within a character. `window` None is the training
    length where positions allow one."""
    if prompt is None and tokenizer.bos_id is None and tokenizer.eos_id is not None:
        ids = [tokenizer.eos_id]  # as GPT-2 was trained: a text begins where the one before ends
    else:
        if prompt is None and tokenizer.bos_id is None:
            prompt = "\n" if "\n" in tokenizer.decode(range(tokenizer.vocab_size)) else tokenizer.decode([0])
        ids = prompt_ids(tokenizer, prompt or "")
    if window is None and config.model.positions == "rope":
        window = config.model.context_len
    room = config.model.context_len - len(ids)
    if config.model.positions == "learned" and not slide and tokens > room >= 0:  # below 0 is refused
        why = f"learned positions end at context_len {config.model.context_len}; --slide goes on"
        print(f"note: {room} tokens, not {tokens}: {why}", file=sys.stderr)
        tokens = room
    pieces = stream(
        params,
        np.array(ids, np.int32),
        config.model,
        key=jax.random.key(seed),
        max_new_tokens=tokens,
        sampling=sampling,
        window=window or None,
        vocab_limit=tokenizer.vocab_size,
        stop_token=tokenizer.eos_id,
        slide=slide,
    )
    decoder, special = StreamDecoder(tokenizer), (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    for new in itertools.chain([ids], (piece.ids.tolist() for piece in pieces)):
        yield "".join(decoder.push(i) for i in new if i not in special)
    yield decoder.flush()


def write_text(*arguments, **options) -> str:
    """`text_pieces` in one."""
    return "".join(text_pieces(*arguments, **options))


def sample_run(
    run_dir: Path, prompt: str | None, tokens: int, sampling: Sampling, seed: int, window: int | None, slide: bool
) -> None:
    """Print prompt and continuation, as they are drawn."""
    require(0 <= seed < 2**32, f"--seed is {seed}; it must be in [0, {2**32})")
    run = open_run(run_dir)
    params, _ = run.load_params()
    try:
        for text in text_pieces(params, run.tokenizer, run.config, prompt, tokens, sampling, seed, window, slide):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print()
        raise
    print()
