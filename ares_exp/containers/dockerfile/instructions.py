"""Splits a Dockerfile into its instructions, and an instruction into its words."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp.errors import TaskError

# fmt: off
KNOWN = frozenset({
    "ADD", "ARG", "CMD", "COMMENT", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER",
    "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
})
# fmt: on
"""Every instruction of Docker's own frontend."""

_QUOTED = re.compile(r"""(?<!<<)(?<!<<-)(?:"(?:\\.|[^"\\])*"|'[^']*')""")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<(-?)(['\"]?)([A-Za-z_][\w.-]*)\2")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]\w*)\s*=\s*(\S.*?)\s*")
_OFFICIAL = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@].*)?")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


class Instruction(NamedTuple):
    """One instruction: its name in capitals, what follows it, and the line on which it begins, counted from 1."""

    name: str
    value: str
    line: int


class Syntax(NamedTuple):
    """The `# syntax=` line of a Dockerfile: where it is, and the frontend that it names; 0 and `None` without one."""

    line: int
    frontend: str | None

    @property
    def is_foreign(self) -> bool:
        """Whether it is another frontend than Docker's own: the file may then mean anything."""
        return self.frontend is not None and _OFFICIAL.fullmatch(self.frontend) is None


def read_text(path: Path) -> str:
    """The Dockerfile's text.

    Raises:
        TaskError: It is missing or no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read {path}: {error}.") from error


def find_syntax(text: str) -> Syntax:
    """The line `# syntax=`, which has to come before everything but other such lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if (found := _DIRECTIVE.fullmatch(line)) is None:
            break
        if found[1].lower() == "syntax":
            return Syntax(number, found[2])
    return Syntax(0, None)


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a Dockerfile, comments among them as `COMMENT`; bodies of here-documents are left out."""
    from dockerfile_parse import DockerfileParser

    for found in DockerfileParser(fileobj=io.BytesIO(_parseable(text).encode())).structure:
        yield Instruction(found["instruction"], found["value"].strip(), found["startline"] + 1)


def _parseable(text: str) -> str:
    """Comments in place of here-documents and of blank lines inside an instruction, which the parser does not know."""
    lines: list[str] = []
    ends: list[tuple[str, str]] = []  # of here-documents that are open
    instruction = ""
    for line in text.splitlines():
        if ends:
            strip, end = ends[0]
            if (line.lstrip("\t") if strip else line) == end:
                ends.pop(0)
            lines.append("#")
        elif line.lstrip().startswith("#") or (instruction and not line.strip()):
            lines.append("#")
        else:
            lines.append(line)
            instruction += line.rstrip().removesuffix("\\") + " "
            if not line.rstrip().endswith("\\"):
                name, _, value = instruction.strip().partition(" ")
                ends = [(strip, end) for strip, _, end in heredocs(name.upper(), value)]
                instruction = ""
    return "\n".join(lines) + "\n"


def heredocs(name: str, value: str) -> list[tuple[str, str, str]]:
    """The here-documents that an instruction opens: whether tabs go (`-`), the quote, and the word that ends each."""
    return _HEREDOC.findall(_QUOTED.sub("''", value)) if name in ("RUN", "COPY", "ADD") else []


def split_flags(value: str) -> tuple[list[tuple[str, str]], str]:
    """The leading flags of an instruction, each with its setting (`""` without one), and the rest."""
    flags = []
    while match := _FLAG.match(value):
        flags.append((match[1], match[2] or ""))
        value = value[match.end() :]
    return flags, value


def json_words(value: str) -> tuple[str, ...]:
    """The words of the exec form; nothing if `value` is the other form (as Docker decides it)."""
    try:
        words: Any = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return ()
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()


def split_words(value: str) -> tuple[str, ...]:
    """The words of the other form; quotes and variables stay."""
    from dockerfile_parse.util import WordSplitter

    return tuple(WordSplitter(value).split(dequote=False))
