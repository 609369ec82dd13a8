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

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_HEREDOC = re.compile(
    rf"""(?:{_QUOTED}|\$\(\(.*?\)\))|(?<!\S)\d*<<(?P<dash>-?)[ \t]*(?P<word>(?:{_QUOTED}|[^\s<'"\\])+)(?!\S)"""
)
"""The opening of a here-document, by BuildKit's rules, a blank after `<<` included; or text in which none opens."""

_QUOTES = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]\w*)\s*=\s*(\S.*?)\s*")
_OFFICIAL = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@].*)?")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


class HereDocument(NamedTuple):
    """A here-document of an instruction.

    Attributes:
        name: The word that ends it.
        strips_tabs: Whether tabs at the start of its lines do not count (`<<-`).
        body: Its lines as they are, each with its line break.
        has_end: Whether a line ends it.
    """

    name: str
    strips_tabs: bool
    body: str = ""
    has_end: bool = False

    def ends_with(self, line: str) -> bool:
        """Returns whether a line is its end."""
        return (line.lstrip("\t") if self.strips_tabs else line) == self.name

    @property
    def text(self) -> str:
        """Its lines without the tabs that do not count."""
        return re.sub(r"^\t+", "", self.body, flags=re.MULTILINE) if self.strips_tabs else self.body


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: Its name in capitals.
        value: Its arguments.
        line: Its first line, counted from 1.
        documents: Its here-documents.
    """

    name: str
    value: str
    line: int
    documents: tuple[HereDocument, ...] = ()


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
    """Yields the instructions of a Dockerfile, comments as `COMMENT`."""
    from dockerfile_parse import DockerfileParser

    plain, documents = _without_bodies(text)
    for found in DockerfileParser(fileobj=io.BytesIO(plain.encode())).structure:
        line = found["startline"] + 1
        yield Instruction(found["instruction"], found["value"].strip(), line, tuple(documents.get(line, ())))


def _without_bodies(text: str) -> tuple[str, dict[int, list[HereDocument]]]:
    """Replaces here-documents, and blank lines inside an instruction, by comments for the parser.

    Returns:
        The text; and the here-documents of instructions by their first line, counted from 1.
    """
    lines: list[str] = []
    documents: dict[int, list[HereDocument]] = {}
    open_ones: list[HereDocument] = []
    first, instruction = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if open_ones:
            current = open_ones[0]
            if current.ends_with(line):
                documents[first].append(open_ones.pop(0)._replace(has_end=True))
            else:
                open_ones[0] = current._replace(body=f"{current.body}{line}\n")
            lines.append("#")
        elif line.lstrip().startswith("#") or (instruction and not line.strip()):
            lines.append("#")
        else:
            lines.append(line)
            first = first if instruction else number
            instruction += line.rstrip().removesuffix("\\") + " "
            if not line.rstrip().endswith("\\"):
                name, _, value = instruction.strip().partition(" ")
                open_ones = heredocs(name.upper(), value)
                documents[first] = []
                instruction = ""
    if open_ones:
        documents[first] += open_ones
    return "\n".join(lines) + "\n", documents


def heredocs(name: str, value: str) -> list[HereDocument]:
    """Returns the here-documents that an instruction opens, without their bodies."""
    found = _HEREDOC.finditer(value) if name in ("RUN", "COPY", "ADD") else ()
    return [HereDocument(_unquoted(one["word"]), bool(one["dash"])) for one in found if one["word"]]


def without_heredocs(value: str) -> str:
    """Returns the arguments of an instruction without the words that open here-documents."""
    return _HEREDOC.sub(lambda one: "" if one["word"] else one[0], value)


def _unquoted(word: str) -> str:
    return _QUOTES.sub(lambda quoted: next(part for part in quoted.groups() if part is not None), word)


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


def ignored_patterns(context: Path) -> list[str] | None:
    """Reads a context's `.dockerignore` as docker-py does when it sends the context; `None` without one. Blocking."""
    path = context / ".dockerignore"
    if not path.is_file():
        return None
    lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
