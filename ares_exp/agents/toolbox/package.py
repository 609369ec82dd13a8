"""What is pinned of an agent's package: its version, its builds for machines and C libraries, and their digests."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Libc = Literal["glibc", "musl", "any"]
"""The C library that a build needs; `"any"` of what is linked statically, or is no machine code."""

MOUNT_ROOT = "/opt/ares_exp"
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class NpmTarball:
    """The tarball of one package version, as the npm registry has it.

    Attributes:
        package: Its name, with its scope.
        version: Its version.
        integrity: `sha512-` and the digest in base64: `dist.integrity` of the registry.
        size: Bytes of the tarball.
        unpacked: Bound on the bytes in it.
        executables: Files that are made executable; npm's tarballs leave that to npm.
        left_out: Files and directories in it that are not kept.
    """

    package: str
    version: str
    integrity: str
    size: int
    unpacked: int
    executables: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wheels:
    """Wheels of a Python package index, unpacked into one directory.

    Attributes:
        lock: Requirements with digests: lines of a requirements file, or the name of one in this folder (`….lock`).
        size: Bytes that are fetched, about.
        into: The directory in the build.
        left_out: Files and directories in it that are not kept.
    """

    lock: str
    size: int
    into: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Build:
    """One build of an agent, a directory.

    Attributes:
        name: The agent, as in `agent=NAME`.
        version: Its version.
        machine: `"x64"` or `"arm64"`.
        libc: The C library that it needs.
        python: The minor version of Python that it needs, such as `"3.12"`; `None`: none.
        parts: What it is made of.
    """

    name: str
    version: str
    machine: str
    libc: Libc
    parts: tuple[NpmTarball | Wheels, ...]
    python: str | None = None

    @property
    def variant(self) -> str:
        """What tells it apart from other builds for this machine: `"glibc"`, `"musl-py3.12"`."""
        return self.libc if self.python is None else f"{self.libc}-py{self.python}"

    @property
    def key(self) -> str:
        """Its name in the cache."""
        return f"{self.name}-{self.version}-linux-{self.machine}-{self.variant}"

    @property
    def target(self) -> str:
        """Where it is in containers."""
        return f"{MOUNT_ROOT}/{self.name}/{self.variant}"

    @property
    def size(self) -> int:
        """Bytes that are fetched for it, about."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class AgentPackage:
    """One agent.

    Attributes:
        name: As in `agent=NAME`.
        title: Its vendor's name for it.
        version: The pinned version.
        licence: Its licence.
        wires: The wire formats that it speaks.
        floors: What a container needs, by the kind of build: the C library's oldest version.
        builds: All builds, for every machine.
        shells: Programs of which the container needs one: its commands are run by it. Empty: any shell will do.
    """

    name: str
    title: str
    version: str
    licence: str
    wires: tuple[str, ...]
    builds: tuple[Build, ...]
    floors: Mapping[Libc, str] = field(default_factory=dict)
    shells: tuple[str, ...] = ()

    def for_machine(self, machine: str | None = None) -> tuple[Build, ...]:
        """Returns the builds for a machine, by default this one."""
        wanted = machine or this_machine()
        return tuple(build for build in self.builds if build.machine == wanted)


def this_machine() -> str:
    """Returns the architecture of this machine by npm's names."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)
