"""The `docker` command, which the engine's API cannot replace for builds with BuildKit."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ares_exp.containers.images.shared_work import Demand
from ares_exp.containers.ownership import short_lived_directory
from ares_exp.containers.parent_death_guard import while_we_live

_MAX_LINE_BYTES = 4096
# fmt: off
_PASSED_ON = (
    "PATH", "HOME", "TMPDIR", "DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",  # for registries
)
# fmt: on


def docker_clis(name: str = "docker") -> Iterator[Path]:
    """Yields every `docker` on PATH once, or every program of another name."""
    seen = set()
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(directory, name)
        if path.is_absolute() and path.is_file() and os.access(path, os.X_OK) and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path


def passed_on() -> dict[str, str]:
    """Returns the variables passed on to Docker's programs; no others, so that no API key reaches them."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def docker_build(
    cli: Path,
    dockerfile: str,
    arguments: Sequence[str],
    *,
    context_dir: Path,
    host: str,
    demand: Demand,
    on_line: Callable[[str], None],
) -> int:
    """Runs `docker build` with BuildKit against the engine at `host`; killed when the demand ends. Blocking.

    Args:
        cli: The program.
        dockerfile: The Dockerfile's text, in place of the one in the context.
        arguments: More options.
        context_dir: The build context.
        host: As `Engine.host`.
        demand: The demand for the build.
        on_line: Called with each line of output; overlong lines are split.

    Returns:
        The exit code.

    Raises:
        WorkAbandoned: It was killed.
        OSError: It could not be started.
    """
    env = passed_on()
    env |= {"DOCKER_HOST": host, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    directory = short_lived_directory("build")
    try:
        folder = directory.path
        (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
        its = shlex.quote(str(folder))  # removed by the guard after a kill -9
        command = [
            str(cli),
            "build",
            "--progress=plain",
            f"--file={folder}/Dockerfile",
            *arguments,
            str(context_dir.resolve()),
        ]
        process = subprocess.Popen(
            while_we_live(command, at_end=f"rm -f {its}/Dockerfile; rmdir {its}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout, demand.releasing(process.stdin.close):
            while line := process.stdout.readline(_MAX_LINE_BYTES):
                on_line(line.decode("utf-8", "replace").rstrip())
        code = process.wait()  # its output has ended; the closed stdin kills the rest of its group
    finally:
        directory.remove()
    demand.pause(0)
    return code
