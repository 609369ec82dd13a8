"""The checks of local isolation, the seccomp filter, and the upper directory of an overlay."""

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.capture import find_upper_directory
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local import LocalContainerFactory, isolation
from ares_exp.containers.local.host_factory import HostContainer, HostContainerFactory
from ares_exp.containers.local.isolation import Isolation, Machine, compiled_filter, evidence
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import ConfigError, PreflightError, SnapshotUnsupportedError, UnsupportedTaskError

_CONTAINER = "ares_exp.containers.local.container"


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
def test_container_evidence_is_found(
    tmp_path: Path, file: str, content: str, environment: dict[str, str], filesystem: str, found: list[str]
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert list(evidence(tmp_path, environment, filesystem)) == found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A container without namespaces whose user is root."""
    monkeypatch.setattr(f"{_CONTAINER}.find_isolation", lambda: Machine("none", "bwrap: no"))
    for module in (_CONTAINER, "ares_exp.containers.local.host_factory", "ares_exp.containers.local.isolation"):
        monkeypatch.setattr(f"{module}.container_evidence", lambda: "/.dockerenv exists")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return monkeypatch


def test_local_without_namespaces_uses_the_host(machine: pytest.MonkeyPatch) -> None:
    factory = LocalContainerFactory()
    assert isinstance(factory(ContainerSpec("t")), HostContainer)
    assert (factory.max_containers, factory.is_isolated) == (1, False)
    with pytest.raises(ConfigError, match="container=host uses this machine's own files"):
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
        with pytest.raises(PreflightError, match=f"container=local works on .*{failure}.*less busy, or use"):
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
        machine.setattr(f"{_CONTAINER}.container_evidence", lambda: None)
    elif lacking == "root":
        machine.setattr(os, "geteuid", lambda: 1000)
    else:
        machine.setattr(f"{_CONTAINER}.find_isolation", lambda: Machine("shared processes"))
    factory = LocalContainerFactory()
    assert not isinstance(factory(ContainerSpec("t")), HostContainer)
    assert factory.max_containers is None
    factory.check_snapshots()


@pytest.mark.parametrize(("isolation", "expected"), [("namespaces", True), ("shared processes", False)])
def test_only_all_namespaces_isolate(machine: pytest.MonkeyPatch, isolation: Isolation, expected: bool) -> None:
    machine.setattr(f"{_CONTAINER}.find_isolation", lambda: Machine(isolation))
    assert LocalContainerFactory().is_isolated == expected


async def test_host_needs_root_and_suggests_remedies(machine: pytest.MonkeyPatch) -> None:
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
def test_host_refuses_unsupported_specs(unsupported: dict[str, object]) -> None:
    with pytest.raises(UnsupportedTaskError, match=r"container=(host|docker)"):
        HostContainerFactory().check(ContainerSpec("t", **unsupported))  # type: ignore[arg-type]


async def test_host_rejects_the_files_of_a_snapshot(tmp_path: Path) -> None:
    changes = StoredChanges(Delta("host:any", {}), ObjectStore(tmp_path))
    with pytest.raises(SnapshotUnsupportedError, match="Set `snapshot=none`"):
        await HostContainer(ContainerSpec("t", changes=changes)).start()
    with pytest.raises(ConfigError, match="Set `snapshot=none`"):
        HostContainerFactory().check_snapshots()


def test_host_warns_of_limits_and_networks() -> None:
    spec = ContainerSpec("t", network=NO_NETWORK, cpus=2, memory_mb=512)
    assert HostContainerFactory().check(spec) == [
        "cpus=2: not enforced by container=host",
        "memory_mb=512: not enforced by container=host",
        "network: not disabled by container=host, although the task requires no network",
    ]


ALLOW, ERROR = 0x7FFF0000, 0x00050000
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
NEW_USER_NAMESPACE = 0x10000000


def verdict(machine: str, architecture: int, number: int, first_argument: int = 0) -> int:
    """Runs the classic BPF program on one system call."""
    code = compiled_filter(machine)
    assert code is not None
    program = list(struct.iter_unpack("<HBBI", code))
    data = {0: number, 4: architecture, 16: first_argument & 0xFFFFFFFF}
    position = accumulator = 0
    while True:
        operation, if_true, if_false, operand = program[position]
        position += 1
        if operation == 0x20:
            accumulator = data[operand]
        elif operation == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            position += if_true if holds[operation] else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "keyctl", "bpf", "clone", "unshare", "read", "socket"),
    [("x86_64", X86_64, 250, 321, 56, 272, 0, 41), ("aarch64", AARCH64, 219, 280, 220, 97, 63, 198)],
)
def test_seccomp_filter_allows_or_refuses_calls(
    machine: str, architecture: int, keyctl: int, bpf: int, clone: int, unshare: int, read: int, socket: int
) -> None:
    denied, not_here = ERROR | errno.EPERM, ERROR | errno.ENOSYS
    assert verdict(machine, architecture, read) == ALLOW
    assert verdict(machine, architecture, keyctl) == denied
    assert verdict(machine, architecture, bpf) == denied
    assert verdict(machine, architecture, 435) == not_here
    for number in (clone, unshare):
        assert verdict(machine, architecture, number, 0x11) == ALLOW
        assert verdict(machine, architecture, number, NEW_USER_NAMESPACE | 0x11) == denied
    assert verdict(machine, architecture, socket, 40) == denied
    assert verdict(machine, architecture, socket, 2) == ALLOW
    assert verdict(machine, architecture, read, 40) == ALLOW
    assert verdict(machine, architecture, read, NEW_USER_NAMESPACE) == ALLOW
    assert verdict(machine, I386, read) == not_here
    assert verdict(machine, architecture, read | 0x40000000) == not_here


def test_unknown_architecture_has_no_filter() -> None:
    assert compiled_filter("riscv64") is None


ID = "0123456789abcdef" * 4
ALL_IDS = "         0          0 4294967295\n"


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    upper = tmp_path / "over lay" / "diff"
    upper.mkdir(parents=True)
    return upper


@pytest.fixture
def proc(tmp_path: Path, upper: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a container that may be read."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "42").mkdir()
    (proc / "self" / "status").write_text("Name:\tpython\nCapEff:\t000001ffffffffff\n")
    (proc / "42" / "uid_map").write_text(ALL_IDS)
    mount(proc, f"rw,lowerdir=/l1:/l2,upperdir={upper},workdir=/w".replace(" ", "\\040"))
    return proc


def mounted(options: str, *, kind: str = "overlay", of: str = ID) -> str:
    return (
        f"72 48 0:39 / / rw,relatime master:2 - {kind} {kind} {options}\n"
        f"92 72 254:0 /docker/containers/{of}/hostname /etc/hostname rw - ext4 /dev/vda rw\n"
    )


def mount(proc: Path, options: str) -> None:
    (proc / "42" / "mountinfo").write_text(mounted(options))


def container(told: Path | None = None) -> dict[str, Any]:
    data = {"GraphDriver": {"Name": "overlay2", "Data": {"UpperDir": str(told)}}} if told is not None else {}
    return {"Id": ID, "State": {"Pid": 42}, **data}


def test_upper_directory_is_found(proc: Path, upper: Path) -> None:
    assert find_upper_directory(container(), proc) == upper  # the kernel says it
    mount(proc, "rw,upperdir=l/UPPER")  # relative to a directory of the engine's, where the options would be too long
    assert find_upper_directory(container(upper), proc) == upper


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("self/status", "CapEff:\t00000000a80425fb\n", "CAP_SYS_ADMIN"),
        ("42/mountinfo", mounted("rw,upperdir=/x", of="f" * 64), "elsewhere"),
        ("42/mountinfo", None, "elsewhere"),
        ("42/uid_map", "         0     100000      65536\n", "mapped"),
        ("42/mountinfo", mounted("rw,upperdir=/x,redirect_dir=on"), "redirect_dir"),
        ("42/mountinfo", mounted("rw,upperdir=/x,metacopy=on"), "metacopy"),
        ("42/mountinfo", mounted("rw,subvolid=5", kind="btrfs"), "does not use overlayfs"),
        ("../over lay/diff", None, "does not exist on this"),
    ],
)
def test_unreadable_upper_directory_is_refused(
    proc: Path, upper: Path, file: str, content: str | None, reason: str
) -> None:
    path = proc / file
    if content is not None:
        path.write_text(content)
    elif path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    with pytest.raises(SnapshotUnsupportedError, match=reason):
        find_upper_directory(container(upper), proc)


def test_upper_directory_needs_root(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SnapshotUnsupportedError, match="root"):
        find_upper_directory(container(), proc)
