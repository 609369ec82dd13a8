"""Errors of an engine that cannot be used, and the threads of its calls; `tests/docker` has one that can be used."""

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from ares_exp.containers.docker.engine import connect, in_thread
from ares_exp.containers.docker.factory import PodmanContainerFactory
from ares_exp.errors import PreflightError

SOON_SEC = 60.0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every socket")
async def test_forbidden_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0)
        with pytest.raises(PreflightError, match=r"may not use the Docker engine's socket .*engine\.sock: Permission"):
            await connect()


async def test_missing_docker_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "no-such-context")
    with pytest.raises(PreflightError, match="DOCKER_CONTEXT is no-such-context, but there is no such Docker context"):
        await connect()


@pytest.mark.parametrize("named", [True, False])
async def test_missing_podman_service_is_refused(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    socket_path = tmp_path / "podman" / "podman.sock"
    if named:
        socket_path = tmp_path / "another" / "podman" / "podman.sock"
        monkeypatch.setenv("CONTAINER_HOST", f"unix://{socket_path}")
    factory = PodmanContainerFactory()
    with pytest.raises(PreflightError, match=rf"No Podman service responds at unix://{socket_path}: .*CONTAINER_HOST"):
        await factory.preflight()


async def test_quick_call_does_not_wait_for_slow_calls() -> None:
    go = threading.Event()
    slow = [asyncio.create_task(in_thread(go.wait, pool="starts")) for _ in range(64)]
    try:
        assert await asyncio.wait_for(in_thread(lambda: "answer"), SOON_SEC) == "answer"
        assert await asyncio.wait_for(in_thread(lambda: "gone", pool="removals"), SOON_SEC) == "gone"
    finally:
        go.set()
        await asyncio.gather(*slow)


async def test_cancelled_call_waits_unless_it_may_be_abandoned() -> None:
    go = threading.Event()
    kept, left = (asyncio.create_task(in_thread(go.wait, abandon=abandon)) for abandon in (False, True))
    await asyncio.sleep(0)
    kept.cancel()
    left.cancel()
    done, pending = await asyncio.wait({kept, left}, timeout=SOON_SEC, return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({left}, {kept})
    go.set()
    await asyncio.wait({kept}, timeout=SOON_SEC)
    assert kept.cancelled()
