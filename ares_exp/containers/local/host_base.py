"""What a local box's changes are relative to: the name of this host's system, equal for hosts that show a box the same.

Not every file of the host is looked at, which would take seconds: the operating system's release, the packages that are
installed, the directories that a box sees, and the Python that is shown in it.
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
    "directories": "the directories of the host that a box sees",
    "python": "the Python that a box sees",
}


def host_base(parts: Iterable[Part]) -> str:
    """`host:` and what this host is, as far as a box sees it. Blocking; looked up once, some milliseconds.

    Args:
        parts: The box's root directory.
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
    """Checks that changes recorded elsewhere mean the same here.

    Args:
        recorded: The base that they were recorded on.
        ours: From `host_base`.

    Raises:
        SnapshotMismatchError: They do not; with what differs.
    """
    if recorded == ours:
        return
    if not recorded.startswith(_PREFIX):
        raise SnapshotMismatchError(
            f"The snapshot's files belong on top of {recorded}, and container=local starts from this host's own files. "
            "Restore it with the container that it was made with, container=docker mostly."
        )
    theirs, here = (_fields(base) for base in (recorded, ours))
    differing = [
        f"{words} ({theirs.get(name, 'unknown')} there, {here[name]} here)"
        for name, words in _WORDS.items()
        if theirs.get(name) != here[name]
    ]
    raise SnapshotMismatchError(
        f"The snapshot's files belong on top of another host, {recorded}, and would mean something else here. What "
        f"differs: {', '.join(differing) or 'how it is described'}. Restore it on the host that it was made on, as the "
        "same user, or on one like it; with container=docker, snapshots depend on an image alone."
    )


def _fields(base: str) -> dict[str, str]:
    return {name: value for name, _, value in (field.partition("=") for field in base[len(_PREFIX) :].split(";"))}


def _content(path: Path) -> str:
    """What tells one state of a package database from another."""
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
