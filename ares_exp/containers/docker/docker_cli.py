"""The `docker` command, for what the engine's API alone does not do: building with BuildKit."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ares_exp.containers.dead_mans_shell import while_we_live
from ares_exp.containers.docker.shared_work import Demand
from ares_exp.containers.owned_directory import short_lived_directory

_MAX_LINE_BYTES = 4096
# fmt: off
_PASSED_ON = (
    "PATH", "HOME", "TMPDIR", "DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",  # it asks registries for tokens
)
# fmt: on


def docker_clis(name: str = "docker") -> Iterator[Path]:
    """Every `docker` on PATH, each once; or every program of another name."""
    seen = set()
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(directory, name)
        if path.is_absolute() and path.is_file() and os.access(path, os.X_OK) and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path


def passed_on() -> dict[str, str]:
    """Our variables that a program of Docker gets; no others, so that no key of an endpoint or a tracker reaches it."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def docker_build(
    cli: Path,
    dockerfile: str,
    arguments: Sequence[str],
    *,
    context_dir: Path | None,
    host: str,
    demand: Demand,
    on_line: Callable[[str], None],
) -> int:
    """Runs `docker build` against the engine at `host`, with BuildKit on; killed when the demand ends. Blocking.

    Args:
        cli: The program.
        dockerfile: The Dockerfile, whatever the one in the context says.
        arguments: More options.
        context_dir: The build context; `None` is a directory that has the Dockerfile only.
        host: As `Engine.host`.
        demand: Who wants it.
        on_line: Called with each line of its output; overlong ones come in pieces.

    Returns:
        Its exit code.

    Raises:
        NobodyWaits: It was killed.
        OSError: It could not be started.
    """
    env = passed_on()
    env |= {"DOCKER_HOST": host, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    directory = short_lived_directory("build")
    try:
        folder = directory.path
        (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
        context = folder if context_dir is None else context_dir.resolve()
        its = shlex.quote(str(folder))  # which nobody else would remove after a kill -9
        command = [str(cli), "build", "--progress=plain", f"--file={folder}/Dockerfile", *arguments, str(context)]
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
        code = process.wait()  # its output has ended, and the closed stdin kills what lingers
    finally:
        directory.remove()
    demand.pause(0)
    return code
