"""Shared by all tests: the command line as a user runs it, and which backends are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECRET_FREE = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "OPENAI_"))}

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `python -m ares_exp …` in an empty directory; `run_dir` is where a single run wrote."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ares_exp", *arguments],
            cwd=tmp_path,
            env={**SECRET_FREE, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def docker_reason() -> str | None:
    """Why Docker cannot be used here; `None` when it can."""
    if (
        shutil.which("docker") is None
        and not os.environ.get("DOCKER_HOST")
        and not Path("/var/run/docker.sock").exists()
    ):
        return "no Docker engine here"
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=10)
        client.ping()
        client.close()
    except (DockerException, OSError) as error:
        return f"the Docker engine does not answer: {error}"
    return None


@pytest.fixture(scope="session")
def _docker_reason() -> str | None:
    return docker_reason()


@pytest.fixture(autouse=True)
def _skip_without_docker(request: pytest.FixtureRequest) -> None:
    """Skips tests marked `docker` where there is no engine; fails them where one must be."""
    if request.node.get_closest_marker("docker") is not None:
        reason = request.getfixturevalue("_docker_reason")
        if reason and os.environ.get("ARES_EXP_REQUIRE_DOCKER"):
            pytest.fail(f"ARES_EXP_REQUIRE_DOCKER is set, but {reason}")
        if reason:
            pytest.skip(reason)
