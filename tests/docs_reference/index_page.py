"""docs/index.md and docs/llms.txt: the pages in the order of docs/zensical.toml, with the first sentence of each."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs_reference.markdown import GENERATED

DOCS = Path(__file__).parent.parent.parent / "docs"
ABOUT = "Evaluate and train code agents in containers. Stop a run at any time and resume it in the middle of episodes."


class Entry(NamedTuple):
    """A page: where it is, its title, its first sentence."""

    path: str
    title: str
    sentence: str


def index_page() -> str:
    """The front page: its text, which is written by hand, and a list of all pages by chapters."""
    text, heading, _ = (DOCS / "index.md").read_text().partition("## All pages\n")
    parts = [text, heading]
    for chapter, entries in _chapters():
        parts.append(f"\n### {chapter}\n\n")
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
