"""The base of a local container's changes: a name of this host's system, equal for hosts that look the same inside.

It covers the operating system's release, the installed packages, the directories that a container sees, and its Python.
Reading every file of the host would take seconds.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ares_exp.containers.local.host_root import Part
from ares_exp.errors import SnapshotMismatchError

_PACKAGES = (
    "/var/lib/dpkg/status",
    "/lib/apk/db/installed",
    "/var/lib/pacman/local",
    "/usr/lib/sysimage/rpm/rpmdb.sqlite",
    "/var/lib/rpm/rpmdb.sqlite",
    "/var/lib/rpm/Packages",
)
_READ_BYTES = 16 * 1024**2
_PREFIX = "host:"
_WORDS = {
    "machine": "the processor",
    "system": "the operating system",
    "packages": "the installed packages",
    "directories": "the directories of the host that a container sees",
    "python": "the Python that a container sees",
}


def host_base(parts: Iterable[Part]) -> str:
    """Returns `host:` and a description of this host as a container sees it. Blocking; read once, in some milliseconds.

    Args:
        parts: The parts of the container's root directory.
    """
    mounts = tuple((part.kind, part.path) for part in parts if part.kind in ("overlay", "bind"))
    return _host_base(mounts)


@functools.lru_cache(maxsize=8)
def _host_base(mounts: tuple[tuple[str, str], ...]) -> str:
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    is_shown = any(kind == "bind" and path == sys.base_prefix for kind, path in mounts)
    system = f"{release.get('ID', 'unknown')}-{release.get('VERSION_ID', '')}"
    found = {
        "machine": platform.machine(),
        "system": f"{system}-{_digest(repr(sorted(release.items())))}",
        "packages": _digest("".join(_content(Path(path)) for path in _PACKAGES)),
        "directories": _digest(repr(sorted(mounts))),
        "python": f"{platform.python_version()}-{_digest(sys.base_prefix)}" if is_shown else "its-own",
    }
    return _PREFIX + ";".join(f"{name}={re.sub(r'[^A-Za-z0-9._-]', '_', value)[:60]}" for name, value in found.items())


def require_base(recorded: str, ours: str) -> None:
    """Checks that changes recorded elsewhere apply to this host.

    Args:
        recorded: Their base.
        ours: From `host_base`.

    Raises:
        SnapshotMismatchError: They do not; with the differences.
    """
    if recorded == ours:
        return
    if not recorded.startswith(_PREFIX):
        raise SnapshotMismatchError(
            f"The snapshot's files are changes to {recorded}, but container=local starts from this host's files. "
            "Restore it with the backend that made it, usually container=docker."
        )
    theirs, here = (_fields(base) for base in (recorded, ours))
    differing = [
        f"{words} ({theirs.get(name, 'unknown')} there, {here[name]} here)"
        for name, words in _WORDS.items()
        if theirs.get(name) != here[name]
    ]
    raise SnapshotMismatchError(
        f"The snapshot's files are changes to another host, {recorded}, and do not apply here. "
        f"Differences: {', '.join(differing) or 'the format of the description'}. Restore it on that host, as the "
        "same user, or on an equal one; with container=docker, snapshots depend only on an image."
    )


def _fields(base: str) -> dict[str, str]:
    return {name: value for name, _, value in (field.partition("=") for field in base[len(_PREFIX) :].split(";"))}


def _content(path: Path) -> str:
    """Returns a fingerprint of a package database."""
    try:
        if path.is_dir():
            return repr(sorted(child.name for child in path.iterdir()))
        found = path.stat()
        if found.st_size > _READ_BYTES:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:12]
