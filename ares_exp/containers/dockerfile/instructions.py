"""Parser of a Dockerfile's instructions and of their words."""

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
"""The instructions of Docker's frontend."""

_QUOTED = re.compile(r"""(?<!<<)(?<!<<-)(?:"(?:\\.|[^"\\])*"|'[^']*')""")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<(-?)(['\"]?)([A-Za-z_][\w.-]*)\2")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]\w*)\s*=\s*(\S.*?)\s*")
_OFFICIAL = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@].*)?")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


class Instruction(NamedTuple):
    """One instruction: its name in capitals, its arguments, and its first line, counted from 1."""

    name: str
    value: str
    line: int


class Syntax(NamedTuple):
    """The `# syntax=` line of a Dockerfile: its number and its frontend; 0 and `None` without one."""

    line: int
    frontend: str | None

    @property
    def is_foreign(self) -> bool:
        """Whether it is not Docker's frontend: the file may then have any format."""
        return self.frontend is not None and _OFFICIAL.fullmatch(self.frontend) is None


def read_text(path: Path) -> str:
    """Reads the Dockerfile's text.

    Raises:
        TaskError: It is missing or not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read {path}: {error}.") from error


def find_syntax(text: str) -> Syntax:
    """Finds the line `# syntax=`, which may follow only other such lines."""
    for number, line in enumerate(text.splitlines(), 1):
        if (found := _DIRECTIVE.fullmatch(line)) is None:
            break
        if found[1].lower() == "syntax":
            return Syntax(number, found[2])
    return Syntax(0, None)


def instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a Dockerfile, comments as `COMMENT`, without bodies of here-documents."""
    from dockerfile_parse import DockerfileParser

    for found in DockerfileParser(fileobj=io.BytesIO(_parseable(text).encode())).structure:
        yield Instruction(found["instruction"], found["value"].strip(), found["startline"] + 1)


def _parseable(text: str) -> str:
    """Replaces here-documents, and blank lines inside an instruction, by comments for the parser."""
    lines: list[str] = []
    ends: list[tuple[str, str]] = []  # of open here-documents
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
    """Returns the here-documents that an instruction opens: the `-` that strips tabs, the quote, the end word."""
    return _HEREDOC.findall(_QUOTED.sub("''", value)) if name in ("RUN", "COPY", "ADD") else []


def split_flags(value: str) -> tuple[list[tuple[str, str]], str]:
    """Splits off the leading flags of an instruction, each with its value (`""` without one)."""
    flags = []
    while match := _FLAG.match(value):
        flags.append((match[1], match[2] or ""))
        value = value[match.end() :]
    return flags, value


def json_words(value: str) -> tuple[str, ...]:
    """Returns the words of the exec form; empty if `value` is in the shell form (by Docker's rule)."""
    try:
        words: Any = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return ()
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()


def split_words(value: str) -> tuple[str, ...]:
    """Splits the words of the shell form; quotes and variables stay."""
    from dockerfile_parse.util import WordSplitter

    return tuple(WordSplitter(value).split(dequote=False))
