"""The HTML page of a report. It is one file that contains all styles, scripts and data, and loads no other files.

Texts from agents and tasks are untrusted. They are stored in JSON blocks, which an HTML parser does not parse as HTML.
The script inserts them into the page as plain text. A content security policy allows only the page's own script and
style, which it identifies by their digests. Injected code could therefore not run.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from ares_exp.records.run_dir import json_text

SCRIPTS = (
    "dom.js",
    "format.js",
    "source.js",
    "table.js",
    "charts.js",
    "episode.js",
    "views.js",
    "app.js",
)
STYLE = "style.css"
LEVEL = 6
"""Compression level of the data. Level 9 would take three times as long and save one percent."""


@cache
def script() -> str:
    """Returns the JavaScript of the page, from all files in `SCRIPTS`."""
    return "\n".join(_asset(name) for name in SCRIPTS)


@cache
def style() -> str:
    """Returns the CSS of the page."""
    return _asset(STYLE)


def policy(*, connect: str = "'none'") -> str:
    """Returns the page's content security policy. It allows the script to load data only from `connect`."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script())}'",
            f"style-src '{_digest(style())}'",
            f"connect-src {connect}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def page_head(title: str, *, connect: str = "'none'") -> str:
    """Returns the start of a page. The data blocks and `page_foot` must follow it."""
    shown = " ".join("".join(char if char.isprintable() else " " for char in title).split())[:200]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(connect=connect))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(shown)}</title>\n<style>{style()}</style></head>\n"
        '<body><div id="page"><noscript>This page needs JavaScript; it loads nothing from elsewhere.</noscript></div>\n'
    )


def page_foot(payload: Mapping[str, Any]) -> str:
    """Returns the end of a page: the payload as JSON, and the script that displays it."""
    data = in_html(json_text(payload))
    return f'<script type="application/json" id="payload">{data}</script>\n<script>{script()}</script></body></html>\n'


def packed_block(name: str, packed: str) -> str:
    """Returns an HTML block that contains `packed`, a result of `pack`. The script finds it by its `name`."""
    return f'<script type="application/octet-stream" id="{escape(name)}">{packed}</script>\n'


def pack(data: Mapping[str, Any]) -> str:
    """Compresses data to ASCII text, which the page's script decompresses when it needs the data."""
    return base64.b64encode(zlib.compress(json_text(data).encode(), LEVEL)).decode()


def in_html(text: str) -> str:
    """Escapes JSON for a script block of an HTML page, so that it cannot end the block or start a comment.

    Also escapes the characters that JavaScript treats as line ends.
    """
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _asset(name: str) -> str:
    return (files("ares_exp.reports") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
