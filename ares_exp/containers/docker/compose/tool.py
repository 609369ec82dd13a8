"""The compose program of this machine: the plugin `docker compose`, or the program `docker-compose`.

The program replaces each `$NAME` in a task's file by the environment variable `NAME`. It does not inherit our
environment, because then a file could copy an API key into a container. It only gets the variables that the task sets
(`[environment.env]`) and the variables that Harbor defines, such as `MAIN_IMAGE_NAME`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ares_exp.cancellation import in_daemon_thread
from ares_exp.containers.child_process import ChildFailedError, ChildProcess, Ended
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.compose.project_file import MAIN
from ares_exp.containers.docker.docker_cli import docker_clis, output_of
from ares_exp.containers.docker.image import image_tag
from ares_exp.errors import ContainerStartError, PreflightError, UnsupportedTaskError

ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "DOCKER_CONFIG")
"""Variables of our environment that the program inherits, to find Docker's programs, plugins and settings."""

_OLDEST = (1, 28)  # the first version that reads both older formats and files without a version, and has --ansi
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_LAST_LINES = 20
_REQUEST_SEC = "120"  # version 1 gives up on the engine after 60


@dataclass(frozen=True, slots=True)
class ComposeTool:
    """The command line of a compose program, and its version, for example `2.26.1`."""

    command: tuple[str, ...]
    version: str

    @property
    def says_json(self) -> bool:
        """Whether the program can print a compose file as JSON, which is easier to parse reliably than YAML."""
        return not self.version.startswith("1.")

    async def run(
        self, arguments: Sequence[str], *, env: Mapping[str, str], directory: Path, stdin: bytes = b""
    ) -> Ended:
        """Runs the program. Kills it and its child processes if the caller is cancelled or this process is killed.

        Raises `ContainerStartError` if the program prints too much.
        """
        child = ChildProcess()
        try:
            ended = await child.stop_if_cancelled(
                in_daemon_thread(lambda: child.run([*self.command, *arguments], env=env, cwd=directory, stdin=stdin))
            )
        except ChildFailedError as error:
            raise ContainerStartError(f"`{' '.join(self.command)}` {error}.") from error
        if len(ended.output) > _MAX_ANSWER_BYTES:
            raise ContainerStartError(f"`{' '.join(self.command)}` printed more than {_MAX_ANSWER_BYTES:,} bytes.")
        return ended


def complaint(ended: Ended) -> str:
    """Returns the last lines that the program wrote to stderr."""
    return "\n".join(ended.errors[-_LAST_LINES:])


def find_compose() -> ComposeTool:
    """Finds the compose program, and caches the result. Blocking, usually for less than a second.

    Raises `PreflightError` if no compose program is installed, or if all installed programs are too old.
    """
    return _found(tuple(os.environ.get(name, "") for name in ENVIRONMENT))


@functools.lru_cache(maxsize=4)
def _found(environment: tuple[str, ...]) -> ComposeTool:
    seen = []
    candidates: list[tuple[str, ...]] = [(str(cli), "compose") for cli in docker_clis()]
    candidates += [(str(program),) for program in docker_clis("docker-compose")]
    for command in candidates:
        version = _version(command)
        if version is None:
            continue
        if tuple(int(number) for number in version.split(".")[:2]) >= _OLDEST:
            return ComposeTool(command, version)
        seen.append(f"{' '.join(command)} has version {version}")
    found = "; ".join(seen) or "neither `docker compose` nor `docker-compose` is on PATH"
    raise PreflightError(
        f"Docker Compose {'.'.join(map(str, _OLDEST))} or later is required, but {found}. Install the plugin "
        "(docker-compose-plugin in Docker's own packages, docker-compose in Debian's), or leave these tasks out."
    )


def _version(command: tuple[str, ...]) -> str | None:
    found = re.match(r"v?(\d{1,6}\.\d{1,6}(\.\d{1,6})?)", output_of(*command, "version", "--short"))
    return found[1] if found else None


# Variables that control programs of this machine: a task must not set them.
_OBEYED = re.compile(
    r"""(?x) PATH | HOME | SHELL | ENV | IFS | PS4 | CDPATH | TZ | TZDIR | LANG | LANGUAGE | TERM | TMP | TEMP | TMPDIR
    | SHELLOPTS | BASHOPTS | HOSTALIASES | RES_OPTIONS | LOCALDOMAIN | NLSPATH | LOCPATH | GCONV_PATH | .*_CA_BUNDLE
    | GODEBUG | GOGC | GOMAXPROCS | GOMEMLIMIT | GOTRACEBACK | GOCOVERDIR | PYTHON.* | .*_(?i:proxy)
    | (LD|DYLD|GIT|DOCKER|COMPOSE|BUILDKIT|BUILDX|SSL|SSH|OPENSSL|XDG|OTEL|GLIBC|MALLOC|LC|BASH)_.*"""
)


def refuse_obeyed(spec: ContainerSpec, text: str) -> None:
    """Rejects a file that uses a task variable such as `PATH`, which would also affect programs on this machine.

    The compose program does not get such variables, so it could not substitute them. The task may still set them in its
    containers. Raises `UnsupportedTaskError`. `text` is the file's text.
    """
    found = [name for name in spec.env if _OBEYED.fullmatch(name) and re.search(rf"\$\{{?{re.escape(name)}\b", text)]
    if found:
        raise UnsupportedTaskError(
            f"{spec.compose_file}: the file uses variables of [environment.env] that would also affect programs on "
            f"this machine: {', '.join(found)}. Rename these variables, or leave the task out."
        )


def variables(spec: ContainerSpec, host: str) -> dict[str, str]:
    """Returns the compose program's environment variables. `host` is the engine's address. Blocks to read files."""
    assert spec.compose_file is not None
    env = {name: value for name, value in spec.env.items() if not _OBEYED.fullmatch(name)}
    context = spec.context_dir or spec.compose_file.parent
    env["CONTEXT_DIR"] = str(context)
    env["MAIN_IMAGE_NAME"] = spec.docker_image or image_tag(f"{spec.name}-{MAIN}", context)
    env |= {"PREBUILT_IMAGE_NAME": spec.docker_image} if spec.docker_image else {}
    env |= {"CPUS": f"{spec.cpus:g}"} if spec.cpus is not None else {}
    env |= {"MEMORY": f"{spec.memory_mb}M"} if spec.memory_mb is not None else {}
    outer = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {**env, **outer, "DOCKER_HOST": host, "COMPOSE_HTTP_TIMEOUT": _REQUEST_SEC}
