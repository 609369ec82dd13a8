"""Parser of a Dockerfile: its instructions, their words and flags, and here-documents."""

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
"""Names of the instructions that Docker's frontend supports, and `COMMENT`."""

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_HEREDOC = re.compile(
    rf"""(?:{_QUOTED}|\$\(\(.*?\)\))|(?<!\S)\d*<<(?P<dash>-?)[ \t]*(?P<word>(?:{_QUOTED}|[^\s<'"\\])+)(?!\S)"""
)
"""Pattern for the start of a here-document, as in BuildKit. It also matches quoted text, which callers ignore."""

_QUOTES = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""")
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]\w*)\s*=\s*(\S.*?)\s*")
_OFFICIAL = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@].*)?")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


class HereDocument(NamedTuple):
    """A here-document of an instruction. `name` is the word that ends it, and `body` has its unchanged lines.

    `strips_tabs` means that it starts with `<<-`, so that leading tabs of its lines are ignored. `has_end` is false if
    the Dockerfile ends before `name` appears.
    """

    name: str
    strips_tabs: bool
    body: str = ""
    has_end: bool = False

    @property
    def text(self) -> str:
        """The lines as a program reads them: without leading tabs if `strips_tabs` is set."""
        return re.sub(r"^\t+", "", self.body, flags=re.MULTILINE) if self.strips_tabs else self.body


class Instruction(NamedTuple):
    """An instruction. `name` is in capitals, and `line` is the number of its first line, counted from 1."""

    name: str
    value: str
    line: int
    documents: tuple[HereDocument, ...] = ()


class Syntax(NamedTuple):
    """The line number and frontend of a Dockerfile's `# syntax=` line; 0 and `None` if the file has no such line."""

    line: int
    frontend: str | None

    @property
    def is_foreign(self) -> bool:
        """Whether the frontend is not one of Docker's, so that the rest of the file may have any format."""
        return self.frontend is not None and _OFFICIAL.fullmatch(self.frontend) is None


def find_dockerfile(task: str, context_dir: Path | None) -> Path:
    """Returns the path of the Dockerfile of a task without a `docker_image`. Raises `TaskError` if it is missing."""
    if context_dir is not None and (found := context_dir / "Dockerfile").is_file():
        return found
    where = f"in {context_dir}" if context_dir is not None else "and no environment directory"
    raise TaskError(
        f"Task {task} has neither a docker_image nor a Dockerfile {where}. Add a Dockerfile, or set "
        "docker_image in the [environment] table of its task.toml."
    )


def read_text(path: Path) -> str:
    """Reads the Dockerfile's text. Raises `TaskError` if the file is missing or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read {path}: {error}.") from error


def find_syntax(text: str) -> Syntax:
    """Finds the `# syntax=` line. It counts only if all lines before it are other directives (`# name=value`)."""
    for number, line in enumerate(text.splitlines(), 1):
        if (found := _DIRECTIVE.fullmatch(line)) is None:
            break
        if found[1].lower() == "syntax":
            return Syntax(number, found[2])
    return Syntax(0, None)


def instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a Dockerfile in order. Each comment is an instruction with the name `COMMENT`."""
    from dockerfile_parse import DockerfileParser

    plain, documents = _without_bodies(text)
    for found in DockerfileParser(fileobj=io.BytesIO(plain.encode())).structure:
        line = found["startline"] + 1
        yield Instruction(found["instruction"], found["value"].strip(), line, tuple(documents.get(line, ())))


def _without_bodies(text: str) -> tuple[str, dict[int, list[HereDocument]]]:
    """Replaces the lines of here-documents, and blank lines inside an instruction, by comments, for a simple parser.

    Returns the new text, and the here-documents of each instruction by the number of its first line, counted from 1.
    """
    lines: list[str] = []
    documents: dict[int, list[HereDocument]] = {}
    open_ones: list[HereDocument] = []
    first, instruction = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if open_ones:
            current = open_ones[0]
            if (line.lstrip("\t") if current.strips_tabs else line) == current.name:
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
    """Returns the here-documents that an instruction starts, with their names but not yet with their lines."""
    found = _HEREDOC.finditer(value) if name in ("RUN", "COPY", "ADD") else ()
    return [HereDocument(_unquoted(one["word"]), bool(one["dash"])) for one in found if one["word"]]


def without_heredocs(value: str) -> str:
    """Returns the arguments of an instruction without the words that start here-documents, such as `<<EOF`."""
    return _HEREDOC.sub(lambda one: "" if one["word"] else one[0], value)


def _unquoted(word: str) -> str:
    return _QUOTES.sub(lambda quoted: next(part for part in quoted.groups() if part is not None), word)


def split_flags(value: str) -> tuple[list[tuple[str, str]], str]:
    """Returns an instruction's leading flags (pairs of a name and a value, default `""`) and the rest of its text."""
    flags = []
    while match := _FLAG.match(value):
        flags.append((match[1], match[2] or ""))
        value = value[match.end() :]
    return flags, value


def json_words(value: str) -> tuple[str, ...]:
    """Returns the words of an instruction in exec form (`["a", "b"]`). Returns `()` if it is in shell form."""
    try:
        words: Any = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return ()
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()


def split_words(value: str) -> tuple[str, ...]:
    """Splits the arguments of an instruction in shell form into words. Quotes and variables stay as they are."""
    from dockerfile_parse.util import WordSplitter

    return tuple(WordSplitter(value).split(dequote=False))


def ignored_patterns(context: Path) -> list[str]:
    """Returns the patterns of a context's `.dockerignore` by docker-py's rules; `[]` if it is missing. Blocking."""
    path = context / ".dockerignore"
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def names_not_ignored(context: Path) -> set[str]:
    """Returns the relative paths of all files and directories that `.dockerignore` does not exclude. Blocking."""
    from docker.utils.build import exclude_paths

    return set(exclude_paths(str(context), ignored_patterns(context)))
