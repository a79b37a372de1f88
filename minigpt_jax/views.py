"""What the commands that look inside a run print, write as JSON, draw and put on a page."""

import json
import math
import re
import sys
from datetime import datetime
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from . import __version__
from .checkpoint import Run, open_run
from .data import Dataset, Windows, load_dataset, read_text
from .errors import InputError, replacing, require
from .inspect import (
    interface_consistency,
    lens_points,
    lens_table,
    load_probes,
    neighbours,
    norms_by_frequency,
    param_table,
    save_probes,
    tied_gradient,
    tied_stats,
    token_table,
    train_probes,
    tree_report,
)
from .inspect.geometry import all_neighbours
from .inspect.lens import NO_TARGET, LensTable
from .inspect.pictures import NORMS, plot_lens, plot_neighbours, plot_split
from .inspect.report import render_report
from .inspect.tables import Table, finite, shortened, shown
from .inspect.tuned import fingerprint
from .runs import prompt_ids, unit
from .train import TOKENS_PER_CALL

STDOUT = Path("-")
PROMPT_TOKENS = 48  # of held-out text, where no prompt is given
PAGE_ROWS = 3000  # beyond, a page holds the neighbours of the most frequent tokens only


def _show(text: str, data: dict, json_file: Path | None) -> None:
    """Print the text; write the data where asked. With `-` the data takes the text's place on stdout."""
    content = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    if json_file == STDOUT:
        print(content, end="")
        return
    if json_file is not None:
        with replacing(json_file) as file:
            file.write(content.encode())
    print(text)


