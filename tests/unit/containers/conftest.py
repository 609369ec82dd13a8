import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ares_exp.containers.filesystem.stored_objects import ObjectStore

ON_EVERY_PYTHON = ("test_local.py", "test_local_dockerfile.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A sandbox is the same under every Python: most of what is asked of it is asked once."""
    for item in items:
        here = item.path.parent == Path(__file__).parent
        if here and item.path.name not in ON_EVERY_PYTHON and item.get_closest_marker("local"):
            item.add_marker(pytest.mark.once)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def env(temporary: Path) -> dict[str, str]:
    """The environment of another process that shares that directory, and has no engine."""
    return {**os.environ, "TMPDIR": str(temporary), "DOCKER_HOST": "unix:///no/such.sock"}


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


@pytest_asyncio.fixture
async def greeting_port() -> AsyncIterator[int]:
    """Of a server on this machine's loopback that says `hello` to everybody."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
