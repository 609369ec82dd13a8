"""Captured and restored files of containers: the contract in each way of capturing, and Docker's own cases."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import (
    CaptureError,
    ContainerDiedError,
    ContainerStartError,
    SnapshotMismatchError,
    SnapshotUnsupportedError,
)
from ares_exp.testing.changes_contract import STEPS, ChangesContract, capture, make_awkward, run
from tests.docker.dockerfiles import built
from tests.docker.engine_relay import EngineRelay

pytestmark = [pytest.mark.docker, pytest.mark.once]

PYTHON = "python:3.12-slim"


class DockerChanges(ChangesContract):
    @pytest.fixture(autouse=True)
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        directory = tmp_path / "temporary"
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        return directory

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("changes", docker_image=PYTHON)

    @pytest.fixture
    def other_base(self) -> str:
        return "sha256:" + "0" * 64

    async def left(self) -> list[str]:
        client = docker.from_env()
        try:
            ours = {"label": f"ares_exp.pid={os.getpid()}"}
            found = await asyncio.to_thread(lambda: client.api.containers(all=True, filters=ours))
        finally:
            client.close()
        return [*(one["Id"] for one in found), *map(str, Path(tempfile.gettempdir()).iterdir())]


class TestUpper(DockerChanges):
    by_night = frozenset(
        {
            *("test_capture_does_not_disturb_commands", "test_capture_is_complete_in_any_store"),
            *("test_eight_containers_restore_one_capture", "test_capture_during_writes_is_consistent"),
            *("test_stop_during_capture_leaves_no_resources", "test_containers_with_same_changes_are_independent"),
            *("test_cancelled_captures_leave_no_resources", "test_cancelled_restores_leave_no_resources"),
            "test_changes_accumulate_across_captures",
        }
    )
    """The daily run has `test_captures_and_commands_run_concurrently` and local containers."""

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory(capture="upper")


class TestArchive(DockerChanges):
    """Where the engine's directories are not seen from here."""

    by_night = frozenset(
        {
            *("test_capture_is_complete_in_any_store", "test_eight_containers_restore_one_capture"),
            *("test_capture_does_not_disturb_commands", "test_captures_and_commands_run_concurrently"),
            *("test_cancelled_restores_leave_no_resources", "test_changes_of_another_base_are_refused"),
            *("test_damaged_store_is_refused", "test_secret_is_not_captured"),
            *("test_stopped_container_cannot_be_captured", "test_stop_during_capture_leaves_no_resources"),
            *("test_capture_during_writes_is_consistent", "test_containers_with_same_changes_are_independent"),
            *("test_cancelled_captures_leave_no_resources", "test_changes_accumulate_across_captures"),
            "test_new_container_has_no_changes",
        }
    )
    """Cases independent of how files are read: the daily run has them in `TestUpper` and local containers."""

    lost = frozenset({"names that are no UTF-8", "name of a base file"})

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory(capture="archive")

    async def test_lost_files_are_logged(self, box: Container, objects: ObjectStore) -> None:
        await make_awkward(box, leave_out=STEPS.keys() - {*self.lost, "socket"})
        said = "\n".join((await capture(box, objects)).notes)
        assert "names are not UTF-8" in said
        assert "a hard link to a file of the image" in said
        assert "'/n/sock' is not captured: it is a socket" in said


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


async def test_image_configuration_is_restored(context: Path, objects: ObjectStore, api: docker.APIClient) -> None:
    spec = built(context, 'RUN useradd -m joe\nENV FOO="a b"\nWORKDIR /home/joe\nUSER joe\nVOLUME /data\n')
    factory = DockerContainerFactory()
    async with factory(spec) as box:
        assert (await box.exec("echo mine > file; echo $FOO")).output == "a b\n"
        await run(box, "echo lost > /data/x")
        delta = await capture(box, objects)
        image = box.image
    assert "/home/joe/file" in delta.entries
    assert delta.notes == ("'/data' is not captured: it is a mount.",)
    async with factory(replace(spec, changes=StoredChanges(delta, objects))) as again:
        assert (await again.exec("id -un; pwd; cat file; echo $FOO; ls /data")).output == "joe\n/home/joe\nmine\na b\n"
        assert again.image == image
        assert delta.base == api.inspect_image(image)["Id"]


