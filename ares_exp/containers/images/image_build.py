"""Image builds: with BuildKit, by a `docker` command, or with the engine's classic builder.

docker-py cannot drive BuildKit, which needs a session beside the request. The version of engine and command decides, so
that all images of an engine are built one way; there is no trial build.

A classic build that fails leaves its untagged images. They are the builder's cache, which speeds up the next build; no
label distinguishes them from other people's (labels are on the last stage only), so they stay until `docker image
prune`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.errors import ContainerStartError

if TYPE_CHECKING:
    from docker import APIClient
import functools
import subprocess
from dataclasses import dataclass

from ares_exp.containers.docker.engine import Engine, connect_blocking
from ares_exp.containers.images.docker_cli import docker_build, docker_clis, passed_on
from ares_exp.containers.images.dockerfile_check import BuildKitNeeds, check_dockerfile, without_syntax_line
from ares_exp.containers.images.shared_work import Demand
from ares_exp.errors import UnsupportedTaskError

_VERSION_SEC = 20.0
_SYNTAX_OF_ENGINES = {
    29: (1, 19),
    28: (1, 14),
    27: (1, 8),
    25: (1, 6),
    24: (1, 5),
    23: (1, 4),
    20: (1, 2),
    19: (1, 1),
    18: (1, 0),
}
"""The built-in Dockerfile syntax of engines, from a major version on.

Source: the release notes of Docker Engine (the BuildKit of each) and of BuildKit (the Dockerfile frontend of each).
"""


@dataclass(frozen=True, slots=True)
class BuildKit:
    """BuildKit on an engine, and the command that drives it.

    Attributes:
        cli: The `docker` command.
        engine_version: The engine's version.
        syntax: The newest Dockerfile syntax built into the engine.
    """

    cli: Path
    engine_version: str
    syntax: tuple[int, int]


def check_buildable(dockerfile: Path) -> None:
    """Refuses a Dockerfile that cannot be built on the engine of this process. Blocking if it needs BuildKit.

    Raises:
        TaskError: As `check_dockerfile`.
        UnsupportedTaskError: As `check_needs`.
        PreflightError: No engine answers.
    """
    needs = check_dockerfile(dockerfile)
    if needs.features:
        check_needs(connect_blocking(), dockerfile, needs)


def find_buildkit(engine: Engine) -> BuildKit | None:
    """Finds the first `docker` command on PATH that can drive the engine's BuildKit; `None` without one. Blocking."""
    syntax = _syntax_of(engine.version)
    if syntax is None:
        return None
    drivers = (cli for cli in docker_clis() if not _why_not(cli))
    return next((BuildKit(cli, engine.version, syntax) for cli in drivers), None)


