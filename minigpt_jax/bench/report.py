"""The report: what was measured, as Markdown that can be read as it is, and as JSON."""

import dataclasses

from ..config import TrainConfig
from .contenders import Contender
from .machine import describe
from .plan import Plan
from .shapes import SHAPES
from .table import Record, Row, decode_table, markdown, median, number, rows_of, summary_cells, train_table

METHOD = """\
Every run is a fresh process, one at a time, all contenders in turn (A B C A B C). Everything runs on the CPU, with
each library's own number of threads, and with caches of compiled programs in a folder of this run's own. All get the
same weights, batches of random tokens, and function: GPT-2's (learned positions, tanh GELU, biases, tied table, no
dropout), whatever the config is called. A step is forward, mean cross-entropy, backward, clipping to a global norm of
1, AdamW (3e-4, 0.9, 0.95, 1e-8, decay 0.1 of matrices and tables), and reading the loss back; a time is that of {K}
steps, which for us are one compiled call, as in `minigpt train`. Generation is greedy, of one text, behind a prompt of
16 tokens. A figure is the median of the rounds' medians; a ratio is taken within each round, then its median and
[least, most]. A training row is shown only if its first loss is ours to 1e-3, a float32 row of generation only if its
first 16 tokens are ours.

- `of ceiling`: FLOPs of a step (3 times the forward pass: two for each weight of a matmul and token, the head among
  them; attention in full, not halved for causality) by time, over the fastest float32 matmul measured above. It may
  exceed 100 % in bfloat16.
- `first step`, `first token`: seconds from the start of the process, imports and loading of weights among them; cold is
  the first round, which found no compiled program of its own kind, warm the median of the later ones.
- `compile`: the first call of the first round, less one step (where nothing is compiled: warming up).
- `loss differs by`: the largest difference over 9 steps.
- `peak MB`: resident memory of the process, compilers in processes of their own not counted."""

LEGEND = {
    "eager": "PyTorch as it runs without compiling, with its default AdamW",
    "compiled": "`torch.compile` of model and loss, and the fused AdamW",
    "bf16": "bfloat16 by autocast in training, weights cast to bfloat16 in generation",
    "hook": "PyTorch's matrix library (Intel's MKL) takes a slower path on processors that are not Intel's; here a "
    "preloaded one-line library (LD_PRELOAD, for this process alone) answers its question for the vendor with Intel. "
    "Rows without it are PyTorch as installed",
    "transformers": "GPT2LMHeadModel with its default attention, and torch's fused tanh GELU, the same function as its "
    "default",
    "nanoGPT": "the `GPT` of the checkout's model.py, its GELU set to the tanh form; its own `generate`, with top_k=1, "
    "has no cache, so figures of generation against it measure the algorithm",
}


@dataclasses.dataclass
class Measurements:
    """All that is known so far; complete or not, a report can be made of it."""

    plan: Plan
    machine: dict = dataclasses.field(default_factory=describe)
    date: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Who is left out everywhere, and why."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """GFLOP/s by library and size."""
    weights: dict[str, dict] = dataclasses.field(default_factory=dict)
    """By config: parameters and flops_per_token."""
    contenders: list[Contender] = dataclasses.field(default_factory=list)
    records: list[Record] = dataclasses.field(default_factory=list)
    failures: dict[tuple[str, str, str], str] = dataclasses.field(default_factory=dict)
    """(config, task, contender) -> why there is no row."""
    commands: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Seconds to the help's first byte, and to the first generated token."""

    @property
    def ceiling(self) -> float | None:
        """FLOP/s of the fastest float32 matmul."""
        speeds = [speed for by_size in self.ceilings.values() for speed in by_size.values()]
        return 1e9 * max(speeds) if speeds else None

    def rows(self, config: str, task: str) -> tuple[list[Row], list[str]]:
        """The rows that may be shown, and a line for each that may not."""
        died = {who: why for (name, what, who), why in self.failures.items() if (name, what) == (config, task)}
        of_this = [r for r in self.records if (r.config, r.task) == (config, task) and r.contender not in died]
        rows, notes = rows_of(of_this, {c.name: c.float32 for c in self.contenders})
        return rows, [f"{who} is left out: {why}" for who, why in died.items()] + notes


