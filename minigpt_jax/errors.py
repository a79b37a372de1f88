"""What every module does about wrong input: one clear line, and nothing half written."""

import contextlib
import difflib
import os
import typing
from pathlib import Path
from typing import BinaryIO


class InputError(ValueError):
    """Something that the user gave is wrong. The message is one line: what was given, what is allowed, what to do."""


class InputTypeError(InputError, TypeError):
    """As `InputError`, where the type is what is wrong (float token ids, say)."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@contextlib.contextmanager
def replacing(path: str | Path) -> typing.Iterator[BinaryIO]:
    """A binary file that takes the name `path` only when it was written to its end. Makes the folder."""
    path = Path(path)
    require(bool(path.name) and not path.is_dir(), f"{path} is a folder; give the name of a file to write")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; choose a place that can be written"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
