"""The parts of Markdown that the pages are made of: tables, links, anchors."""

import inspect
import re
from collections.abc import Iterable, Sequence

GENERATED = "<!-- Written by `python -m tests.docs_reference`: change what it reads, not this file. -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown; bars within them are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines).replace("| --- ", "|---")


def plain(text: str) -> str:
    """Text in one line, as Markdown that shows it as it is; what stands between backticks stays."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def documented_fields(record: type) -> list[tuple[str, str]]:
    """The attributes that the docstring of a record describes: names, separated by commas, and the description."""
    entries = re.split(r"\n(?= {4}\S)", (inspect.getdoc(record) or "").partition("Attributes:\n")[2].rstrip())
    return [(names, said) for names, _, said in (entry.strip().partition(":") for entry in entries)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", without_fences(text))
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_fences(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(anchor)
    return found
