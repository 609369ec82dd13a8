"""Changed files as a sandbox of the service is asked for them: the contract, in boxes of ours."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.box_directory import folders
from tests.contracts.changes_contract import ChangesContract
from tests.daytona.files_box import FilesBox

PYTHON = "python:3.12-slim"


class _Factory:
    """Boxes of another backend, captured as sandboxes are."""

    name = "files"

    def __init__(self, inner: ContainerFactory) -> None:
        self.inner = inner

    def __call__(self, spec: ContainerSpec) -> Container:
        return FilesBox(spec, self.inner(replace(spec, changes=None)))

    async def preflight(self) -> None:
        await self.inner.preflight()

    def check(self, spec: ContainerSpec) -> list[str]:
        return self.inner.check(spec)


class SandboxChanges(ChangesContract):
    @pytest.fixture(autouse=True)
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        directory = tmp_path / "temporary"
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        return directory

    @pytest.fixture
    def other_base(self) -> str:
        return "daytona:image=another"


@pytest.mark.local
@pytest.mark.once
class TestLocal(SandboxChanges):
    impossible = frozenset({"capability", "name of a base file"})

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return _Factory(LocalContainerFactory())

    async def left(self) -> list[str]:
        return [str(path) for folder in folders() for path in folder.glob(f"*ares_exp-box-{os.getpid()}-*")] + [
            str(path) for path in Path(tempfile.gettempdir()).iterdir()
        ]


@pytest.mark.docker
@pytest.mark.once
class TestDocker(SandboxChanges):
    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return _Factory(DockerContainerFactory())

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("changes", docker_image=PYTHON)

    async def left(self) -> list[str]:
        return [str(path) for path in Path(tempfile.gettempdir()).iterdir()]
