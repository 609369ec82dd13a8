"""The toolbox: packages from a registry, into the cache, into containers."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.toolbox import installing as fetching
from ares_exp.agents.toolbox import package as catalogue
from ares_exp.agents.toolbox.installing import ensure, install, parse_spec, requirement_lines
from ares_exp.agents.toolbox.package import PACKAGES, PYTHONS, AgentPackage, Build, Pack, Wheels, this_machine
from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.agents.toolbox.placing import check_runs, fitting_build
from ares_exp.commands.cli.run_command import run_command
from ares_exp.containers.child_process import ChildProcess
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import AgentInstallError, ToolboxError
from tests.npm_registry import NpmRegistry, pinned, tgz, tiny_package

main = partial(run_command, "agents", program="ares-exp agents")

PROGRAM = b"#!/bin/sh\necho tiny 1.2.3\n"
DATA = tgz({"bin/tiny": PROGRAM, "LICENSE": b"MIT\n", "voice/model": b"0" * 5000})
TINY = tiny_package(pinned(DATA, executables=("bin/tiny",), left_out=("voice",)))
(BUILD,) = TINY.builds

INSTALL = """
import sys
from ares_exp.agents.toolbox.installing import install
from ares_exp.agents.toolbox.package import *
install(eval(sys.argv[1]), say=print)
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NpmRegistry]:
    with NpmRegistry(DATA) as registry:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("npm_config_registry", registry.url)
        yield registry


def installing() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", INSTALL, repr(BUILD)], stdout=subprocess.PIPE, text=True)


def left_in_cache() -> list[str]:
    return sorted(path.name for path in AgentStore().folder.iterdir() if path.suffix != ".lock")


def test_package_is_fetched_once_and_read_only(registry: NpmRegistry) -> None:
    said: list[str] = []
    found = install(BUILD, say=said.append)
    again = install(BUILD, say=said.append)
    assert again == found
    assert registry.requests == ["/@tests/tiny/-/tiny-1.2.3.tgz"]
    assert len(said) == 1
    files = {
        path.relative_to(found.path).as_posix(): f"{path.stat().st_mode & 0o777:o}" for path in found.path.rglob("*")
    }
    assert files == {"bin": "755", "bin/tiny": "555", "LICENSE": "444", "ares_exp.json": files["ares_exp.json"]}
    assert (found.path / "bin/tiny").read_bytes() == PROGRAM
    assert left_in_cache() == [BUILD.key]
    assert found.mount.target == "/opt/ares_exp/tiny/any"


def test_unpinned_bytes_are_refused(registry: NpmRegistry) -> None:
    for data in (tgz({"bin/tiny": b"another"}), DATA[:-1] + b"!", DATA + b"0" * 10_000_000):
        registry.data = data
        with pytest.raises(ToolboxError, match=r"Expected http://.* to have the digest sha512-\S+, got sha512-"):
            install(BUILD, say=print)
        assert left_in_cache() == []


def test_failed_download_is_retried_a_few_times(registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "WAITS_SEC", (0.0, 0.01, 0.01))
    registry.cut = 1
    install(BUILD, say=print)
    assert len(registry.requests) == 2
    assert AgentStore().remove(BUILD)
    registry.cut = 1000
    with pytest.raises(ToolboxError, match=r"cannot be fetched from http://127.0.0.1:.*IncompleteRead"):
        install(BUILD, say=print)
    assert left_in_cache() == []


def test_archives_cannot_escape_or_contain_links(registry: NpmRegistry, tmp_path: Path) -> None:
    outside, link = tarfile.TarInfo("package/../../../evil"), tarfile.TarInfo("package/bin/inner")
    link.type, link.linkname = tarfile.SYMTYPE, "tiny"
    for member, problem in ((outside, "outside of the target directory"), (link, "found the link")):
        registry.data = tgz({"bin/tiny": PROGRAM, "evil": member})
        with pytest.raises(ToolboxError, match=problem):
            install(replace(BUILD, parts=(pinned(registry.data),)), say=print)
        assert left_in_cache() == []
    assert not list(tmp_path.rglob("evil"))


def test_package_without_its_program_is_refused(registry: NpmRegistry) -> None:
    registry.data = tgz({"README.md": b"moved"})
    with pytest.raises(ToolboxError, match="to contain the file bin/tiny, but the file is missing"):
        install(replace(BUILD, parts=(pinned(registry.data, executables=("bin/tiny",)),)), say=print)


def test_two_processes_fetch_a_package_once(registry: NpmRegistry) -> None:
    registry.go_on.clear()
    first = installing()
    assert registry.reached.wait(30)
    second = installing()
    registry.go_on.set()
    said = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert (first.returncode, second.returncode, len(registry.requests)) == (0, 0, 1)
    assert sorted(map(bool, said)) == [False, True]


def test_killed_installation_leaves_no_finished_entry(registry: NpmRegistry) -> None:
    registry.go_on.clear()
    with installing() as process:
        assert registry.reached.wait(30)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert AgentStore().find(BUILD) is None
    assert left_in_cache() != []
    registry.go_on.set()
    install(BUILD, say=print)
    assert left_in_cache() == [BUILD.key]


def test_stopped_installation_is_an_error(registry: NpmRegistry) -> None:
    child = ChildProcess()
    child.stop()
    with pytest.raises(ToolboxError, match="was stopped"):
        install(BUILD, say=print, child=child)


