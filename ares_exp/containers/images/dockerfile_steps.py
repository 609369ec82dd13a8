"""The steps of a task's Dockerfile: parsed, and applied one after another in a running container.

This replaces an image build if the backend has no image builder, or cannot send files to it. The parser rejects
instructions that cannot be applied in a running container.
"""

from __future__ import annotations

import glob
import posixpath
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.containers.container import ExecResult
from ares_exp.containers.images.dockerfile_instructions import (
    HereDocument,
    Instruction,
    ignored_patterns,
    instructions,
    json_words,
    names_not_ignored,
    read_text,
    split_flags,
    split_words,
    without_heredocs,
)
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError

_FOLLOWED = ("FROM", "ARG", "ENV", "WORKDIR", "USER", "SHELL")
_IGNORED = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "COMMENT")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$")


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command to run, with all its environment variables, its directory and its user."""

    line: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Files of the build context to copy to the path `target`. If `target` ends with a slash, it is a directory."""

    line: int
    sources: tuple[str, ...]
    target: str
    chmod: str | None
    chown: str | None


@dataclass(frozen=True, slots=True)
class MakeDirectoryStep:
    """A directory to create, from `WORKDIR` or `VOLUME`."""

    line: int
    path: str


Step = RunStep | CopyStep | MakeDirectoryStep


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A parsed Dockerfile: its base image, its steps, and the image's environment variables, directory and user."""

    base: str
    steps: tuple[Step, ...]
    env: Mapping[str, str]
    workdir: str
    user: str


