"""docs/index.md and docs/llms.txt: the pages in the order of docs/zensical.toml, with the first sentence of each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs_reference.markdown import GENERATED

DOCS = Path(__file__).parent.parent.parent / "docs"
ABOUT = (
    "LLM code agents as reproducible RL experiments: one Hydra command runs, records and scores episodes in containers."
)


class Entry(NamedTuple):
    """A page: where it is, its title, its first sentence."""

    path: str
    title: str
    sentence: str


def index_page() -> str:
    """The index, by chapters."""
    parts = [GENERATED, f"# ares_exp\n\n{ABOUT} The [README](../README.md) is where to start.\n"]
    for chapter, entries in _chapters():
        parts.append(f"\n## {chapter}\n\n")
        parts += [f"- [{entry.title}]({entry.path}): {entry.sentence}\n" for entry in entries]
    return "".join(parts)


def llms_txt() -> str:
    """The index in the form of https://llmstxt.org."""
    parts = [f"# ares_exp\n\n> {ABOUT}\n"]
    for chapter, entries in _chapters():
        parts.append(f"\n## {chapter}\n\n")
        parts += [f"- [{entry.title}]({entry.path}): {entry.sentence}\n" for entry in entries]
    return "".join(parts)


def _chapters() -> Iterator[tuple[str, list[Entry]]]:
    nav = tomllib.loads((DOCS / "zensical.toml").read_text())["project"]["nav"]
    for item in nav:
        for chapter, pages in item.items():
            if isinstance(pages, list):
                yield chapter, [_entry(page) for page in pages]


def _entry(path: str) -> Entry:
    text = (DOCS / path).read_text().removeprefix(GENERATED)
    title, _, rest = text.removeprefix("# ").partition("\n")
    paragraph = rest.strip().partition("\n\n")[0].replace("\n", " ")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return Entry(path, title, re.split(r"(?<=[.!?]) (?=[A-Z`])", plain)[0])
