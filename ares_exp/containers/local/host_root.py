"""The host's files that a local container sees, and the layer over them that hides or replaces some files.

Only these files are visible: `/usr`, `/etc`, the package database and (if needed) this process's Python installation.
Other directories (homes, `/root`, `/opt`, `/srv`, `/mnt`, most of `/var`, the checkout of this project) are missing or
empty in the container. Each visible directory is the lower layer of an overlay, whose upper layer receives the
container's changes (`container_files`).

Between these two layers is a third, small layer, which is written for each container. It hides files in `/etc` that not
every user may read: permissions do not protect them, because root in the container may be root on the host. It also
removes the accounts of people, and adds `python3` if the host's PATH has no such program.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ares_exp.containers.container import Mount as MountedDirectory
from ares_exp.containers.local.isolation import HOSTNAME, mounts

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SYSTEM = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PACKAGES = ("var/lib/dpkg", "var/lib/apt", "var/lib/rpm", "var/lib/pacman", "var/lib/alternatives")
_SHARED = ("/tmp", "/var/tmp", "/run/lock")
_EMPTY = (
    *("/run", "/home", "/opt", "/srv", "/mnt", "/media", "/var/lib", "/var/spool", "/var/log/apt"),
    "/var/cache/apt/archives/partial",
)
_OURS = ("bin", "sbin", "lib", "share", "local", *(f"local/{name}" for name in ("bin", "sbin", "lib", "share", "etc")))
"""Directories of `/usr` that the layer also contains, so that the container's root owns them."""

_FIRST_HUMAN_ID = 1000
_NOBODY_IDS = (65533, 65534)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the container's root directory, such as a mount. Without parts, this directory would be empty.

    Attributes:
        kind: `"directory"` or `"symlink"`: a new entry; `"overlay"`: a directory on the host, whose changes stay in the
            container; `"bind"`: a read-only file or directory on the host; `"mount"`: a read-only directory of
            `ContainerSpec.mounts`.
        path: Path in the container.
        sources: For an overlay, host directories, lowest first. For a bind or mount, the host path. For a symlink, its
            target.
        mode: Mode of a directory.
    """

    kind: Literal["directory", "symlink", "overlay", "bind", "mount"]
    path: str
    sources: tuple[str, ...] = ()
    mode: int = 0o755


def root_parts(layer: Path, *, privileged: bool) -> list[Part]:
    """Returns the parts of the container's root directory, parents first. `write_layer` must have written `layer`.

    Only a `privileged` process may mount an overlay over a directory with other mounts below it. Otherwise, each entry
    of such a directory becomes a separate part.
    """
    parts = [Part("directory", path) for path in _EMPTY]
    parts += [Part("directory", path, mode=0o1777) for path in _SHARED]
    parts += [Part("directory", "/root", mode=0o711)]
    parts += [Part("symlink", "/var/run", ("/run",)), Part("symlink", "/var/lock", ("/run/lock",))]
    points = sorted({mount.point for mount in mounts()})
    for name in (*_SYSTEM, *_PACKAGES):
        parts += _entry(Path("/", name), layer, points, privileged=privileged)
    prefix = Path(sys.base_prefix)
    for path in () if _has_python() else dict.fromkeys((prefix, prefix.resolve())):  # the Python that runs us
        parts += [Part("directory", str(parent)) for parent in reversed(path.parents[:-1])]
        parts.append(Part("bind", str(path), (str(path),)))
    return parts


def mount_parts(given: Iterable[MountedDirectory]) -> list[Part]:
    """Returns the parts for `ContainerSpec.mounts`, and for the directories above them."""
    parts: list[Part] = []
    for one in given:
        parts += [Part("directory", str(parent)) for parent in reversed(Path(one.target).parents[:-1])]
        parts.append(Part("mount", one.target, (str(one.source),)))
    return parts


def _entry(path: Path, layer: Path, points: list[Path], *, privileged: bool) -> list[Part]:
    ours = layer / path.relative_to("/")
    source = ours if os.path.lexists(ours) and not ours.is_dir() else path
    if source.is_symlink():
        return [Part("symlink", str(path), (str(source.readlink()),))]
    if source.is_file():
        return [Part("bind", str(path), (str(source),))]
    if not source.is_dir():
        return []
    below = [point for point in points if path in point.parents and point.is_dir()]
    if privileged:  # an overlay does not show the mounts below it
        return [_overlay(one, layer) for one in (path, *below) if not any(map(one.is_relative_to, _hidden_in_etc()))]
    if not any(path in point.parents for point in points):
        return [_overlay(path, layer)]
    names = {child.name for directory in (path, ours) if directory.is_dir() for child in directory.iterdir()}
    entries = (_entry(path / name, layer, points, privileged=False) for name in sorted(names))
    return [Part("directory", str(path)), *(part for entry in entries for part in entry)]


def _overlay(path: Path, layer: Path) -> Part:
    ours = layer / path.relative_to("/")
    return Part("overlay", str(path), (str(path), str(ours)) if ours.is_dir() else (str(path),))


def _has_python() -> bool:
    return shutil.which("python3", path=SEARCH_PATH) is not None


def write_layer(layer: Path, *, share_network: bool) -> None:
    """Writes the files that hide or replace the host's files to `layer`, an empty directory of this user."""
    for name in _OURS:
        if not Path("/usr", name).is_symlink():
            _mirror(Path("/usr", name), layer / "usr" / name)
    for path in _hidden_in_etc():
        _hide(path, layer)
    _mirror(Path("/etc"), layer / "etc")
    for name, text in _etc_files(share_network=share_network):
        path = layer / "etc" / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o640 if name.endswith("shadow") else 0o644)
    for program in () if _has_python() else ("python3", "python"):  # the interpreter that runs us
        if (installed := Path(sys.base_prefix, "bin", program)).exists():
            (layer / "usr/local/bin" / program).symlink_to(installed)
    _age(layer)


