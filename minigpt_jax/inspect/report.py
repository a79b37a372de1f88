"""The report of a run as one HTML file that needs nothing else: no network, no server, no other file."""

import html
import json
import re
from importlib import resources

from .tables import finite

# In this order: each file uses the functions of those before it.
SCRIPTS = ("base", "axes", "charts", "tables", "training", "lens", "embedding", "main")


def render_report(data: dict) -> str:
    """The page for `data`; sections whose value is None or absent are left out, and non-finite numbers become null."""
    page = resources.files(__package__) / "page"

    def read(name: str) -> str:
        return (page / name).read_text(encoding="utf-8")

    scripts = "\n".join(read(f"{name}.js") for name in SCRIPTS)
    parts = {
        "title": html.escape(str(data.get("title") or "report")),
        "style": read("style.css"),
        "scripts": f'(() => {{\n"use strict";\n{scripts}}})();',
        "data": _script_json(data),
    }
    # In one pass, so that a text in the data that looks like a placeholder stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], read("page.html"))


def _script_json(data) -> str:
    """JSON that may stand inside a script element: no character in it can end the element or open a comment.

    Halves of surrogate pairs, as from bytes that are no text, are escaped too: UTF-8 has no place for them.
    """
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
