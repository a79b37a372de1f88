"""Gates, ratios and tables: records of runs in, Markdown out. A record is one run of one contender in one round."""

import math
import statistics
from typing import NamedTuple

from .contenders import OURS

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
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(theirs: dict[int, float], ours: dict[int, float]) -> Ratio | None:
    """How many times faster ours is, from seconds by round: each round's own ratio, then the median and the range."""
    values = [theirs[i] / ours[i] for i in theirs if i in ours]
    return Ratio(statistics.median(values), min(values), max(values)) if values else None


class Row(NamedTuple):
    """A contender's figures over the rounds."""

    name: str
    seconds: float
    """Of a step, or of a whole generation: the median of the rounds' medians."""
    over: Ratio | None
    peak_mb: float | None
    first_cold: float
    """Seconds from the start of the process to the first loss or token, in the round that found no compiled program."""
    first_warm: float | None
    compile_s: float
    records: list[Record]


SECONDS = {"train": "step_s", "decode": "decode_s"}


def row_of(records: list[Record], ours: list[Record]) -> Row:
    """One contender's records of a config and task, beside ours."""
    key = SECONDS[records[0].task]

    def by_round(records: list[Record]) -> dict[int, float]:
        return {record.round: statistics.median(record.result[key]) for record in records}

    seconds = by_round(records)
    typical = statistics.median(seconds.values())
    peaks = [record.result["peak_mb"] for record in records if record.result["peak_mb"] is not None]
    cold, *warm = (record.result["first_s"] for record in records)
    return Row(
        records[0].contender,
        typical,
        ratio(seconds, by_round(ours)),
        statistics.median(peaks) if peaks else None,
        cold,
        statistics.median(warm) if warm else None,
        records[0].result["first_call_s"] - (typical if records[0].task == "train" else 0),
        records,
    )


def rows_of(records: list[Record], exact: dict[str, bool]) -> tuple[list[Row], list[str]]:
    """Rows of one config and task in the order of first appearance, and a line for each that no gate lets through.
    `exact` says of each contender whether it computes in float32."""
    names = list(dict.fromkeys(record.contender for record in records))
    of = {name: [record for record in records if record.contender == name] for name in names}
    if OURS not in of:
        return [], [f"{name} is left out: there is no run of ours to compare with" for name in names]
    reference, rows, notes = of[OURS][0].result, [], []
    for name in names:
        if records[0].task == "train":
            refusals = [loss_gate(record.result, reference) for record in of[name]]
        else:
            refusals = [ids_gate(record.result, reference) for record in of[name] if exact[name]]
        refusal = next((text for text in refusals if text), None)
        if refusal:
            notes.append(f"{name} is left out: {refusal}")
        else:
            rows.append(row_of(of[name], of[OURS]))
    return rows, notes


def number(value: float | None, digits: int = 3) -> str:
    """About three digits: 0.123, 12.3, 1,234."""
    if value is None or not math.isfinite(value):
        return "-"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(decimals, digits)}f}"


def cold_and_warm(row: Row) -> str:
    return f"{number(row.first_cold, 2)} / {number(row.first_warm, 2)}"


def train_table(rows: list[Row], tokens: int, flops: float, ceiling: float | None) -> str:
    """`tokens` and `flops` are of a step, `ceiling` is in FLOP/s."""
    header = ["training", "ms a step", "tokens/s", "ours over it", "of ceiling", "peak MB"]
    header += ["first step s, cold / warm", "compile s", "loss differs by"]
    ours = next(row for row in rows if row.name == OURS).records[0].result["losses"]

    def cells(row: Row) -> list[str]:
        theirs = row.records[0].result["losses"]
        off = max(abs(a - b) for a, b in zip(theirs, ours, strict=False))
        return [
            row.name,
            number(1e3 * row.seconds),
            f"{tokens / row.seconds:,.0f}",
            "1" if row.name == OURS else str(row.over or "-"),
            f"{flops / row.seconds / ceiling:.0%}" if ceiling else "-",
            number(row.peak_mb),
            cold_and_warm(row),
            number(max(row.compile_s, 0.0), 2),
            "" if row.name == OURS else f"{off:.0e}",
        ]

    return markdown(header, [cells(row) for row in rows])


def decode_table(rows: list[Row], new_tokens: int) -> str:
    header = ["generation", "ms", "tokens/s", "ours over it", "peak MB", "first token s, cold / warm", "same tokens"]
    ours = next(row for row in rows if row.name == OURS).records[0].result["ids"]

    def cells(row: Row) -> list[str]:
        return [
            row.name,
            number(1e3 * row.seconds),
            f"{new_tokens / row.seconds:,.0f}",
            "1" if row.name == OURS else str(row.over or "-"),
            number(row.peak_mb),
            cold_and_warm(row),
            f"{same_tokens(row.records[0].result['ids'], ours)} of {new_tokens}",
        ]

    return markdown(header, [cells(row) for row in rows])
