"""Tables of records for a terminal of 100 columns."""

import dataclasses
import math
import numbers

import jax
import numpy as np

WIDTH = 100


def shown(text: str) -> str:
    """A token's text in quotes, with blanks and line ends made visible: `'\\n'`, `' the'`."""
    return repr(text)


def compact(text: str) -> str:
    """The same for a narrow cell: no quotes, and a mark for blanks."""
    return shown(text)[1:-1].replace(" ", "␣")


def shortened(text: str, width: int) -> str:
    """At most `width` characters; the middle goes, since both ends of a path or token say more."""
    return text if len(text) <= width else text[: (width - 3) // 2] + "..." + text[len(text) - (width - 2) // 2 :]


def _cell(value) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else ""
        case numbers.Integral():
            return f"{value:,}"
        case numbers.Real():
            return f"{value:.4g}" if math.isfinite(value) else str(float(value))
        case tuple() | list():
            return "x".join(map(str, value))
    return str(value)


def finite(value):
    """The same for JSON: arrays as lists, and None for NaN and the infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, np.ndarray | jax.Array):
        return finite(np.asarray(value).tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class Table:
    """Records (dicts with the same keys, values that JSON can hold) that print as a table; `note` is its last line."""

    records: list[dict]
    note: str = ""

    def __str__(self) -> str:
        return self.render()

    def render(self, columns: dict[str, str] | None = None, limit: int | None = None) -> str:
        """`columns` names those shown, and their headings; `limit` keeps the first rows."""
        if not self.records:
            return self.note
        columns = columns or {name: name.replace("_", " ") for name in self.records[0]}
        rows = [[_cell(record[name]) for name in columns] for record in self.records[:limit]]
        right = [not isinstance(self.records[0][name], str) for name in columns]
        widths = [max(map(len, column)) for column in zip(columns.values(), *rows, strict=True)]
        while sum(widths) + 2 * (len(widths) - 1) > WIDTH and max(widths) > 12:
            widths[widths.index(max(widths))] -= 1
        lines = []
        for row in [list(columns.values()), *rows]:
            cells = [shortened(cell, width) for cell, width in zip(row, widths, strict=True)]
            aligned = [
                cell.rjust(width) if r else cell.ljust(width)
                for cell, width, r in zip(cells, widths, right, strict=True)
            ]
            lines.append("  ".join(aligned).rstrip())
        left_out = len(self.records) - len(rows)
        notes = [f"... and {left_out:,} more"] if left_out else []
        return "\n".join([*lines, *notes, *([self.note] if self.note else [])])