def test_changed_cache_entries_are_not_used(registry: NpmRegistry) -> None:
    found = install(BUILD, say=print)
    program = found.path / "bin/tiny"
    program.chmod(0o755)
    assert AgentStore().find(BUILD) is not None, "the files are not read before every run"
    assert AgentStore().find(BUILD, thoroughly=True) is None
    assert AgentStore().find(replace(BUILD, parts=())) is not None
    assert AgentStore().find(replace(BUILD, parts=(pinned(DATA),))) is None, "another pin of the same version"


async def test_package_in_use_is_not_removed(registry: NpmRegistry) -> None:
    await ensure([BUILD])
    with pytest.raises(ToolboxError, match="in use by a running process"):
        AgentStore().remove(BUILD)


def test_commands_install_list_and_remove(
    registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(catalogue.PACKAGES, "tiny", TINY)
    assert main(["install", "tiny"]) == 0
    assert "Fetching tiny 1.2.3" in capsys.readouterr().err
    assert main(["list", "--json"]) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert listed["tiny"]["builds"][0]["installed"] == str(AgentStore().place(BUILD))
    assert listed["claude_code"]["licence"] == "proprietary"
    assert all(build["installed"] is None for build in listed["codex"]["builds"])
    assert main(["list"]) == 0
    assert "mini_swe_agent" in capsys.readouterr().out
    program = AgentStore().place(BUILD) / "bin/tiny"
    program.chmod(0o755)
    program.write_bytes(PROGRAM.replace(b"tiny", b"evil"))
    program.chmod(0o555)
    assert main(["install", "tiny"]) == 0
    assert "was changed after its installation" in capsys.readouterr().err
    assert program.read_bytes() == PROGRAM
    assert main(["remove", "tiny"]) == 0
    assert main(["remove", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "None of these packages is installed."
    for argv, problem in (
        (["install"], "Name at least one agent"),
        (["install", "codx"], "Did you mean `codex`?"),
        (["install", "opencode", "--libc", "musl"], "opencode 1.18.33 cannot be installed for"),
    ):
        assert main(argv) == 2
        assert problem in capsys.readouterr().err


def test_all_packages_are_fully_pinned() -> None:
    for package in PACKAGES.values():
        keys = [build.key for build in package.builds]
        assert len(set(keys)) == len(keys)
        assert all(build.version == package.version for build in package.builds)
        for part in (part for build in package.builds for part in build.parts):
            if isinstance(part, Wheels):
                for python in PYTHONS:
                    lines = requirement_lines(part, python).splitlines()
                    assert all("==" in line and "--hash=sha256:" in line and ";" not in line for line in lines)
            elif isinstance(part, Pack):
                assert all(parse_spec(spec)[2] for spec in part.specs)
            else:
                assert len(part.integrity) == len("sha512-") + 88


def test_markers_follow_the_target_python() -> None:
    (wheels,) = PACKAGES["mini_swe_agent"].builds[0].parts
    assert isinstance(wheels, Wheels)
    assert "exceptiongroup==" in requirement_lines(wheels, "3.10")
    assert "exceptiongroup==" not in requirement_lines(wheels, "3.12")


@pytest.mark.local
async def test_container_sees_the_package_read_only(registry: NpmRegistry, tmp_path: Path) -> None:
    (found,) = await ensure([BUILD])
    factory = LocalContainerFactory()
    async with factory(ContainerSpec("toolbox", mounts=(found.mount,))) as box:
        placed = await fitting_build(box, TINY, [BUILD])
        await check_runs(box, TINY, placed.build, placed.path("bin", "tiny"))
        tried = await box.exec(f"cd {placed.path()} && for f in LICENSE bin/tiny new; do echo x 2>&1 >$f; done; id -u")
        assert tried.output.count("Read-only file system") == 3, tried.output
        delta = await box.capture_changes(ObjectStore(tmp_path / "store"))  # type: ignore[attr-defined]
        assert not [path for path in delta.entries if path.startswith("/opt/ares_exp/tiny/any")]
        for command in ("false", "echo tiny 9.9.9"):
            with pytest.raises(AgentInstallError, match=r"Tiny 1.2.3 does not run in this container"):
                await check_runs(box, TINY, BUILD, command)
    assert (found.path / "bin/tiny").read_bytes() == PROGRAM


@pytest.mark.local
async def test_unsupported_container_is_refused_by_name() -> None:
    def build(libc: Any, python: str | None = None) -> Build:
        return Build("tiny", "1.2.3", this_machine(), libc, (), python=python)

    package = AgentPackage("tiny", "Tiny", "1.2.3", "MIT", (), (), {"glibc": "glibc 2.99"})
    async with LocalContainerFactory()(ContainerSpec("toolbox")) as box:
        for builds, problem in (
            (
                [build("musl")],
                "This container has glibc, but Tiny is not installed for glibc. Run `ares-exp agents",
            ),
            ([build("glibc", "2.7")], r"This container has Python 3\.\d+, .*`ares-exp agents install tiny --python 3"),
        ):
            with pytest.raises(AgentInstallError, match=problem):
                await fitting_build(box, package, builds)
        with pytest.raises(AgentInstallError, match=r"It needs glibc 2.99 or newer, and the container has glibc 2\."):
            await check_runs(box, package, build("glibc"), "false")
        with pytest.raises(AgentInstallError, match="needs nosh to run commands, and this container has none of them"):
            await check_runs(box, replace(package, shells=("nosh",)), build("glibc"), "echo 1.2.3")
        await check_runs(box, replace(package, shells=("nosh", "sh")), build("glibc"), "echo 1.2.3")
        minor = (await box.exec("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'")).output.strip()
        placed = await fitting_build(box, package, [build("musl"), build("glibc", "2.7"), build("glibc", minor)])
        assert placed.build.variant == f"glibc-py{minor}"
        assert os.path.isabs(placed.python)  # noqa: PTH117
