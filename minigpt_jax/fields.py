"""Dataclass fields that are checked when the object is made: types, literal choices and limits."""

import dataclasses
import math
import numbers
import types
import typing
from typing import Any, Literal

from .errors import InputTypeError, nearest, require

_KINDS = {int: "an int", float: "a number", bool: "true or false", str: "text"}


def _checked_value(owner: str, name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type; YAML reads 1e-3 as a string, so a float field also takes a numeric string."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        require(
            value in allowed,
            f"{owner}.{name} is {value!r}; allowed: {', '.join(map(str, allowed))}{nearest(str(value), allowed)}",
        )
        return value
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)  # NumPy's integers too
    if hint is float and not isinstance(value, bool):
        try:
            value = float(value)
        except (TypeError, ValueError):
            pass
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):
            raise InputTypeError(f"{owner}.{name} is {value!r}; give a {hint.__name__}")
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputTypeError(f"{owner}.{name} is {value!r} ({type(value).__name__}); give {_KINDS[hint]}")
    require(hint is not float or math.isfinite(value), f"{owner}.{name} is {value}; give a finite number")
    return value


class Checked:
    """Checks every field's type and literal choices at construction; `check` then holds what needs two fields."""

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked_value(type(self).__name__, field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None: ...

    def _at_least(self, low: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(
                value is None or value >= low, f"{type(self).__name__}.{name} is {value}; it must be at least {low}"
            )

    def _within(self, low: float, high: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(low <= value < high, f"{type(self).__name__}.{name} is {value}; it must be in [{low}, {high})")
