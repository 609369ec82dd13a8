"""What is said of an engine that cannot be used; `tests/docker` has one that can."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.podman import PodmanContainerFactory
from ares_exp.errors import PreflightError


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every socket")
async def test_a_socket_that_this_user_may_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0)
        with pytest.raises(PreflightError, match=r"may not use the Docker engine's socket .*engine\.sock: Permission"):
            await connect()


async def test_a_context_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "no-such-context")
    with pytest.raises(PreflightError, match="Expected DOCKER_CONTEXT to name a Docker context, got no-such-context"):
        await connect()


@pytest.mark.parametrize("named", [True, False])
async def test_a_podman_that_is_not_there(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    socket_path = tmp_path / "podman" / "podman.sock"
    if named:
        socket_path = tmp_path / "another" / "podman" / "podman.sock"
        monkeypatch.setenv("CONTAINER_HOST", f"unix://{socket_path}")
    factory = PodmanContainerFactory()
    with pytest.raises(PreflightError, match=rf"No Podman service answers at unix://{socket_path}: .*CONTAINER_HOST"):
        await factory.preflight()
