"""The `docker` command line programs of this machine, which Docker Compose and builds with BuildKit need."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_VERSION_SEC = 60.0  # version 1 of Docker Compose takes 20 s to start on a loaded machine
# fmt: off
_PASSED_ON = (
    "PATH", "HOME", "TMPDIR", "DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",  # for registries
)
# fmt: on


def docker_clis(name: str = "docker") -> Iterator[Path]:
    """Yields the executables with this name on PATH, without duplicates."""
    seen = set()
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(directory, name)
        if path.is_absolute() and path.is_file() and os.access(path, os.X_OK) and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path


def passed_on() -> dict[str, str]:
    """Returns the environment variables for Docker's programs: only a few of our variables, and no API keys."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


@functools.lru_cache(maxsize=64)
def drives_buildkit(cli: Path) -> bool:
    """Returns whether a `docker` program can build with BuildKit: it has the plugin buildx, or has version 18-22."""
    if output_of(cli, "buildx", "version").startswith("github.com/docker/buildx"):
        return True
    major = re.match(r"\d+", output_of(cli, "version", "--format", "{{.Client.Version}}"))
    return major is not None and 18 <= int(major[0]) < 23


def output_of(*command: str | Path) -> str:
    """Runs one of Docker's programs without access to an engine. Returns its output; empty if it fails."""
    try:
        done = subprocess.run(
            command,
            env={**passed_on(), "DOCKER_HOST": "unix:///nonexistent.sock"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()
