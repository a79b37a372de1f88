"""What the commands do with run directories, and what they show on the terminal."""

import contextlib
import dataclasses
import json
import math
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
from .config import Config, InputError, Sampling, require
from .data import Dataset, Windows, load_dataset, ngram_cross_entropy, read_text
from .decoding import generate
from .inspect import param_table, tied_gradient, tied_norms
from .inspect.pictures import plot_loss
from .optimizer import describe_decay
from .train import bits, evaluate, init_state, train

NGRAM_ORDER = 3


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
    """The first Ctrl-C or SIGTERM asks for a stop at the next safe place; a second Ctrl-C is the usual one."""
    asked = []

    def ask(number, frame):
        asked.append(number)
        print("\nsaving; Ctrl-C again to leave at once", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _metrics_writer(run: Run) -> Iterator[Callable[[dict], None]]:
    """Observer: a JSON line for each training step and evaluation."""
    # Line by line: a kill right after a checkpoint must not take the records of the steps before it along.
    with open(run.path / "metrics.jsonl", "a", encoding="utf-8", buffering=1) as file:

        def write(record: dict) -> None:
            if record["kind"] in ("train", "eval"):
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
            console.print(line, highlight=False)
        elif record["kind"] == "sample":
            console.print(f"--- step {record['step']}\n{record['text']}\n---", markup=False, highlight=False)

    return show


def train_run(config: Config, source: Path, text: Path | None, run_dir: Path | None) -> Run:
    """Start a run from a config, or go on with the run directory `source`; see `minigpt train --help`."""
    console = Console(highlight=False, soft_wrap=True)
    resuming = (source / "config.yaml").is_file()
    if text is not None:
        tokenizer = "char" if config.data.tokenizer == "word" else config.data.tokenizer
        data = dataclasses.replace(config.data, corpus="text", path=str(text.resolve()), tokenizer=tokenizer)
        config = dataclasses.replace(config, data=data)
    if resuming:
        require(run_dir in (None, source), f"{source} goes on where it is; leave out --run-dir")
        run = open_run(source)
        require(
            config.model == run.config.model and (text is not None or config.data == run.config.data),
            f"{source} can't change its model or data when it goes on; change train options only, or start a new run",
        )
        dataset = load_dataset(config.data, config.model.context_len, run.tokenizer)
        run = dataclasses.replace(run, config=config)
        state = run.load_state(dataset.text_sha256) if run.steps() else init_state(config)
        step, notes = int(state.step), []
    else:
        dataset = load_dataset(config.data, config.model.context_len)
        config, notes = fit_vocabulary(config, dataset)
        run = create_run(run_dir or _free_run_dir(source.stem), config, dataset.tokenizer)
        state, step = init_state(config), 0
    if step >= config.train.steps:
        console.print(f"already trained to step {step}; for more: minigpt train {run.path} --train.steps {2 * step}")
        return run
    if resuming:
        run.start(step)
        console.print(f"going on with {source} at step {step} of {config.train.steps}")

    per, table = unit(dataset), param_table(config.model)
    console.print(f"run directory {run.path}")
    console.print(
        f"{table.total:,} parameters, {table.embedding:,} of them the {'tied ' if config.model.tied else ''}table; "
        f"{dataset.train_tokens:,} tokens to train on, {dataset.val_tokens:,} held out; {jax.devices()[0].platform}"
    )
    for note in [*dataset.notes, *notes]:
        console.print(f"note: {note}", markup=False)
    for line in describe_decay(state.params, config.train):
        console.print(f"  {line}", markup=False)

    def sample(params, step):
        return write_text(params, dataset.tokenizer, config, None, 200, Sampling(temperature=0.8, top_p=0.95), step)

    started = time.perf_counter()
    with (
        _stop_on_signal() as should_stop,
        _metrics_writer(run) as metrics,
        _progress_bar(console, config, step, per) as progress,
    ):
        observers = (metrics, progress, _printer(console, per))
        last = {}
        for record in train(
            config, dataset, state, lambda state: run.save(state, dataset.text_sha256), sample, should_stop
        ):
            last = record
            for observe in observers:
                observe(record)
    seconds = time.perf_counter() - started
    try:
        plot_loss(run.metrics(), run.path / "loss.png", per)
        console.print(f"loss over steps: {run.path / 'loss.png'}")
    except InputError as error:
        console.print(f"note: {error}", markup=False)
    if last["kind"] == "stopped":
        console.print(f"saved at step {last['step']}; go on with: minigpt train {run.path}")
    else:
        console.print(f"trained {config.train.steps - step} steps in {seconds:.0f} s; saved in {run.path}")
        console.print(f"read what it writes: minigpt sample {run.path}")
    return run


def _loaded(run_dir: Path) -> tuple[Run, dict, int]:
    run = open_run(run_dir)
    return run, *run.load_params()


def eval_run(run_dir: Path, text: Path | None) -> None:
    """Print the loss on all held-out text, or on all of `text`, beside an n-gram of the training text."""
    run, params, step = _loaded(run_dir)
    config, tokenizer = run.config, run.tokenizer
    dataset = load_dataset(config.data, config.model.context_len, tokenizer)
    source = dataset.val
    if text is not None:
        content = read_text(text)
        tokens = tokenizer.encode(content)
        require(len(tokens) >= 2, f"{text}: {len(tokens)} tokens; evaluation needs at least 2")
        source = Windows(tokens, config.model.context_len)
        dataset = dataclasses.replace(dataset, tokens_per_char=len(tokens) / len(content))
    require(source is not None, f"{run_dir} holds no text out; evaluate on a file: minigpt eval {run_dir} --text FILE")
    result = evaluate(params, source, config.model, max(config.train.batch_size, 2048 // config.model.context_len))
    loss, per = float(result.mean()), unit(dataset)
    print(
        f"step {step}: loss {loss:.4f} nats per token, {bits(dataset, loss):.3f} bits per {per}, "
        f"perplexity {math.exp(loss):.2f}, over {int(result.count):,} tokens"
    )
    if isinstance(source, Windows) and tokenizer.vocab_size**NGRAM_ORDER < 1 << 40:
        baseline = ngram_cross_entropy(dataset.train.tokens, source.tokens, NGRAM_ORDER, tokenizer.vocab_size)
        verdict = "beats" if loss < baseline else "does not beat"
        print(
            f"order-{NGRAM_ORDER} n-gram with add-one smoothing: loss {baseline:.4f}, {bits(dataset, baseline):.3f} "
            f"bits per {per}; the model {verdict} it, by {abs(baseline - loss):.3f} nats"
        )


def write_text(
    params, tokenizer, config: Config, prompt: str | None, tokens: int, sampling: Sampling, seed: int, window=None
) -> str:
    """Prompt and continuation as text. `window` None is the training length where positions allow one."""
    begin = getattr(tokenizer, "bos_id", None)
    ids = [] if begin is None else [begin]
    if prompt is None and not ids:
        prompt = "\n" if "\n" in tokenizer.decode(range(tokenizer.vocab_size)) else tokenizer.decode([0])
    ids += tokenizer.encode(prompt or "").tolist()
    require(bool(ids), "the prompt is empty; give at least one character")
    if window is None and config.model.positions == "rope":
        window = config.model.context_len
    if config.model.positions == "learned":
        room = max(0, config.model.context_len - len(ids))
        if tokens > room > 0:
            why = f"learned positions end at context_len {config.model.context_len}"
            print(f"note: {room} tokens, not {tokens}: {why}", file=sys.stderr)
        tokens = min(tokens, room)
    new = generate(
        params,
        np.asarray(ids, np.int32),
        config.model,
        key=jax.random.key(seed),
        max_new_tokens=tokens,
        sampling=sampling,
        window=window or None,
        vocab_limit=tokenizer.vocab_size,
        stop_token=getattr(tokenizer, "eos_id", None),
    ).tolist()
    special = {getattr(tokenizer, name, None) for name in ("pad_id", "bos_id", "eos_id")}
    return tokenizer.decode([i for i in ids + new if i not in special])


def sample_run(
    run_dir: Path, prompt: str | None, tokens: int, sampling: Sampling, seed: int, window: int | None
) -> None:
    """Print prompt and continuation."""
    require(0 <= seed < 2**32, f"--seed is {seed}; it must be in [0, {2**32})")
    run, params, _ = _loaded(run_dir)
    print(write_text(params, run.tokenizer, run.config, prompt, tokens, sampling, seed, window))


def grads_run(run_dir: Path) -> None:
    """Print the sizes of the two parts of the tied gradient by three norms, on 32 windows of held-out text."""
    run, params, step = _loaded(run_dir)
    dataset = load_dataset(run.config.data, run.config.model.context_len, run.tokenizer)
    batch = next(iter((dataset.val or dataset.train).eval_batches(32, 32)))
    split = jax.jit(tied_gradient, static_argnames="config")(params, batch, config=run.config.model)
    norms = tied_norms(split)
    V, D = split.head.shape
    print(f"step {step}, {batch.mask.sum():,} held-out tokens, loss {float(split.loss):.4f}")
    print(f"gradient of the tied table E ({V}, {D}) = lookup part + head part\n")
    print(f"{'norm':<12} {'lookup':>12} {'head':>12} {'sum':>12} {'head share':>12}")
    for name, label in (("l2", "L2"), ("l2_squared", "L2 squared"), ("l1", "L1")):
        parts = [norms[f"{part}_{name}"] for part in ("lookup", "head", "sum")]
        print(f"{label:<12} " + " ".join(f"{x:>12.5g}" for x in parts) + f" {norms[f'head_share_{name}']:>12.1%}")
    print(f"\ncosine of the two parts {norms['cosine']:+.3f}")
    print(
        f"rows with a lookup part {norms['lookup_rows']} of {V}: the head part moves every row, the lookup those read"
    )