def render(found: Measurements) -> str:
    """The whole report."""
    words = [f"- `{word}`: {text}." for word, text in LEGEND.items() if any(word in c.name for c in found.contenders)]
    parts = [
        "# What `minigpt bench` measured",
        _machine(found),
        "\n".join(f"- {note}" for note in found.notes),
        *_summary(found),
        *(part for config in found.plan.configs for part in _config(found, config)),
        *_commands(found),
        *_ceilings(found),
        "## How",
        METHOD.format(K=TrainConfig().steps_per_call),
        "\n".join(words),
    ]
    return "\n\n".join(part for part in parts if part)


def _machine(found: Measurements) -> str:
    m = found.machine
    memory = f"{m['memory_gb']:.0f} GB, " if m["memory_gb"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    settings = ", ".join(f"{name}={value}" for name, value in m["environment"].items()) or "nothing"
    return (
        f"{found.date}; {m['processor']}, {m['cores']} cores, {memory}{m['system']}; Python {m['python']}, {versions}. "
        f"Rounds: {found.plan.rounds}, each run at least {found.plan.seconds:g} s. "
        f"Load average at the start: {m['load']}. "
        f"Set in the environment that can change speed: {settings}."
    )


def _ceilings(found: Measurements) -> list[str]:
    if not found.ceilings:
        return []
    sizes = list(next(iter(found.ceilings.values())))
    rows = [[name, *(f"{by_size[n]:.0f}" for n in sizes)] for name, by_size in found.ceilings.items()]
    header = ["GFLOP/s", *(f"{n} x {n}" for n in sizes)]
    return ["## Ceiling: square float32 matmuls", markdown(header, rows)]


def _summary(found: Measurements) -> list[str]:
    contenders, table = {c.name: c for c in found.contenders}, []
    for config in found.plan.configs:
        for task, word in (("train", "training"), ("decode", "generation")):
            rows, _ = found.rows(config, task)
            cells = summary_cells(rows, contenders) if rows else None
            table += [[f"{config} {word}", *cells]] if cells else []
    header = ["speed of ours over that of", "the fastest in float32", "the fastest in float32 as installed"]
    header += ["the fastest of all", "peak memory over the first's"]
    return ["## Ours over the fastest peer", markdown(header, table)] if table else []


def _config(found: Measurements, config: str) -> list[str]:
    shape, parts = SHAPES[config], []
    m, drawn = shape.model, found.weights.get(config)
    size = f"V={m.vocab_size} D={m.d_model} L={m.n_layers} H={m.n_heads} T={m.context_len} B={shape.batch}"
    rows, notes = found.rows(config, "train")
    if rows:
        tokens = shape.batch * m.context_len
        parts.append(train_table(rows, tokens, 3 * drawn["flops_per_token"] * tokens, found.ceiling))
        size += f", {drawn['parameters']:,} parameters; our first loss {rows[0].first['check_loss']:.5f}"
    decoded, more = found.rows(config, "decode")
    if decoded:
        parts.append(decode_table(decoded, shape.new_tokens))
    notes = "\n".join(f"- {note}" for note in notes + more)
    return [f"## {config}: {shape.about}", size, *parts, notes] if parts or notes else []


def _commands(found: Measurements) -> list[str]:
    rows = [
        [f"`{title}`", number(seconds[0], 2), number(median(seconds[1:]), 2)]
        for title, seconds in found.commands.items()
    ]
    title = "## Our commands: seconds to the help, and to the first generated token"
    return [title, markdown(["command", "cold", "warm"], rows)] if rows else []


def raw(found: Measurements) -> dict:
    """Every number, for programs."""
    names = ("date", "machine", "versions", "notes", "ceilings", "weights", "commands")
    failures = [{"config": a, "task": b, "contender": c, "why": why} for (a, b, c), why in found.failures.items()]
    records = [{name: getattr(r, name) for name in r._fields[:-1]} | r.result for r in found.records]
    return {name: getattr(found, name) for name in names} | {"records": records, "failures": failures}
