"""Builds with BuildKit: for Dockerfiles that need it, by a `docker` command that was seen to build with it.

docker-py cannot drive BuildKit, which wants a session beside the request. Whether a command can depends on its
version, its plugins and the engine, so it is tried: a tiny image is built, looked for at the engine, and removed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.docker.build_failure import LAST_LINES, build_failure
from ares_exp.containers.docker.docker_cli import docker_build, docker_clis
from ares_exp.containers.docker.dockerfile_check import (
    BuildKitFeature,
    BuildKitNeeds,
    check_dockerfile,
    without_syntax_line,
)
from ares_exp.containers.docker.engine import Engine, connect_blocking, engine_errors, reason
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.docker.shared_work import Demand, NobodyWaits
from ares_exp.errors import UnsupportedTaskError

_PROBE_SEC = 30.0


@dataclass(frozen=True, slots=True)
class BuildKit:
    """A way to build that was seen to work.

    Attributes:
        cli: The `docker` command.
        frontend: The image that reads the Dockerfile (`# syntax=`); `None` is the one inside the engine.
    """

    cli: Path
    frontend: str | None


def check_buildable(dockerfile: Path) -> None:
    """Refuses a Dockerfile that cannot be built on the engine of this process. Blocking where it needs BuildKit.

    Raises:
        TaskError: As `check_dockerfile`.
        UnsupportedTaskError: As `find_buildkit`.
        PreflightError: No engine answers, to ask for BuildKit.
    """
    needs = check_dockerfile(dockerfile)
    if needs.features:
        find_buildkit(connect_blocking(), dockerfile, needs)


def find_buildkit(engine: Engine, path: Path, needs: BuildKitNeeds) -> BuildKit:
    """A `docker` command on PATH that builds what the Dockerfile at `path` needs. Blocking.

    The engine's own frontend is tried first, because the one of a `# syntax=docker/dockerfile:1` line has to be pulled.
    Each answer, found within 30 s or not at all, holds for the life of the process.

    Raises:
        UnsupportedTaskError: There is none; with the line, the feature and the reason of each command.
    """
    own: tuple[str | None, ...] = () if needs.custom_frontend else (None,)
    frontends = own if needs.frontend is None else (*own, needs.frontend)
    lacking, complaints = needs.features[0], []
    for cli in docker_clis():
        for frontend in frontends:
            way = BuildKit(cli, frontend)
            complaint = _complaint(engine, way, None)
            if not complaint:
                unknown = ((one, found) for one in needs.features if (found := _complaint(engine, way, one)))
                if (first := next(unknown, None)) is None:
                    return way
                lacking, complaint = first[0], f"it has BuildKit, which does not know {first[0].name} ({first[1]})"
            complaints.append(f"{cli}{f' with {frontend}' if frontend else ''}: {complaint}")
    raise UnsupportedTaskError(
        f"{path}:{lacking.line}: {lacking.name} needs BuildKit, and no docker command on PATH builds that with the "
        f"engine at {engine.host} ({'; '.join(complaints) or 'there is no docker command'}). Install docker-buildx or "
        "a newer engine; or build the image yourself, and name it as docker_image in the [environment] table of the "
        "task's task.toml."
    )


_probing = threading.Lock()
_answers: dict[tuple[int, str, BuildKit, str], str] = {}


def _complaint(engine: Engine, way: BuildKit, feature: BuildKitFeature | None) -> str:
    """Why a way does not build, or does not know a feature; empty when it does."""
    sample = feature.sample if feature is not None else ""
    key = (os.getpid(), engine.host, way, sample)
    with _probing:
        if key not in _answers:
            _answers[key] = _probe(engine, way, sample)
        return _answers[key]


def _probe(engine: Engine, way: BuildKit, sample: str) -> str:
    """Builds an image of one file; a stage with the sample, which nothing needs, is read and not carried out."""
    frontend = f"# syntax={way.frontend}\n" if way.frontend is not None else ""
    dockerfile = f"{frontend}FROM scratch AS unused\n{sample}\nFROM scratch\nCOPY --chmod=755 Dockerfile /a\n"
    tag, demand, last = f"ares-exp/probe:{uuid.uuid4().hex[:12]}", Demand(), collections.deque[str](maxlen=LAST_LINES)
    limit = threading.Timer(_PROBE_SEC, demand.end)
    limit.daemon = True
    limit.start()
    try:
        code = docker_build(
            way.cli,
            dockerfile,
            _options(tag, image_labels(tag, keep=False)),
            context_dir=None,
            host=engine.host,
            demand=demand,
            on_line=last.append,
        )
        if code == 0:
            engine.api.inspect_image(tag)
            return ""
        lines = [line for line in last if line]
        errors = [line for line in lines if line.startswith("ERROR")]
        return (errors or lines[-1:] or [f"exit code {code}"])[0].rstrip(".")
    except NobodyWaits:
        return f"it built nothing within {_PROBE_SEC:g} s"
    except engine_errors() as error:
        return f"what it built is not to be found: {reason(error)}"
    finally:
        limit.cancel()
        with contextlib.suppress(*engine_errors()):
            engine.api.remove_image(tag, force=True)


def _options(tag: str, labels: Mapping[str, str]) -> list[str]:
    return [f"--tag={tag}", *(f"--label={name}={value}" for name, value in labels.items())]


def build_with_buildkit(
    engine: Engine, way: BuildKit, tag: str, context_dir: Path, labels: Mapping[str, str], demand: Demand
) -> None:
    """Builds the image of `context_dir`. Blocking; ended when the demand ends.

    Raises:
        ContainerStartError: With the failing instruction and the end of its output.
        NobodyWaits: The demand ended.
    """
    text = (context_dir / "Dockerfile").read_text(encoding="utf-8")
    progress = _Progress()
    code = docker_build(
        way.cli,
        text if way.frontend is not None else without_syntax_line(text),
        _options(tag, labels),
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
    """What `--progress=plain` says: lines `#7 [2/3] RUN make`, `#7 0.15 output`, `#7 ERROR: reason`, and others."""

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
        """The instruction that failed and the end of its output; without one, what was said last."""
        if not self._failed:
            return "", [line for line in self._others if line]
        return self._names[self._failed], list(self._outputs.get(self._failed, ()))
