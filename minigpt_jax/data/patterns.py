"""Where byte-pair encodings cut a text before they merge bytes, and where a long text can be cut all the same."""

import itertools
import re
from collections.abc import Iterable, Iterator

# GPT-4's pattern with bounded whitespace: tiktoken's regular expressions overflow their stack on megabytes of blanks.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]{0,64}"
    r"|\s{0,64}[\r\n]|\s{1,64}(?!\S)|\s{1,64}"
)
# GPT-2's pattern, so written that a run of blanks at the end of a text needs no stack; `blank_parts` brings them there.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_BLANK = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # what \s is to tiktoken, not to Python
_MANY_BLANKS = re.compile(f"(?<![{_BLANK}])[{_BLANK}]{{10000,}}")

BLANK_BETWEEN_WORDS = r"(?<=\w)(?= \w)"


def recut(pieces: Iterable[str], place: str = rf"(?:(?<=\n)(?=\w)|{BLANK_BETWEEN_WORDS})") -> Iterator[str]:
    r"""The same text cut only at a `place`, which is where a byte-pair encoding cuts in any case.

    That is between a newline and a letter or digit, or before a single blank between two of them: no match of
    `BPE_PATTERN` spans such a place or looks across it. Others, which look at the blanks before a word, have the second
    alone. A text without any is kept whole.
    """
    last, rest = re.compile(f".*{place}", re.DOTALL), ""
    for piece in pieces:
        rest += piece
        if cut := last.match(rest):
            yield rest[: cut.end()]
            rest = rest[cut.end() :]
    if rest:
        yield rest


def blank_parts(text: str) -> list[str]:
    """Cut before the last of very many blanks, where GPT-2's pattern does so, too; a stack overflows otherwise."""
    cuts = [0, *(run.end() - 1 for run in _MANY_BLANKS.finditer(text) if run.end() < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cuts)]