@dataclass(frozen=True, slots=True)
class Base:
    """The state of the container before the first step.

    Attributes:
        env: Environment variables of the container, as far as they are known.
        workdir: Working directory. Empty if it is unknown: relative paths then stay relative.
        args: Values of predefined build arguments (`TARGETARCH`, …).
        built_lines: Number of lines of the Dockerfile that the container's image already contains. These lines produce
            no steps, and are never rejected. `env` and `workdir` describe the state after them.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    args: Mapping[str, str] = field(default_factory=dict)
    built_lines: int = 0


def read_dockerfile(path: Path, base: Base, *, refusal: str) -> Dockerfile:
    """Parses the Dockerfile at `path`. `base` is the state in which its steps will be applied.

    Raises `UnsupportedTaskError` for an unsupported instruction, and `TaskError` if the file is missing or malformed.
    `refusal` is the message for an unsupported instruction, in which `{}` stands for the instruction.
    """
    reader = _Reader(path, base, refusal)
    for instruction in instructions(read_text(path)):
        reader.read(instruction)
    if reader.base is None:
        raise TaskError(f"{path} has no FROM instruction.")
    steps = tuple(step for step in reader.steps if step.line > base.built_lines)
    return Dockerfile(reader.base, steps, reader.env, reader.workdir, reader.user)


@dataclass
class _Reader:
    path: Path
    start: Base
    refusal: str
    base: str | None = None
    steps: list[Step] = field(default_factory=list)
    global_args: dict[str, str] = field(default_factory=dict)
    stages: dict[str, tuple[dict[str, str], str, str, tuple[str, ...]]] = field(default_factory=dict)
    stage: str = ""
    line: int = 0
    documents: tuple[HereDocument, ...] = ()
    env: dict[str, str] = field(init=False)
    args: dict[str, str] = field(init=False)
    unread: UnsupportedTaskError | None = None

    def __post_init__(self) -> None:
        self.global_args.update(self.start.args)
        self._start_stage("")

    def _start_stage(self, base: str) -> None:
        """Starts a stage with the state of the earlier stage `base`, or the initial state if `base` is an image."""
        fresh = (dict(self.start.env), self.start.workdir, "root", ("/bin/sh", "-c"))
        env, self.workdir, self.user, self.shell = self.stages.get(base.lower(), fresh)
        self.env = dict(env)
        self.args = {}

    def read(self, found: Instruction) -> None:
        instruction, value, line, self.documents = found
        previous, self.line = self.line, line
        is_built = line <= self.start.built_lines
        if previous <= self.start.built_lines < line:  # continue from the state of the container after the built lines
            if self.unread is not None:
                raise self.unread
            self.env |= self.start.env
            self.workdir = self.start.workdir or self.workdir
        if instruction in _IGNORED or (is_built and instruction not in _FOLLOWED):
            return
        try:
            self._handle(instruction, value)
        except UnsupportedTaskError as error:
            if not is_built:
                raise
            if instruction not in ("ENV", "WORKDIR"):  # `start` contains their effects
                self.unread = error

    def _handle(self, instruction: str, value: str) -> None:
        handler: Callable[[str], None] | None = getattr(self, f"_on_{instruction.lower()}", None)
        if handler is None:
            raise self._refusal(instruction)
        if not value:
            raise self._malformed(f"{instruction} needs an argument")
        if self.base is None and instruction not in ("FROM", "ARG"):
            raise self._malformed(f"{instruction} comes before FROM")
        handler(value)

    def _on_from(self, value: str) -> None:
        if self.base is not None and self.line > self.start.built_lines:
            raise self._refusal("a second FROM (multi-stage build)")
        if self.base is None:
            self.global_args |= self.args
        else:
            self.stages[self.stage] = (self.env, self.workdir, self.user, self.shell)
        self.args, self.env = dict(self.global_args), {}  # arguments before the first FROM apply to every FROM
        base, *rest = split_flags(value)[1].split() or [""]
        try:
            self.base = self._expand(base)
        except UnsupportedTaskError:
            if self.line > self.start.built_lines:
                raise
            self.base = base
        self.stage = rest[1].lower() if len(rest) == 2 else f" {self.line}"  # cannot be referenced
        self._start_stage(self.base)

    def _on_arg(self, value: str) -> None:
        for word in split_words(value):
            name, equals, default = word.partition("=")
            if equals:
                self.args[name] = self._expand(default)
            elif name in self.global_args:
                self.args[name] = self.global_args[name]

    def _on_env(self, value: str) -> None:
        from dockerfile_parse.util import extract_key_values

        text, variables = self._variables(value)
        try:
            pairs = extract_key_values(env_replace=True, args={}, envs=variables, instruction_value=text)
        except ValueError as error:
            raise self._malformed(f"ENV: {error}") from error
        for name, _ in pairs:
            if not (name.isascii() and name.isidentifier()):
                raise self._refusal(f"ENV {name}: the name is not an identifier")
        self.env |= dict(pairs)

    def _on_workdir(self, value: str) -> None:
        self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._expand(value)))
        self.steps.append(MakeDirectoryStep(self.line, self.workdir))

    def _on_user(self, value: str) -> None:
        self.user = self._expand(value)

    def _on_volume(self, value: str) -> None:
        for path in json_words(value) or split_words(value):
            self.steps.append(MakeDirectoryStep(self.line, posixpath.join(self.workdir, self._expand(path))))

    def _on_shell(self, value: str) -> None:
        words = json_words(value)
        if not words:
            raise self._malformed('SHELL needs a list, as in SHELL ["/bin/bash", "-c"]')
        self.shell = words

    def _on_healthcheck(self, value: str) -> None:
        if value.upper() != "NONE":
            raise self._refusal("HEALTHCHECK")

    def _on_run(self, value: str) -> None:
        flags, command = split_flags(value)
        for name, setting in flags:
            if name != "mount" or "type=cache" not in setting.split(","):  # a cache is initially an empty directory
                raise self._refusal(f"RUN --{name}={setting}")
        for document in self.documents:
            if not document.has_end:
                raise self._malformed(f"expected a line `{document.name}` to end the here-document")
        argv = json_words(command) or run_words(command, self.documents, self.shell)
        self.steps.append(RunStep(self.line, argv, {**self.args, **self.env}, self.workdir, self.user))

    def _on_add(self, value: str) -> None:
        self._on_copy(value, "ADD")

    def _on_copy(self, value: str, instruction: str = "COPY") -> None:
        flags, rest = split_flags(value)
        if self.documents:
            raise self._refusal(f"{instruction} with a here-document")
        options = {name: self._expand(setting) for name, setting in flags if name != "link"}
        for name in options.keys() - {"chmod", "chown"}:
            raise self._refusal(f"{instruction} --{name}")
        *sources, target = (self._expand(word) for word in json_words(rest) or split_words(rest) or ("",))
        if not sources:
            raise self._malformed(f"{instruction} needs a source and a target")
        for source in sources if instruction == "ADD" else ():
            if "://" in source or source.startswith("git@") or _ARCHIVE.search(source):
                raise self._refusal(f"ADD of {source!r} (a URL, a repository or an archive)")
        target = posixpath.join(self.workdir, target) + ("/" if target in (".", "..") else "")
        self.steps.append(CopyStep(self.line, tuple(sources), target, options.get("chmod"), options.get("chown")))

    def _expand(self, word: str) -> str:
        from dockerfile_parse.util import WordSplitter

        text, variables = self._variables(word)
        return str(WordSplitter(text, args={}, envs=variables).dequote())

    def _variables(self, value: str) -> tuple[str, dict[str, str]]:
        """Calls `simplify` with all known variables. Raises `UnsupportedTaskError` for other substitutions."""
        try:
            return simplify(value, {**self.args, **self.env})
        except ValueError as error:
            raise self._refusal(f"the substitution in {shlex.quote(value)}") from error

    def _refusal(self, what: str) -> UnsupportedTaskError:
        return UnsupportedTaskError(f"{self.path}, line {self.line}: {self.refusal.format(what)}")

    def _malformed(self, what: str) -> TaskError:
        return TaskError(f"{self.path}, line {self.line}: {what}.")


_RUN_FILE = """
file=$(mktemp) && printf %s "$1" >"$file" && chmod 700 "$file" && "$file"
code=$?
rm -f "$file"
exit $code
"""


def run_words(command: str, documents: Sequence[HereDocument], shell: Sequence[str]) -> tuple[str, ...]:
    """Returns the command line of a RUN in shell form, including its here-documents, by BuildKit's rules.

    A single here-document without a command is a script, run by the interpreter in its `#!` line, or by `shell`.
    """
    if len(documents) != 1 or without_heredocs(command).strip():
        return (*shell, command + "".join(f"\n{one.body}{one.name}" for one in documents))
    text = documents[0].text
    return ("/bin/sh", "-c", _RUN_FILE, "sh", text) if text.startswith("#!") else (*shell, text)


_DEFAULT = re.compile(r"(?<!\\)\$\{(\w+):([-+])((?:[^{}$]|\$(?=\w))*)\}")
_PLAIN = re.compile(r"\$(\w+)")
_TOO_COMPLEX = re.compile(r"\$\{\w*[^\w}]")


def simplify(text: str, variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Replaces each `${name:-default}` and `${name:+other}` by a new variable, for a parser that lacks these forms.

    Returns the new text, and `variables` with the new variables. Raises `ValueError` for other forms of substitution.
    """
    known = dict(variables)

    def replace(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        word = _PLAIN.sub(lambda inner: known.get(inner[1], ""), word)
        value, key = known.get(name, ""), f"_{len(known)}_"
        known[key] = (value or word) if operator == "-" else (word if value else "")
        return "${" + key + "}"

    simple = _DEFAULT.sub(replace, text)
    if _TOO_COMPLEX.search(simple):
        raise ValueError(f"the substitution in {text!r} is not supported")
    return simple, known


_LAST_LINES = 20

RunInContainer = Callable[..., Awaitable[ExecResult]]
"""Function that runs a command. It accepts the keyword arguments `env`, `cwd` and `user` of `Container.exec`.

`env` contains all variables, by default only the container's PATH. By default, `user` is root and `cwd` is `/`.
"""

UploadToContainer = Callable[[Path, str], Awaitable[None]]
"""Function that copies a file or directory into the container, like `Container.upload`."""


def check_sources(dockerfile: Dockerfile, context: Path) -> None:
    """Raises `TaskError` if a source of a COPY is missing, or `UnsupportedTaskError` if it leads out of the context."""
    for step in dockerfile.steps:
        if isinstance(step, CopyStep):
            find_sources(step, context)


def find_sources(step: CopyStep, context: Path) -> list[Path]:
    """Returns the files that a COPY names, in order, with links resolved. Raises the errors of `match_source`."""
    found = [path.resolve() for source in step.sources for path in match_source(source, context, step.line)]
    if len(found) > 1 and not step.target.endswith("/"):
        raise TaskError(
            f"{context}/Dockerfile, line {step.line}: several sources need a target that ends with '/', "
            f"got {step.target!r}."
        )
    return found


def match_source(source: str, context: Path, line: int) -> list[Path]:
    """Returns the paths below `context.resolve()` that match one source of the COPY on `line`.

    Raises `TaskError` if no path matches, and `UnsupportedTaskError` if a path or link leads out of the context.
    """
    root = context.resolve()
    pattern = posixpath.normpath(source.lstrip("/"))
    if pattern.split("/")[0] == "..":
        raise UnsupportedTaskError(
            f"{context}/Dockerfile, line {line}: {source!r} leads out of the build context {context}."
        )
    paths = sorted(root.glob(pattern)) if glob.has_magic(pattern) else [root / pattern]
    found = [path for path in paths if path.exists()]
    if not found:
        raise TaskError(f"{context}/Dockerfile, line {line}: nothing in {context} matches {source!r}.")
    if any(not path.resolve().is_relative_to(root) for path in found):
        raise UnsupportedTaskError(
            f"{context}/Dockerfile, line {line}: {source!r} leads out of the build context {context}."
        )
    return found


def stage_context(context: Path, directory: Path) -> Path:
    """Returns a directory with the context, without the files that `.dockerignore` excludes.

    This is a copy in `directory`, or the context itself if `.dockerignore` excludes nothing.
    """
    if not ignored_patterns(context):
        return context
    for name in sorted(names_not_ignored(context)):
        source, target = context / name, directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and not source.is_symlink():
            target.mkdir(exist_ok=True)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
    return directory


async def apply_step(step: Step, context: Path, run: RunInContainer, upload: UploadToContainer) -> None:
    """Applies one step. Raises `ContainerStartError` with the end of the command's output if a command fails."""
    if isinstance(step, RunStep):
        command = f"exec {shlex.join(step.argv)}"
        result = await run(command, env=step.env, cwd=step.workdir, user=step.user)
        _expect_success(result, step, f"RUN {step.argv[-1]}")
    elif isinstance(step, MakeDirectoryStep):
        _expect_success(await run(f"mkdir -p -- {shlex.quote(step.path)}"), step, f"creating {step.path}")
    else:
        await _copy(step, context, run, upload)


async def _copy(step: CopyStep, context: Path, run: RunInContainer, upload: UploadToContainer) -> None:
    copied: list[str] = []
    is_directory = step.target.endswith("/")
    for source in find_sources(step, context):
        if source.is_dir():
            await upload(source, step.target)
            copied += [posixpath.join(step.target, child.name) for child in source.iterdir()]
            continue
        if not is_directory:
            is_directory = (await run(f"test -d {shlex.quote(step.target)}")).exit_code == 0
        target = posixpath.join(step.target, source.name) if is_directory else step.target
        await upload(source, target)
        copied.append(target)
    for program, setting in (("chmod", step.chmod), ("chown", step.chown)):
        if setting and copied:
            result = await run(f"{program} -R {shlex.quote(setting)} -- {shlex.join(copied)}")
            _expect_success(result, step, f"COPY --{program}={setting}")


def _expect_success(result: ExecResult, step: Step, what: str) -> None:
    if result.exit_code == 0:
        return
    output = "\n".join(result.output.splitlines()[-_LAST_LINES:])
    raise ContainerStartError(
        f"Dockerfile, line {step.line}: {what}: exit code {result.exit_code}. Last lines:\n{output}"
    )
