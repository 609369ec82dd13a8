"""Files in and out of a sandbox over a connection that breaks, and past an agent that stands in the way."""

import asyncio
import os
from pathlib import Path

import pytest

from ares_exp.containers.daytona import container
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.errors import ContainerDiedError, ContainerServiceUnavailableError, TransferError
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.nightly]  # the daily run has the contract

UPLOAD, DOWNLOAD = "/files/bulk-upload$", "/files/bulk-download$"
SPOOLED = 9 * 1024 * 1024
"""The size of a file that is not kept in memory during transfer."""


async def archives_left(box: DaytonaContainer) -> int:
    found = await box.exec(f"ls {box._shells.directory} | grep -c tar$", user="root", shell="sh -c")
    return int(found.output)


@pytest.mark.parametrize("size", [100_000, SPOOLED])
async def test_broken_connection_is_retried(
    emulator: Emulator, box: DaytonaContainer, tmp_path: Path, size: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    for number, fault in enumerate(
        (
            {"kind": "drop"},
            {"kind": "drop_after"},
            {"kind": "half"},
            {"kind": "status", "status": 502},
            {"kind": "status_after", "status": 502},
            {"kind": "status", "status": 429, "retry_after": 0},
        )
    ):
        met = [emulator.faults.add(Fault(path=path, **fault)) for path in (UPLOAD, DOWNLOAD)]  # type: ignore[arg-type]
        await box.upload(source, f"/in/{number}")
        await box.download(f"/in/{number}", tmp_path / str(number))
        assert [fault.hits for fault in met] == [1, 1]
        assert (tmp_path / str(number)).read_bytes() == source.read_bytes()
    assert await archives_left(box) == 0


@pytest.mark.parametrize(
    ("direction", "state"), [("upload", "destroyed"), ("download", "destroyed"), ("download", "error")]
)
async def test_sandbox_lost_during_transfer_is_an_error(
    emulator: Emulator, box: DaytonaContainer, tmp_path: Path, direction: str, state: str
) -> None:
    (tmp_path / "a").write_text("a")
    await box.upload(tmp_path / "a", "/a")
    slow = emulator.faults.add(Fault("slow", path=UPLOAD if direction == "upload" else DOWNLOAD, seconds=0.3))
    copying = asyncio.create_task(
        box.upload(tmp_path / "a", "/b") if direction == "upload" else box.download("/a", tmp_path / "b")
    )
    await asyncio.wait_for(slow.met.wait(), 60)
    emulator.lose(next(iter(emulator.sandboxes)), state)
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await copying
    assert not (tmp_path / "b").exists()
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await box.download("/a", tmp_path / "b")


async def test_refusal_names_the_path_and_the_reason(emulator: Emulator, box: DaytonaContainer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    await box.upload(tmp_path / "a", "/a")
    emulator.faults.add(Fault("status", path="/files/", status=403, times=None))
    with pytest.raises(TransferError, match=r"upload to /b failed.*returned 403") as caught:
        await box.upload(tmp_path / "a", "/b")
    assert emulator.api_key not in str(caught.value)
    with pytest.raises(TransferError, match=r"download of /a failed.*returned 403"):
        await box.download("/a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    emulator.faults.clear()
    await box.download("/a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a"


async def test_copy_without_a_service_is_a_service_error(
    emulator: Emulator, box: DaytonaContainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await box.exec("echo a >/a")
    monkeypatch.setattr(container, "_TRANSFER_SEC", 1.0)
    emulator.faults.add(Fault("status", path="/files/", status=503, times=None))
    with pytest.raises(ContainerServiceUnavailableError, match="returned 503"):
        await box.upload(__file__, "/b")
    with pytest.raises(ContainerServiceUnavailableError, match="returned 503"):
        await box.download("/a", tmp_path / "b")


async def test_cancelled_transfer_leaves_no_files(emulator: Emulator, box: DaytonaContainer, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(SPOOLED))
    await box.upload(tmp_path / "a", "/a")
    for path, copy in ((UPLOAD, box.upload(tmp_path / "a", "/b")), (DOWNLOAD, box.download("/a", tmp_path / "b"))):
        slow = emulator.faults.add(Fault("slow", path=path, seconds=0.3))
        copying = asyncio.create_task(copy)
        await asyncio.wait_for(slow.met.wait(), 60)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
    assert not (tmp_path / "b").exists()
    await box.download("/a", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()


async def test_forged_size_is_a_transfer_error(box: DaytonaContainer, tmp_path: Path) -> None:
    """The sent data is compared with the size, and is not requested again and again."""
    await box.exec("echo a >/a")
    for size in ("7", "1000000000", "nonsense", "99999999999999"):
        await box.exec(f"printf '#!/bin/sh\necho {size}\n' >/usr/local/bin/wc; chmod 755 /usr/local/bin/wc")
        async with asyncio.timeout(60):
            with pytest.raises(TransferError, match="/a"):
                await box.download("/a", tmp_path / "a")
        assert not (tmp_path / "a").exists()


async def test_link_as_archive_is_a_transfer_error(box: DaytonaContainer, tmp_path: Path) -> None:
    """The agent is root, and may do what it likes in its sandbox; on this side it gets no further."""
    await box.exec("printf '#!/bin/sh\\nln -s /etc/shadow \"$2\"\\n' >/usr/local/bin/tar; chmod 755 /usr/local/bin/tar")
    await box.exec("echo a >/a")
    with pytest.raises(TransferError):
        await box.download("/a", tmp_path / "a")
    assert not (tmp_path / "a").exists()