async def test_capture_by_archives_needs_tar(objects: ObjectStore) -> None:
    async with DockerContainerFactory(capture="archive")(ContainerSpec("no tar", docker_image=PYTHON)) as box:
        await run(box, "rm /bin/tar; echo x > /file")
        with pytest.raises(CaptureError, match=r"Use an image with GNU tar, or run as root on the engine's machine"):
            await capture(box, objects)
        await run(box, "printf '#!/bin/sh\\necho usage >&2; exit 1\\n' > /bin/tar; chmod +x /bin/tar")
        with pytest.raises(CaptureError, match=r"Use an image with GNU tar"):
            await capture(box, objects)


async def test_remote_engine_is_read_by_archives(
    objects: ObjectStore, api: docker.APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ContainerSpec("not root", docker_image=PYTHON)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    async with DockerContainerFactory(capture="upper")(spec) as box:
        with pytest.raises(SnapshotUnsupportedError, match=r"needs root.*container\.capture=archive"):
            await capture(box, objects)
        assert (await box.exec("echo fine")).output == "fine\n"
    async with DockerContainerFactory()(spec) as box:
        await run(box, "echo x > /file")
        assert set((await capture(box, objects)).entries) == {"/file"}


async def test_rebuilt_image_is_a_mismatch(context: Path, objects: ObjectStore, api: docker.APIClient) -> None:
    spec = built(context, "RUN echo one > /one\n")
    factory = DockerContainerFactory()
    async with factory(spec) as box:
        await run(box, "echo x > /file")
        delta, image = await capture(box, objects), str(box.image)
    api.remove_image(image)
    changed = built(context, "RUN echo two > /two\n")
    with pytest.raises(SnapshotMismatchError) as caught:
        await factory(replace(changed, changes=StoredChanges(delta, objects))).start()
    other = [one["Id"] for one in api.images(filters={"label": f"test={context.name}"})]
    assert len(other) == 1
    assert delta.base in str(caught.value)
    assert other[0] in str(caught.value)
    with pytest.raises(SnapshotMismatchError):
        await DockerContainerFactory(keep_image=False)(
            replace(built(context, "RUN echo three > /three\n"), changes=StoredChanges(delta, objects))
        ).start()
    assert [one["Id"] for one in api.images(filters={"label": f"test={context.name}"})] == other


async def test_missing_image_is_a_mismatch(objects: ObjectStore) -> None:
    async with DockerContainerFactory()(ContainerSpec("gone", docker_image=PYTHON)) as box:
        await run(box, "echo x > /file")
        delta = replace(await capture(box, objects), base="sha256:" + "1" * 64)
    spec = ContainerSpec("gone", docker_image="localhost:1/no/such:image", changes=StoredChanges(delta, objects))
    with pytest.raises(SnapshotMismatchError, match=r"sha256:1{64}.*localhost:1/no/such:image.*docker load"):
        await DockerContainerFactory()(spec).start()


@pytest.mark.parametrize("change", ["echo x > /file", "rm /etc/debian_version"], ids=["file", "deletion"])
async def test_restore_over_a_broken_connection_can_be_retried(
    monkeypatch: pytest.MonkeyPatch, objects: ObjectStore, change: str
) -> None:
    spec = ContainerSpec("restored", docker_image=PYTHON)
    async with DockerContainerFactory()(spec) as box:
        await run(box, change)
        delta = await capture(box, objects)
    entries = {path: entry for path, entry in delta.entries.items() if path in ("/file", "/etc/debian_version")}
    async with EngineRelay() as relay:
        monkeypatch.setenv("DOCKER_HOST", relay.host)
        relay.cuts = (b"/archive?" if "/file" in entries else b"/exec HTTP", 0)
        with pytest.raises(ContainerStartError, match="could not be started"):
            await DockerContainerFactory()(
                replace(spec, changes=StoredChanges(replace(delta, entries=entries), objects))
            ).start()


async def test_capture_of_a_killed_container_fails(objects: ObjectStore, api: docker.APIClient) -> None:
    async with DockerContainerFactory(capture="archive")(ContainerSpec("killed", docker_image=PYTHON)) as box:
        await run(box, "echo x > /file")
        await capture(box, objects)
        assert isinstance(box, DockerContainer)
        await asyncio.to_thread(api.kill, box.container_name)
        with pytest.raises(ContainerDiedError, match="killed from outside"):
            await capture(box, objects)
