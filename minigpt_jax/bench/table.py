"""Gates, ratios and tables: records of runs in, Markdown out. A record is one run of one contender in one round."""

import dataclasses
import math
import statistics
from typing import NamedTuple

from .contenders import OURS, Contender

LOSS_TOLERANCE = 1e-3
SAME_TOKENS = 16


class Record(NamedTuple):
    config: str
    task: str
    contender: str
    round: int
    result: dict
    """What the child sent."""


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table that can be read as it is; all columns but the first are aligned on the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *padded[1:]]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def loss_gate(result: dict, reference: dict) -> str | None:
    """Why a training run is not shown: its loss of the same weights and batch is another one. None: it is shown."""
    theirs, ours = result["check_loss"], reference["check_loss"]
    if abs(theirs - ours) <= LOSS_TOLERANCE:  # NaN is not
        return None
    return f"its first loss is {theirs:.5f} and ours {ours:.5f} with the same weights: not the same function"


def ids_gate(result: dict, reference: dict) -> str | None:
    """Why a float32 run of generation is not shown: it writes other tokens."""
    same = same_tokens(result["ids"], reference["ids"])
    if same >= min(SAME_TOKENS, len(reference["ids"])) and len(result["ids"]) == len(reference["ids"]):
        return None
    return f"token {same} of its greedy text is not ours, with the same weights: not the same function"


def same_tokens(a: list[int], b: list[int]) -> int:
    """How many tokens are equal before the first that is not."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Ratio(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.low)}, {number(self.high)}]"


SECONDS = {"train": "step_s", "decode": "decode_s"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender's runs of one config and task."""

    records: list[Record]

    @property
    def name(self) -> str:
        return self.records[0].contender

    @property
    def first(self) -> dict:
        """What its first run sent."""
        return self.records[0].result

    @property
    def by_round(self) -> dict[int, float]:
        """Seconds of a step, or of a whole generation: each round's median."""
        return {r.round: statistics.median(r.result[SECONDS[r.task]]) for r in self.records}

    @property
    def seconds(self) -> float:
        return statistics.median(self.by_round.values())

    @property
    def peak_mb(self) -> float | None:
        return median([r.result["peak_mb"] for r in self.records if r.result["peak_mb"] is not None])

    @property
    def start(self) -> str:
        """Seconds from the start of the process to the first loss or token: cold / warm."""
        cold, *warm = (r.result["first_s"] for r in self.records)
        return f"{number(cold, 2)} / {number(median(warm), 2)}"

    def times_as_fast_as(self, other: "Row") -> Ratio | None:
        """Each round's own ratio of speeds, then the median and the range."""
        mine, theirs = self.by_round, other.by_round
        values = [theirs[i] / mine[i] for i in mine if i in theirs]
        return Ratio(statistics.median(values), min(values), max(values)) if values else None


def rows_of(records: list[Record], exact: dict[str, bool]) -> tuple[list[Row], list[str]]:
    """Rows of one config and task, ours first, and a line for each that no gate lets through. `exact` says of each
    contender whether it computes in float32."""
    of = {name: [r for r in records if r.contender == name] for name in (OURS, *(r.contender for r in records))}
    if not of[OURS]:
        return [], [f"{name} is left out: there is no run of ours to compare with" for name in of if of[name]]
    reference, rows, notes = of[OURS][0].result, [], []
    for name, runs in of.items():
        if runs[0].task == "train":
            refusals = [loss_gate(r.result, reference) for r in runs]
        else:
            refusals = [ids_gate(r.result, reference) for r in runs if exact[name]]
        refusal = next((text for text in refusals if text), None)
        if refusal:
            notes.append(f"{name} is left out: {refusal}")
        else:
            rows.append(Row(runs))
    return rows, notes


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def number(value: float | None, digits: int = 3) -> str:
    """About so many digits: 0.123, 12.3, 1,234."""
    if value is None or not math.isfinite(value):
        return "-"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(decimals, 0), digits)}f}"


def _beside_ours(row: Row, ours: Row) -> str:
    return "1" if row is ours else str(ours.times_as_fast_as(row) or "-")


def train_table(rows: list[Row], tokens: int, flops: float, ceiling: float | None) -> str:
    """Rows with ours first. `tokens` and `flops` are of a step, `ceiling` is in FLOP/s."""
    header = ["training", "ms a step", "tokens/s", "ours over it", "of ceiling", "peak MB"]
    header += ["first step s, cold / warm", "compile s", "loss differs by"]
    ours = rows[0]

    def cells(row: Row) -> list[str]:
        losses = zip(row.first["losses"], ours.first["losses"], strict=True)
        return [
            row.name,
            number(1e3 * row.seconds),
            f"{tokens / row.seconds:,.0f}",
            _beside_ours(row, ours),
            f"{flops / row.seconds / ceiling:.0%}" if ceiling else "-",
            number(row.peak_mb),
            row.start,
            number(max(row.first["first_call_s"] - row.seconds, 0.0), 2),
            "" if row is ours else f"{max(abs(a - b) for a, b in losses):.0e}",
        ]

    return markdown(header, [cells(row) for row in rows])


def decode_table(rows: list[Row], new_tokens: int) -> str:
    """Rows with ours first."""
    header = ["generation", "ms", "tokens/s", "ours over it", "peak MB", "first token s, cold / warm", "same tokens"]
    ours = rows[0]

    def cells(row: Row) -> list[str]:
        return [
            row.name,
            number(1e3 * row.seconds),
            f"{new_tokens / row.seconds:,.0f}",
            _beside_ours(row, ours),
            number(row.peak_mb),
            row.start,
            f"{same_tokens(row.first['ids'], ours.first['ids'])} of {new_tokens}",
        ]

    return markdown(header, [cells(row) for row in rows])


def summary_cells(rows: list[Row], contenders: dict[str, Contender]) -> list[str] | None:
    """Ours over the fastest peer: of all float32 rows, of those as installed, of all rows; then its peak memory over
    that of the fastest float32 peer. None where there is no peer."""
    ours = rows[0]
    mine = [row for row in rows if contenders[row.name].program == "ours"]
    peers = [row for row in rows if contenders[row.name].program == "peers"]
    float32 = [row for row in peers if contenders[row.name].float32]
    installed = [row for row in float32 if contenders[row.name].as_installed]

    def fastest(group: list[Row]) -> Row:
        return min(group, key=lambda row: row.seconds)

    def beside(us: Row, group: list[Row]) -> str:
        return f"{us.times_as_fast_as(fastest(group))} {fastest(group).name}" if group else "-"

    if not peers:
        return None
    memory = ours.peak_mb / fastest(float32).peak_mb if float32 and ours.peak_mb else None
    return [beside(ours, float32), beside(ours, installed), beside(fastest(mine), peers), number(memory)]