def check_needs(engine: Engine, path: Path, needs: BuildKitNeeds) -> None:
    """Refuses the Dockerfile at `path` if it needs features that the engine cannot build. Blocking.

    Raises:
        UnsupportedTaskError: With the line, the feature, the reason and the remedy.
    """
    if not needs.features:
        return
    image = "or build the image yourself, and name it as docker_image in the [environment] table of task.toml"
    way = find_buildkit(engine)
    if way is None:
        lacking = needs.features[0]
        complaints = [f"{cli}: {why}" for cli in docker_clis() if (why := _why_not(cli))]
        if _syntax_of(engine.version) is None:
            complaints = [f"an engine {engine.version} has none"]
        raise UnsupportedTaskError(
            f"{path}:{lacking.line}: {lacking.name} needs BuildKit, and no docker command on PATH drives that of the "
            f"engine at {engine.host} ({'; '.join(complaints) or 'there is no docker command'}). Install docker-buildx "
            f"or a newer engine; {image}."
        )
    newer = next((one for one in needs.features if one.syntax > way.syntax), None)
    if newer is not None and needs.frontend is None:
        raise UnsupportedTaskError(
            f"{path}:{newer.line}: {newer.name} needs Dockerfile syntax {_dotted(newer.syntax)}, and the engine "
            f"{way.engine_version} at {engine.host} reads {_dotted(way.syntax)}. Start the file with "
            f"`# syntax=docker/dockerfile:1`, which the engine pulls; take a newer engine; {image}."
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _syntax_of(version: str) -> tuple[int, int] | None:
    """Returns the built-in syntax of an engine of this version; `None` without BuildKit."""
    major = re.match(r"\d+", version)
    known = (syntax for since, syntax in _SYNTAX_OF_ENGINES.items() if major and int(major[0]) >= since)
    return next(known, None)


@functools.lru_cache(maxsize=64)
def _why_not(cli: Path) -> str:
    """Returns why a `docker` command cannot drive BuildKit, by its version and plugins; empty when it can."""
    version = _output(cli, "version", "--format", "{{.Client.Version}}")
    major = re.match(r"\d+", version)
    if major is None:
        return "it does not tell its version"
    if int(major[0]) < 18:
        return f"its version is {version}"
    if int(major[0]) >= 23 and not _output(cli, "buildx", "version").startswith("github.com/docker/buildx"):
        return f"its version {version} needs the plugin buildx, which it lacks"
    return ""


def _output(cli: Path, *arguments: str) -> str:
    """Returns the first line that a `docker` command prints, without an engine; empty when it fails."""
    try:
        done = subprocess.run(
            [cli, *arguments],
            env={**passed_on(), "DOCKER_HOST": "unix:///nonexistent.sock"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip().partition("\n")[0]


def build_with_buildkit(
    engine: Engine,
    way: BuildKit,
    tag: str,
    context_dir: Path,
    needs: BuildKitNeeds,
    labels: Mapping[str, str],
    demand: Demand,
) -> None:
    """Builds the image of `context_dir` with BuildKit. Blocking; killed when the demand ends.

    A `# syntax=docker/dockerfile:…` line, whose frontend would have to be pulled, is removed unless the engine's
    built-in frontend is too old for the file.

    Raises:
        ContainerStartError: With the failing instruction and the end of its output.
        WorkAbandoned: The demand ended.
    """
    text = (context_dir / "Dockerfile").read_text(encoding="utf-8")
    own = not needs.custom_frontend and all(one.syntax <= way.syntax for one in needs.features)
    progress = _Progress()
    code = docker_build(
        way.cli,
        without_syntax_line(text) if own else text,
        [f"--tag={tag}", *(f"--label={name}={value}" for name, value in labels.items())],
        context_dir=context_dir,
        host=engine.host,
        demand=demand,
        on_line=progress.read,
    )
    if code != 0:
        instruction, output = progress.failing()
        raise build_failure(
            context_dir, progress.failure or f"{way.cli} ended with exit code {code}", instruction, output
        )


class _Progress:
    """Parser of `--progress=plain`: lines `#7 [2/3] RUN make`, `#7 0.15 output`, `#7 ERROR: reason`, and others."""

    def __init__(self) -> None:
        self.failure = ""
        self._failed = ""
        self._names: dict[str, str] = {}
        self._outputs: dict[str, collections.deque[str]] = {}
        self._others = collections.deque[str](maxlen=LAST_LINES)

    def read(self, line: str) -> None:
        match = re.match(r"#(\d+) (.*)", line)
        if match is None:
            self._others.append(line)
            return
        number, text = match.groups()
        self._names.setdefault(number, re.sub(r"^\[[^\]]*\] ", "", text))
        if text.startswith("ERROR: ") and not self._failed:
            self._failed, self.failure = number, text.removeprefix("ERROR: ")
        elif printed := re.match(r"\d+\.\d+ (.*)", text):
            self._outputs.setdefault(number, collections.deque(maxlen=LAST_LINES)).append(printed[1])

    def failing(self) -> tuple[str, list[str]]:
        """Returns the failed instruction and the end of its output; without one, the last other lines."""
        if not self._failed:
            return "", [line for line in self._others if line]
        return self._names[self._failed], list(self._outputs.get(self._failed, ()))


LAST_LINES = 20
_MAX_LINE_CHARS = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def build_failure(context_dir: Path, reason: str, instruction: str, output: Iterable[str]) -> ContainerStartError:
    """Returns the error with the failing instruction and the end of its output, without terminal control characters."""
    plain = (_COLOUR.sub("", line) for line in output)  # the engine colours stderr red
    lines = (line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}…" for line in plain if line)
    shown = "\n".join(lines) or "(no output)"
    message = (
        f"The image of {context_dir} could not be built: {reason.strip().rstrip('.')}.\n"
        f"Failing instruction: {instruction or '(none)'}\nLast lines of its output:\n{shown}"
    )
    return ContainerStartError(
        "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in message)
    )


def build_classic(api: APIClient, tag: str, context_dir: Path, labels: Mapping[str, str]) -> None:
    """Builds the image of `context_dir` with the classic builder. Blocking; the engine does not stop when interrupted.

    Raises:
        ContainerStartError: With the failing instruction and the end of its output.
    """
    events = api.build(
        path=str(context_dir), tag=tag, rm=True, forcerm=True, decode=True, timeout=None, labels=dict(labels)
    )
    instruction, failure, last = "", "", collections.deque[str](maxlen=LAST_LINES)
    for line, error in _lines(events):  # read to its end: a partly read answer leaks its socket
        failure = failure or error
        if re.match(r"Step \d+/\d+ : ", line):
            instruction = line.partition(" : ")[2]
            last.clear()
        elif line.strip() and not line.startswith((" --->", "Removing intermediate container")):
            last.append(line)
    if failure:
        raise build_failure(context_dir, failure, instruction, last)


def _lines(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields (line of output, error) of a build, one of them empty."""
    for event in events:
        if "error" in event:
            yield "", str(event["error"])
        for line in str(event.get("stream", "")).splitlines():
            yield line, ""
