"""Who is measured: this package, and its peers in PyTorch in several settings."""

import dataclasses
import importlib.util
import subprocess
from pathlib import Path

from ..errors import nearest, require

OURS, OURS_BF16 = "minigpt_jax, float32", "minigpt_jax, bf16_dots"
# Settings of a peer by the name that `--rows` takes: whether it is compiled, in bfloat16, with the vendor hook.
ROWS = {
    "eager": (False, False, False),
    "eager-hook": (False, False, True),
    "compiled": (True, False, False),
    "compiled-hook": (True, False, True),
    "bf16": (True, True, True),
}
PEERS = ("transformers", "nanogpt")
EXTRA = "pip install 'minigpt_jax[parity]'"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A row of the tables, and the child process that fills it."""

    name: str
    program: str
    """The module of this folder that runs it: ours or peers."""
    settings: dict
    env: dict = dataclasses.field(default_factory=dict)
    float32: bool = True
    """Whether it computes in float32, so that it must write the very same tokens as ours."""
    as_installed: bool = True
    """Without the vendor hook."""
    tasks: tuple[str, ...] = ("train", "decode")


def our_contenders() -> list[Contender]:
    """This package with options of its own; the first is what the others are compared with."""
    return [
        Contender(OURS, "ours", {"options": {}}),
        Contender(OURS_BF16, "ours", {"options": {"bf16_dots": True}}, float32=False, tasks=("train",)),
    ]


def checked_names(names: tuple[str, ...], known, what: str) -> tuple[str, ...]:
    """The names as they are known, whatever their case, and without doubles; `InputError` for one that is not known."""
    spelt = {name.lower(): name for name in known}
    for name in names:
        require(name.lower() in spelt, f"unknown {what} {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return tuple(dict.fromkeys(spelt[name.lower()] for name in names))


def check_nanogpt(folder: Path | None) -> None:
    require(
        folder is None or (folder / "model.py").is_file(),
        f"--nanogpt {folder} holds no model.py; give the folder of a nanoGPT checkout",
    )


def revision(folder: Path) -> str:
    """The checkout's commit, where it is one."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "of unknown revision"


def peer_contenders(
    peers: tuple[str, ...], rows: tuple[str, ...], hook: Path | None, nanogpt: Path | None
) -> tuple[list[Contender], list[str]]:
    """The peers' rows, and a line for each peer that is left out. `hook` is the library with the vendor hook."""
    found, notes = [], []
    for peer in peers:
        needs = ["torch", "transformers"] if peer == "transformers" else ["torch"]
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
        if peer == "nanogpt" and nanogpt is None:
            notes.append("nanoGPT is left out: give its checkout by --nanogpt DIR")
        elif missing:
            notes.append(f"{peer} is left out: {' and '.join(missing)} not installed: {EXTRA}")
        else:
            settings = {"peer": peer, "nanogpt": nanogpt and str(nanogpt)}
            found += [contender for row in rows for contender in _contenders(peer, settings, row, hook)]
    return found, notes


def _contenders(peer: str, settings: dict, row: str, hook: Path | None) -> list[Contender]:
    compiled, bf16, hooked = ROWS[row]
    if hooked and hook is None:
        if not bf16:
            return []
        hooked = False
    title = "nanoGPT" if peer == "nanogpt" else peer
    ending = ", hook" if hooked else ""
    common = {"env": {"LD_PRELOAD": str(hook)} if hooked else {}, "float32": not bf16, "as_installed": not hooked}
    settings = settings | {"compiled": compiled, "bf16": bf16}
    if bf16:  # training by autocast, generation with weights cast once
        train = Contender(f"{title}, compiled, bf16{ending}", "peers", settings, tasks=("train",), **common)
        decode = Contender(f"{title}, eager, bf16{ending}", "peers", settings, tasks=("decode",), **common)
        return [train] if peer == "nanogpt" else [train, decode]
    tasks = ("train",) if compiled else ("train", "decode")
    return [
        Contender(f"{title}, {'compiled' if compiled else 'eager'}{ending}", "peers", settings, tasks=tasks, **common)
    ]
