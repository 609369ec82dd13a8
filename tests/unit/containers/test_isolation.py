"""The choice of a mode by `container=local`, and the refusals of `container=host`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local import LocalContainerFactory, isolation
from ares_exp.containers.local.host_factory import HostContainer, HostContainerFactory
from ares_exp.containers.local.isolation import Isolation, Machine, evidence
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import ConfigError, PreflightError, SnapshotUnsupportedError, UnsupportedTaskError

_FACTORY = "ares_exp.containers.local.factory"


@pytest.mark.parametrize(
    ("file", "content", "environment", "filesystem", "found"),
    [
        (".dockerenv", "", {}, "ext4", ["/.dockerenv exists"]),
        ("run/.containerenv", "", {}, "ext4", ["/run/.containerenv exists"]),
        ("proc/1/environ", "A=b\0container=podman\0", {}, "ext4", ["its first process has container=podman"]),
        ("proc/1/cgroup", "0::/kubepods/x\n", {}, "ext4", ["/proc/1/cgroup names kubepods"]),
        ("proc/1/cgroup", "0::/init.scope\n", {}, "ext4", []),
        ("other", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "ext4", ["KUBERNETES_SERVICE_HOST is set"]),
        ("other", "", {}, "overlay", ["its root is an overlay"]),
        ("other", "", {}, "ext4", []),
    ],
)
def test_evidence_of_a_container(
    tmp_path: Path, file: str, content: str, environment: dict[str, str], filesystem: str, found: list[str]
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert list(evidence(tmp_path, environment, filesystem)) == found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A container without namespaces whose user is root."""
    monkeypatch.setattr(f"{_FACTORY}.find_isolation", lambda: Machine("none", "bwrap: no"))
    for module in (_FACTORY, "ares_exp.containers.local.host_factory", "ares_exp.containers.local.isolation"):
        monkeypatch.setattr(f"{module}.container_evidence", lambda: "/.dockerenv exists")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return monkeypatch


def test_local_without_namespaces_uses_the_host(machine: pytest.MonkeyPatch) -> None:
    factory = LocalContainerFactory()
    assert isinstance(factory(ContainerSpec("t")), HostContainer)
    assert (factory.max_containers, factory.is_isolated) == (1, False)
    with pytest.raises(ConfigError, match="container=host works in this machine's own files"):
        factory.check_snapshots()


_FAILURES = {
    "busy": BlockingIOError(errno.EAGAIN, "busy"),
    "did not end within 20 s": subprocess.TimeoutExpired("bwrap", 20),
}


@pytest.mark.skipif(sys.platform != "linux", reason="it needs Linux")
@pytest.mark.parametrize("failure", _FAILURES)
def test_busy_machine_is_an_error_and_tested_again(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise _FAILURES[failure]

    isolation.find_isolation.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", fail)
        patch.setattr(isolation, "find_bwrap", lambda: Path("/usr/bin/bwrap"))
        with pytest.raises(PreflightError, match=f"The test of container=local failed: .*{failure}.*less busy, or use"):
            isolation.find_isolation()
    assert failure not in isolation.find_isolation().problem


def test_missing_bubblewrap_allows_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise PreflightError("no bubblewrap")

    isolation.find_isolation.cache_clear()
    monkeypatch.setattr(isolation, "find_bwrap", fail)
    try:
        assert isolation.find_isolation() == Machine("none", "no bubblewrap")
    finally:
        isolation.find_isolation.cache_clear()


@pytest.mark.parametrize("lacking", ["evidence", "root", "need"])
def test_local_never_uses_the_host_elsewhere(machine: pytest.MonkeyPatch, lacking: str) -> None:
    if lacking == "evidence":
        machine.setattr(f"{_FACTORY}.container_evidence", lambda: None)
    elif lacking == "root":
        machine.setattr(os, "geteuid", lambda: 1000)
    else:
        machine.setattr(f"{_FACTORY}.find_isolation", lambda: Machine("shared processes"))
    factory = LocalContainerFactory()
    assert not isinstance(factory(ContainerSpec("t")), HostContainer)
    assert factory.max_containers is None
    factory.check_snapshots()


@pytest.mark.parametrize(("isolation", "expected"), [("namespaces", True), ("shared processes", False)])
def test_only_all_namespaces_isolate(machine: pytest.MonkeyPatch, isolation: Isolation, expected: bool) -> None:
    machine.setattr(f"{_FACTORY}.find_isolation", lambda: Machine(isolation))
    assert LocalContainerFactory().is_isolated == expected


async def test_host_needs_root_and_names_the_ways_out(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PreflightError) as caught:
        await HostContainerFactory().preflight()
    for part in ("user 1000", "/.dockerenv exists", "--user 0", "container=docker", "container=daytona"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "unsupported",
    [
        {"docker_image": "debian"},
        {"compose_file": Path("/compose.yaml")},
        {"gpus": 1},
        {"network": NetworkPolicy("allowlist", frozenset({"pypi.org"}))},
        {"network": NO_NETWORK, "phase_networks": frozenset({PUBLIC})},
    ],
)
def test_host_refuses_what_it_cannot_provide(unsupported: dict[str, object]) -> None:
    with pytest.raises(UnsupportedTaskError, match=r"container=(host|docker)"):
        HostContainerFactory().check(ContainerSpec("t", **unsupported))  # type: ignore[arg-type]


async def test_host_rejects_the_files_of_a_snapshot(tmp_path: Path) -> None:
    changes = StoredChanges(Delta("host:any", {}), ObjectStore(tmp_path))
    with pytest.raises(SnapshotUnsupportedError, match="Set `snapshot=none`"):
        await HostContainer(ContainerSpec("t", changes=changes)).start()


def test_host_warns_of_limits_and_networks() -> None:
    spec = ContainerSpec("t", network=NO_NETWORK, cpus=2, memory_mb=512)
    assert HostContainerFactory().check(spec) == [
        "cpus=2: not enforced by container=host",
        "memory_mb=512: not enforced by container=host",
        "network: not cut off by container=host, although the task asks for none",
    ]
