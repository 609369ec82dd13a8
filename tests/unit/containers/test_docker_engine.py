"""Docker without an engine: errors, the threads of calls, and the archive with which changed files are written."""

import asyncio
import io
import os
import socket
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from ares_exp.containers.docker.capture import read_tar
from ares_exp.containers.docker.container import archive
from ares_exp.containers.docker.engine import connect, in_thread
from ares_exp.containers.docker.factory import PodmanContainerFactory
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, differences
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import PreflightError
from tests.unit.containers.filesystem.trees import make_awkward, tree_of

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


def archived(entries: dict[str, Entry], objects: ObjectStore) -> bytes:
    return b"".join(archive(StoredChanges(Delta("x:1", entries), objects)))


def test_archive_holds_every_kind_of_entry(objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    make_awkward(tmp_path / "source" / "n")
    awkward = scan(tmp_path / "source", objects, ScanCache(), notes=[])
    data = archived(awkward, objects)
    assert len(data) % tarfile.BLOCKSIZE == 0
    assert data == archived(dict(reversed(awkward.items())), objects)
    found = read_tar(io.BytesIO(data), objects, notes=[])
    assert differences(Delta("x:1", awkward), Delta("x:1", found)) == []
    (tmp_path / "out").mkdir()
    subprocess.run(
        ["tar", "--extract", "--directory", tmp_path / "out", "--same-permissions", "--numeric-owner", "--same-owner",
         "--xattrs", "--xattrs-include=*"],
        input=data, check=True,
    )  # fmt: skip
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "source")


def test_archive_takes_any_name_and_time(objects: ObjectStore) -> None:
    entries = {
        "/.wh.x": Entry("file", mtime_ns=-1_500_000_000),
        "/d": Entry("directory"),
        "/d/.wh..wh..opq": Entry("fifo"),
        "/d/" + "n" * 255: Entry("file", link=4, uid=5),
        "/d/z": Entry("file", link=4, uid=5),
    }
    assert differences(
        Delta("x:1", read_tar(io.BytesIO(archived(entries, objects)), objects, notes=[])), Delta("x:1", entries)
    ) == []  # fmt: skip


def test_attributes_unsupported_by_archives_are_omitted(objects: ObjectStore) -> None:
    entries = {"/d": Entry("directory", xattrs={"user.a=b": b"1", "user.c": b"2", "user.\udcff": b"3"})}
    with tarfile.open(fileobj=io.BytesIO(archived(entries, objects))) as found:
        assert found.getmembers()[0].pax_headers == {"SCHILY.xattr.user.c": "2"}