def _batch(run: Run, text: Path | None, dataset: Dataset | None):
    """A batch to take gradients on, as large as an evaluation's, and what it is."""
    T = run.config.window
    if text is not None:
        tokens = run.tokenizer.encode(read_text(text))
        require(len(tokens) >= 2, f"{text} has {len(tokens)} tokens; a gradient needs at least 2")
        source, kind = Windows(tokens, T), f"tokens of {text}"
    elif dataset.val is not None:
        source, kind = dataset.val, "held-out tokens"
    else:
        source, kind = dataset.train, "training tokens"
    windows = max(1, TOKENS_PER_CALL // T)
    batch = next(source.eval_batches(windows, windows))
    return batch, f"{batch.mask.sum():,} {kind}"


_tied_gradient = jax.jit(tied_gradient, static_argnames="config")


def grads_run(run_dir: Path, text: Path | None, rows: int, json_file: Path | None, plot: Path | None) -> None:
    """Print the tied gradient by use: the whole, the rows of E, and the leaves beside it."""
    require(rows >= 0, f"--rows is {rows}; it must be at least 0")
    run = open_run(run_dir)
    config, texts = run.config.model, run.tokenizer.texts()
    dataset = None if text else load_dataset(run.config.data, run.config.window, run.tokenizer)
    params, step = run.load_params(dataset.text_sha256 if dataset else None)
    batch, source = _batch(run, text, dataset)
    split = _tied_gradient(params, batch, config=config)
    stats, tokens, leaves = tied_stats(split), token_table(split, batch, texts), tree_report(split.grads, params)
    V, D = split.head.shape
    table = Table(
        [
            {
                "norm": label,
                **{part: stats[f"{part}_{norm}"] for part in ("lookup", "head", "sum")},
                "head share": f"{stats[f'head_share_{norm}']:.1%}",
            }
            for norm, label in NORMS.items()
        ]
    )
    parts = [
        f"step {step}, {source}, loss {float(split.loss):.4f}",
        f"gradient of the tied table E ({V}, {D}) = lookup part + head part\n",
        str(table),
        f"\ncosine of the two parts {stats['cosine']:+.3f}",
        f"rows with a lookup part {stats['lookup_rows']} of {V}: the head part moves every row, the lookup those read",
    ]
    if rows:
        parts += ["\nrows of E, largest head part first", tokens.render(limit=rows)]
    parts += ["\nthe whole gradient; ratio is to the norm of the parameters", str(leaves)]
    if plot is not None:
        plot_split(stats, tokens.records, plot)
    data = {"run": str(run_dir), "step": step, "source": source, "loss": float(split.loss), "stats": stats}
    _show("\n".join(parts), data | {"tokens": tokens.records, "leaves": leaves.records}, json_file)


def _probes_path(run: Run, inside: bool) -> Path:
    return run.path / ("tuned_lens_inside.safetensors" if inside else "tuned_lens.safetensors")


def _kept_probes(run: Run, params, inside: bool) -> tuple[dict | None, str]:
    """The probes beside the run, or None and why they are of no use."""
    path = _probes_path(run, inside)
    if not path.is_file():
        return None, "no tuned lens yet"
    try:
        probes, trained_on = load_probes(path)
    except InputError as error:
        return None, str(error)
    return (probes, "") if trained_on == fingerprint(params) else (None, f"the probes in {path} are of another model")


def _probes(run: Run, params, step: int, inside: bool, steps: int | None) -> dict:
    """The run's probes of a tuned lens: those beside it; new ones where they don't fit, or `steps` asks for it."""
    path, config = _probes_path(run, inside), run.config.model
    if path.is_file() and steps is None:
        probes, why = _kept_probes(run, params, inside)
        if probes is not None:
            return probes
        print(f"{why}; training new ones", file=sys.stderr)
    dataset = load_dataset(run.config.data, run.config.window, run.tokenizer)
    run.check_text(step, dataset.text_sha256)
    windows, steps = max(1, TOKENS_PER_CALL // (4 * run.config.window)), 300 if steps is None else steps
    limit = run.tokenizer.vocab_size
    progress = train_probes(params, dataset.train, config, steps, windows, inside=inside, vocab_limit=limit)
    terminal = Console(stderr=True)
    done = list(
        track(progress, "an affine probe for each layer", steps, console=terminal, disable=not terminal.is_terminal)
    )
    save_probes(done[-1].probes, path, params)
    before, after = done[0].kl, np.mean([record.kl for record in done[-20:]], axis=0)
    for name, a, b in zip(lens_points(config, inside), before, after, strict=False):
        print(f"{name:<20} KL to final {a:8.3f} bits, through its probe {b:8.3f}", file=sys.stderr)
    print(f"probes saved: {path}", file=sys.stderr)
    return done[-1].probes


def lens_run(
    run_dir: Path,
    prompt: str,
    top_k: int,
    inside: bool,
    layer: str | None,
    tuned: bool,
    tuned_steps: int | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Print what the model would say after each layer of a prompt."""
    run = open_run(run_dir)
    points, ids = lens_points(run.config.model, inside), np.array(prompt_ids(run.tokenizer, prompt), np.int32)
    require(tuned or tuned_steps is None, "--tuned-steps trains the probes of a tuned lens; give --tuned, too")
    require(layer is None or layer in points, f"--layer is {layer!r}; choose one of {', '.join(points)}")
    params, step = run.load_params()
    probes = _probes(run, params, step, inside, tuned_steps) if tuned else None
    texts = run.tokenizer.texts()
    table = lens_table(params, ids, run.config.model, top_k=top_k, inside=inside, probes=probes, vocab_limit=len(texts))
    if plot is not None:
        plot_lens(table, texts, plot)
    kind = "tuned" if tuned else "logit"
    text = table.render(texts, None if layer is None else points.index(layer))
    data = {"run": str(run_dir), "step": step, "kind": f"{kind} lens", **_lens_data(table, prompt)}
    _show(f"step {step}, {kind} lens of {len(ids)} tokens\n\n{text}", data | {"texts": texts}, json_file)


def _lens_data(table: LensTable, prompt: str) -> dict:
    """The table with null where there is no target."""
    data = table._asdict()
    for name in ("targets", "rank_target"):
        data[name] = np.where(np.asarray(data[name]) == NO_TARGET, None, data[name])
    return {"prompt": prompt, "ids": data.pop("tokens"), **data}


def _one_token(run: Run, text: str) -> int:
    """The id of a token given as its text, or as `#id`."""
    tokenizer = run.tokenizer
    number = re.fullmatch(r"#(\d+)", text)
    try:
        ids = tokenizer.encode(text).tolist()
    except InputError:
        if not number:
            raise
        ids = []
    if len(ids) != 1 and number:
        ids = [int(number[1])]
        require(ids[0] < tokenizer.vocab_size, f"{text}: ids go up to #{tokenizer.vocab_size - 1}")
    parts = "".join(f"{' ' if k else ': '}{shown(tokenizer.decode([i]))} (#{i})" for k, i in enumerate(ids[:8]))
    require(
        len(ids) == 1,
        f"{text!r} is {len(ids)} tokens of this vocabulary{parts}; give one token, or its id as #7",
    )
    return ids[0]


def neighbours_run(run_dir: Path, token: str, count: int, json_file: Path | None, plot: Path | None) -> None:
    """Print the tokens nearest to one in E."""
    require(count >= 1, f"--count is {count}; it must be at least 1")
    run = open_run(run_dir)
    token_id, V = _one_token(run, token), run.tokenizer.vocab_size
    params, step = run.load_params()
    ids, cosines = neighbours(params, token_id, max(1, V - 1), V)
    texts = run.tokenizer.texts()
    records = [{"token": shown(texts[i]), "id": int(i), "cosine": float(c)} for i, c in zip(ids, cosines, strict=True)]
    shown_records = Table(records[:count], f"of {V:,} tokens; the median cosine is {np.median(cosines):.3f}")
    if plot is not None:
        near = ids[:count]
        plot_neighbours(texts[token_id], [texts[i] for i in near], cosines[:count], cosines, plot)
    data = {"run": str(run_dir), "step": step, "token": texts[token_id], "id": token_id}
    found = [{"text": texts[r["id"]], "id": r["id"], "cosine": r["cosine"]} for r in shown_records.records]
    heading = f"step {step}, nearest to {shown(texts[token_id])} (#{token_id}) in E by cosine\n"
    _show(f"{heading}\n{shown_records}", data | {"neighbours": found}, json_file)


def report_run(run_dir: Path, prompt: str | None, out: Path | None) -> None:
    """Write one HTML page about a run, which needs no network."""
    run = open_run(run_dir)
    out = out or run.path / "report.html"
    html = render_report(report_data(run, prompt))
    with replacing(out) as file:
        file.write(html.encode())
    print(f"{out}: {len(html.encode()) / 1e6:.1f} MB; open it in a browser")


def report_data(run: Run, prompt: str | None) -> dict:
    """All that the page shows. What the run or the machine lacks is left out, with a note."""
    config, texts = run.config.model, run.tokenizer.texts()
    V, notes, dataset = len(texts), [], None
    try:
        dataset = load_dataset(run.config.data, run.config.window, run.tokenizer)
    except InputError as error:
        notes.append(f"without gradient and frequencies: {error}")
    params, step = run.load_params(dataset.text_sha256 if dataset else None)
    table, records = param_table(config), run.metrics()
    train, val, inspections = (
        [r for r in records if r["kind"] == kind and r["step"] <= step] for kind in ("train", "eval", "inspect")
    )
    summary = [("parameters", f"{table.total:,}"), ("of them the table E", f"{table.embedding:,}")]
    summary += [("shape", f"V={config.vocab_size} D={config.d_model} L={config.n_layers} H={config.n_heads}")]
    per = unit(dataset) if dataset else "token"
    if val:
        summary.append(("held-out loss", f"{val[-1]['loss']:.3f} nats, {val[-1]['bits']:.3f} bits per {per}"))
    sizes = {record["path"]: record for record in tree_report(params).records}
    every = -(-len(train) // 2000)
    data = {
        "title": str(run.path),
        "made": datetime.now().isoformat(" ", "minutes"),
        "version": __version__,
        "step": step,
        "texts": texts,
        "unit": per,
        "params": {
            "total": table.total,
            "embedding": table.embedding,
            "rows": [
                row._asdict() | {name: sizes[row.path][name] for name in ("l2", "rms", "max", "share")}
                for row in table.rows
            ],
        },
        "tied": [{k: v for k, v in r.items() if k != "kind"} for r in inspections] or None,
    }
    if config.tied and not data["tied"]:
        notes.append("no tied gradient over training: train with train.inspect_every set, say to 50")
    if train:
        data["loss"] = {
            "train": [(r["step"], r["loss"]) for r in train[::every]],
            "val": [(r["step"], r["loss"]) for r in val],
            "bits_per_nat": (val or train)[-1]["bits"] / ((val or train)[-1]["loss"] or 1) or 1 / math.log(2),
        }
    counts = _counts(dataset, V)
    frequency = norms_by_frequency(params, counts)
    if dataset is not None and config.tied:
        batch, source = _batch(run, None, dataset)
        split = _tied_gradient(params, batch, config=config)
        data["gradient"] = {"source": source, "stats": tied_stats(split)}
        data["tokens"] = [
            record | {"row_norm": frequency.norms[record["id"]].item(), "train_count": counts[record["id"]].item()}
            for record in token_table(split, batch, texts).records
        ]
    if prompt is not None or dataset is None:
        ids = np.array(prompt_ids(run.tokenizer, texts[0] if prompt is None else prompt), np.int32)
    else:
        first = next((dataset.val or dataset.train).eval_batches(1, 1))
        ids = first.tokens[0][first.mask[0]][:PROMPT_TOKENS]
    shown_prompt = run.tokenizer.decode(ids)
    data["lens"] = _lens_data(lens_table(params, ids, config, vocab_limit=V), shown_prompt)
    probes, why = _kept_probes(run, params, inside=False)
    if probes is None:
        notes.append(f"{why}: train one with minigpt lens {run.path} --tuned --prompt ...")
    else:
        data["tuned"] = _lens_data(lens_table(params, ids, config, probes=probes, vocab_limit=V), shown_prompt)
    if V >= 2:
        listed = np.argsort(-counts, kind="stable")[:PAGE_ROWS]
        if V > PAGE_ROWS:
            notes.append(f"neighbours of the {PAGE_ROWS:,} most frequent tokens of {V:,}")
        nearest, cosines = all_neighbours(params, 10, V, np.sort(listed))
        data["neighbours"] = {"of": np.sort(listed), "ids": nearest, "cosines": cosines.round(4)}
    fit = interface_consistency(params, config, V)
    failures = [(int(v), int(fit.decoded[v])) for v in np.flatnonzero(fit.decoded != np.arange(V))]
    data["consistency"] = {"share": fit.share, "failures": failures[:50]}
    data["singular_values"] = fit.singular_values
    if frequency.correlation is not None:
        summary.append(("row norm and log count", f"correlation {frequency.correlation:+.2f}"))
    return data | {"summary": summary, "notes": [shortened(note, 300) for note in notes]}


def _counts(dataset: Dataset | None, V: int) -> np.ndarray:
    """(V,): how often each token is read in training, in one pass over the data; zeros where there is none."""
    counts = np.zeros(V, np.int64)
    for batch in dataset.train.eval_batches(1024) if dataset else ():
        counts += np.bincount(batch.tokens[batch.mask], minlength=V)
    return counts