@functools.cache
def _hidden_in_etc() -> tuple[Path, ...]:
    """Returns the paths in `/etc` to hide. Cached, because the search takes longer than the rest of a start."""
    return tuple(_hidden(Path("/etc")))


def _hidden(directory: Path) -> Iterator[Path]:
    """Yields the paths to hide: files that not every user may read, and the host's login scripts."""
    for entry in list(os.scandir(directory)):
        with suppress(FileNotFoundError):  # another process removed it
            mode = entry.stat(follow_symlinks=False).st_mode
            is_open = mode & stat.S_IROTH and (not stat.S_ISDIR(mode) or mode & stat.S_IXOTH)
            if stat.S_ISLNK(mode):
                continue
            if not is_open or directory == Path("/etc/profile.d"):
                yield Path(entry.path)
            elif stat.S_ISDIR(mode):
                yield from _hidden(Path(entry.path))


def _hide(path: Path, layer: Path) -> None:
    """Hides the host's `path` with a whiteout in `layer`, or with an empty file if this process may not create one."""
    target = layer / path.relative_to("/")
    for parent in reversed(path.relative_to("/").parents[:-1]):
        _mirror(Path("/", parent), layer / parent)
    try:
        os.mknod(target, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError:
        target.touch(mode=0o000)


def _mirror(path: Path, target: Path) -> None:
    """Creates `target` with the mode of the host's `path`, because an overlay shows the mode of its top layer."""
    if target.is_dir():
        return
    target.mkdir(parents=True)
    target.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU if path.is_dir() else 0o755)


def _age(layer: Path) -> None:
    """Copies the host's file times to the layer, so that snapshots see the same layer in every container."""
    for directory, _, files in os.walk(layer, topdown=False):
        for path in (*(Path(directory, name) for name in files), Path(directory)):
            host = Path("/", path.relative_to(layer))
            try:
                found = host.lstat()
            except FileNotFoundError:
                found = host.parent.lstat()
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


def _etc_files(*, share_network: bool) -> Iterator[tuple[str, str]]:
    users = list(_system_accounts(Path("/etc/passwd")))
    groups = list(_system_accounts(Path("/etc/group")))
    names = {user[0] for user in users}
    yield "passwd", _lines([*u[:5], "/root", *u[6:]] if u[0] == "root" else u for u in users)
    yield "group", _lines([*g[:3], ",".join(n for n in g[3].split(",") if n in names)] for g in groups)
    yield "shadow", _lines([user[0], "*", "19000", "0", "99999", "7", "", "", ""] for user in users)
    yield "gshadow", _lines([group[0], "*", "", ""] for group in groups)
    yield "hostname", f"{HOSTNAME}\n"
    yield "hosts", f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost ip6-localhost ip6-loopback\n"
    servers = Path("/etc/resolv.conf")
    yield "resolv.conf", servers.read_text() if share_network and servers.exists() else ""


def _system_accounts(path: Path) -> Iterator[list[str]]:
    """Yields the fields of each system account in a file such as `/etc/passwd`. Accounts of people are left out."""
    for line in path.read_text(errors="replace").splitlines():
        fields = line.split(":")
        if (
            len(fields) > 3
            and fields[2].isdigit()
            and (int(fields[2]) < _FIRST_HUMAN_ID or int(fields[2]) in _NOBODY_IDS)
        ):
            yield fields


def _lines(rows: Iterable[list[str]]) -> str:
    return "".join(":".join(row) + "\n" for row in rows)
