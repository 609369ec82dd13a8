"""Reads a task's Dockerfile for a box that starts from the host's root instead of an image.

`dockerfile-parse` splits the file and expands variables; this module turns the instructions into steps, or refuses
by name what would mean something else on the host's root. `dockerfile_steps` applies the steps in a running box.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.errors import TaskError, UnsupportedTaskError

_IGNORED = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "COMMENT")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")
_DEFAULT = re.compile(r"(?<!\\)\$\{(\w+):([-+])([^{}$]*)\}")
_TOO_COMPLEX = re.compile(r"\$\{\w*[^\w}]")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$")
_HEREDOC = re.compile(r"(?:^|\s)\d?<<-?['\"]?[A-Za-z_]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command to run. `env` is its whole environment, `argv` what is executed."""

    line: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Files of the context to copy to the absolute path `target` (a directory if it ends with a slash)."""

    line: int
    sources: tuple[str, ...]
    target: str
    chmod: str | None
    chown: str | None


@dataclass(frozen=True, slots=True)
class MakeDirectoryStep:
    """A directory that has to exist from here on."""

    line: int
    path: str


Step = RunStep | CopyStep | MakeDirectoryStep


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """What a Dockerfile asks for, in order.

    Attributes:
        base: The image it names; recorded, not used: the box starts from the host's root.
        steps: What to do in the box.
        env: Variables of the finished image, those it started with included.
        workdir: Default directory of commands.
        user: Who runs them.
    """

    base: str
    steps: tuple[Step, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


def read_dockerfile(path: Path, base_env: Mapping[str, str]) -> Dockerfile:
    """Reads the Dockerfile at `path`.

    Args:
        path: The file.
        base_env: Variables that the box has before the first instruction.

    Raises:
        UnsupportedTaskError: An instruction that has no meaning on the host's root.
        TaskError: It is missing or malformed.
    """
    from dockerfile_parse import DockerfileParser

    try:
        content = _continue_over_blank_lines(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read {path}: {error}.") from error
    reader = _Reader(path, dict(base_env))
    for instruction in DockerfileParser(fileobj=io.BytesIO(content.encode())).structure:
        reader.read(instruction["instruction"], instruction["value"].strip(), instruction["startline"] + 1)
    if reader.base is None:
        raise TaskError(f"Expected {path} to begin with FROM, found no FROM.")
    return Dockerfile(reader.base, tuple(reader.steps), reader.env, reader.workdir, reader.user)


def _continue_over_blank_lines(text: str) -> str:
    """Docker skips blank lines inside a continued instruction; the parser would end it there. Comments it skips."""
    lines: list[str] = []
    for line in text.splitlines():
        before = next((one for one in reversed(lines) if not one.lstrip().startswith("#")), "")
        lines.append("#" if not line.strip() and before.rstrip().endswith("\\") else line)
    return "\n".join(lines) + "\n"


@dataclass
class _Reader:
    """The state of the build while the instructions are read one by one."""

    path: Path
    env: dict[str, str]
    base: str | None = None
    steps: list[Step] = field(default_factory=list)
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    line: int = 0

    def read(self, instruction: str, value: str, line: int) -> None:
        self.line = line
        if instruction in _IGNORED:
            return
        handler: Callable[[str], None] | None = getattr(self, f"_on_{instruction.lower()}", None)
        if handler is None:
            raise self._refusal(instruction)
        if not value:
            raise self._malformed(f"{instruction} needs an argument")
        if self.base is None and instruction not in ("FROM", "ARG"):
            raise self._malformed(f"{instruction} comes before FROM")
        handler(value)

    def _on_from(self, value: str) -> None:
        if self.base is not None:
            raise self._refusal("a second FROM (multi-stage build)")
        self.base = self._expand(_FLAG.sub("", value).split()[0])
        self.args.clear()  # those before FROM hold for FROM alone

    def _on_arg(self, value: str) -> None:
        for word in self._words(value):
            name, equals, default = word.partition("=")
            if equals:
                self.args[name] = self._expand(default)

    def _on_env(self, value: str) -> None:
        from dockerfile_parse.util import extract_key_values

        text, variables = self._variables(value)
        try:
            pairs = extract_key_values(env_replace=True, args={}, envs=variables, instruction_value=text)
        except ValueError as error:
            raise self._malformed(f"ENV: {error}") from error
        for name, _ in pairs:
            if not _NAME.fullmatch(name):
                raise self._refusal(f"ENV {name}: the name is no identifier")
        self.env |= dict(pairs)

    def _on_workdir(self, value: str) -> None:
        self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._expand(value)))
        self.steps.append(MakeDirectoryStep(self.line, self.workdir))

    def _on_user(self, value: str) -> None:
        self.user = self._expand(value)

    def _on_volume(self, value: str) -> None:
        for path in self._json(value) or self._words(value):
            self.steps.append(MakeDirectoryStep(self.line, posixpath.join(self.workdir, self._expand(path))))

    def _on_shell(self, value: str) -> None:
        words = self._json(value)
        if not words:
            raise self._malformed('SHELL needs a list, as in SHELL ["/bin/bash", "-c"]')
        self.shell = words

    def _on_healthcheck(self, value: str) -> None:
        if value.upper() != "NONE":
            raise self._refusal("HEALTHCHECK")

    def _on_run(self, value: str) -> None:
        flags, command = self._flags(value)
        for name, setting in flags:
            if name != "mount" or "type=cache" not in setting.split(","):  # a cache is an empty directory at first
                raise self._refusal(f"RUN --{name}={setting}")
        self._refuse_heredoc("RUN", command)
        argv = self._json(command) or (*self.shell, command)
        self.steps.append(RunStep(self.line, argv, {**self.args, **self.env}, self.workdir, self.user))

    def _on_copy(self, value: str) -> None:
        self._add_copy("COPY", value)

    def _on_add(self, value: str) -> None:
        self._add_copy("ADD", value)

    def _add_copy(self, instruction: str, value: str) -> None:
        flags, rest = self._flags(value)
        self._refuse_heredoc(instruction, rest)
        options = {name: self._expand(setting) for name, setting in flags if name != "link"}
        for name in options.keys() - {"chmod", "chown"}:
            raise self._refusal(f"{instruction} --{name}")
        *sources, target = (self._expand(word) for word in self._json(rest) or self._words(rest) or ("",))
        if not sources:
            raise self._malformed(f"{instruction} needs a source and a target")
        for source in sources if instruction == "ADD" else ():
            if "://" in source or source.startswith("git@") or _ARCHIVE.search(source):
                raise self._refusal(f"ADD of {source!r} (a URL, a repository or an archive)")
        target = posixpath.join(self.workdir, target) + ("/" if target in (".", "..") else "")
        self.steps.append(CopyStep(self.line, tuple(sources), target, options.get("chmod"), options.get("chown")))

    def _refuse_heredoc(self, instruction: str, text: str) -> None:
        if _HEREDOC.search(text):
            raise self._refusal(f"{instruction} with a here-document")

    def _flags(self, value: str) -> tuple[list[tuple[str, str]], str]:
        flags = []
        while match := _FLAG.match(value):
            flags.append((match[1], match[2] or ""))
            value = value[match.end() :]
        return flags, value

    def _json(self, value: str) -> tuple[str, ...]:
        """The words of the exec form; nothing if `value` is the other form (as Docker decides it)."""
        try:
            words: Any = json.loads(value) if value.startswith("[") else None
        except ValueError:
            return ()
        return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else ()

    def _words(self, value: str) -> tuple[str, ...]:
        """Splits; quotes and variables stay."""
        from dockerfile_parse.util import WordSplitter

        return tuple(WordSplitter(value).split(dequote=False))

    def _expand(self, word: str) -> str:
        """Expands variables and removes quotes."""
        from dockerfile_parse.util import WordSplitter

        text, variables = self._variables(word)
        return str(WordSplitter(text, args={}, envs=variables).dequote())

    def _variables(self, value: str) -> tuple[str, dict[str, str]]:
        """Rewrites `${name:-default}` and `${name:+other}`, which the parser does not know, as plain variables."""
        variables = {**self.args, **self.env}

        def replace(match: re.Match[str]) -> str:
            name, operator, word = match.groups()
            known, key = variables.get(name, ""), f"_{len(variables)}_"
            variables[key] = (known or word) if operator == "-" else (word if known else "")
            return "${" + key + "}"

        text = _DEFAULT.sub(replace, value)
        if _TOO_COMPLEX.search(text):
            raise self._refusal(f"the substitution in {shlex.quote(value)}")
        return text, variables

    def _refusal(self, what: str) -> UnsupportedTaskError:
        return UnsupportedTaskError(
            f"{self.path}, line {self.line}: container=local applies a Dockerfile to the host's root and cannot do "
            f"{what}. Use container=docker for this task."
        )

    def _malformed(self, what: str) -> TaskError:
        return TaskError(f"{self.path}, line {self.line}: {what}.")
