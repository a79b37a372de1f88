"""What the user asked for, checked before anything runs."""

import dataclasses
from pathlib import Path

from ..errors import require
from .contenders import PEERS, ROWS, check_nanogpt, checked_names
from .shapes import SHAPES

TASKS = ("train", "decode", "startup")
NONE = "none"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of `minigpt bench`. `InputError` for names that are not known."""

    configs: tuple[str, ...]
    rounds: int
    seconds: float
    tasks: tuple[str, ...]
    peers: tuple[str, ...]
    rows: tuple[str, ...]
    nanogpt: Path | None

    def __post_init__(self):
        for name, known, what in (
            ("configs", SHAPES, "config"),
            ("tasks", TASKS, "task"),
            ("peers", (*PEERS, NONE), "peer"),
            ("rows", ROWS, "row"),
        ):
            names = checked_names(getattr(self, name), known, what)
            object.__setattr__(self, name, tuple(name for name in names if name != NONE))
        require(self.rounds >= 1, f"--rounds is {self.rounds}; it must be at least 1")
        require(self.seconds > 0, f"--seconds is {self.seconds}; it must be above 0")
        check_nanogpt(self.nanogpt)
