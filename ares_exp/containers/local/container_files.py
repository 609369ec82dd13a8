"""The files of a local container: the host's files that it sees, the layer over them, and the files that it writes.

Of the host, only these files are visible: `/usr`, `/etc`, the package database and (if needed) this process's Python
installation. Other directories (homes, `/root`, `/opt`, `/srv`, `/mnt`, most of `/var`, the checkout of this project)
are missing or empty in the container. The container's root directory is `files/` in its directory on the host, which
contains no files of the host. Each visible directory of the host is the lower layer of an overlay, whose upper layer
`upper/N` gets the container's changes. Snapshots contain `files/` and the upper layers, and no other mounts.

Between these two layers is a third, small layer, which is written for each container. It hides files in `/etc` that not
every user may read: permissions do not protect them, because root in the container may be root on the host. It also
removes the accounts of people, and adds `python3` if the host's PATH has no such program.

Captured changes can be restored only on a host with the same base. The base is a description of the host's system. It
does not cover every file of the host, because reading all files would take seconds.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ares_exp.containers.container import Mount as MountedDirectory
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges, differences, parents, sorted_by_path
from ares_exp.containers.filesystem.overlay_upper import ScanCache, scan, write_tree
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local.isolation import CHANNELS, HOSTNAME, mounts
from ares_exp.errors import CaptureError, RestoreError, SnapshotMismatchError, UnsafeSnapshotError

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


_PACKAGE_LISTS = (
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


@functools.lru_cache(maxsize=8)
def _host_base(mounts: tuple[tuple[str, str], ...]) -> str:
    """Returns a description of this host, as a container sees it, with the prefix `host:`. Cached; takes milliseconds.

    `mounts` contains the kind and the path of each overlay and bind mount of the container.
    """
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    is_shown = any(kind == "bind" and path == sys.base_prefix for kind, path in mounts)
    system = f"{release.get('ID', 'unknown')}-{release.get('VERSION_ID', '')}"
    found = {
        "machine": platform.machine(),
        "system": f"{system}-{_digest(repr(sorted(release.items())))}",
        "packages": _digest("".join(_content(Path(path)) for path in _PACKAGE_LISTS)),
        "directories": _digest(repr(sorted(mounts))),
        "python": f"{platform.python_version()}-{_digest(sys.base_prefix)}" if is_shown else "its-own",
    }
    return _PREFIX + ";".join(f"{name}={re.sub(r'[^A-Za-z0-9._-]', '_', value)[:60]}" for name, value in found.items())


def _require_base(recorded: str, ours: str) -> None:
    """Raises `SnapshotMismatchError` with the differences if `recorded` is not the base of this host (`ours`)."""
    if recorded == ours:
        return
    if not recorded.startswith(_PREFIX):
        raise SnapshotMismatchError(
            f"The snapshot contains changes to the files of {recorded}, but container=local starts from this host's "
            "files. Restore it with the backend that created it, usually container=docker."
        )
    theirs, here = (
        {name: value for name, _, value in (field.partition("=") for field in base[len(_PREFIX) :].split(";"))}
        for base in (recorded, ours)
    )
    differing = [
        f"{words} ({theirs.get(name, 'unknown')} in the snapshot, {here[name]} here)"
        for name, words in _WORDS.items()
        if theirs.get(name) != here[name]
    ]
    raise SnapshotMismatchError(
        f"The snapshot contains only changes to the files of another host, {recorded}, so it cannot be restored here. "
        f"Differences: {', '.join(differing) or 'the format of the host description'}. Restore the snapshot on that "
        "host or an identical host, as the same user. With container=docker, snapshots depend only on an image."
    )


def _content(path: Path) -> str:
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


_OPAQUE = "user.overlay.opaque"
_SHOWN_DIFFERENCES = 3
_FILES, _UPPER = "files", "upper"


def private_mounts(parts: Iterable[Part]) -> list[str]:
    """Returns the arguments of `bwrap` for a container whose files are in a tmpfs that the host cannot read."""
    words: list[str] = []
    for part in parts:
        if part.kind == "directory":
            words += ["--perms", f"{part.mode:04o}", "--dir", part.path]
        elif part.kind == "symlink":
            words += ["--symlink", *part.sources, part.path]
        else:
            words += _mount(part, "--tmp-overlay")
    return words


def _mount(part: Part, *overlay: str) -> list[str]:
    if part.kind in ("bind", "mount"):
        return ["--ro-bind", *part.sources, part.path]
    return [*(word for source in part.sources for word in ("--overlay-src", source)), *overlay, part.path]


class ContainerFiles:
    """The files of one container. All methods block, and only one may be called at a time."""

    def __init__(self, directory: Path, parts: Sequence[Part], *, privileged: bool) -> None:
        """Creates the object without writing files. `parts` make up the container's root directory, parents first."""
        self._parts = parts
        self._root = directory / _FILES
        overlays = [part for part in parts if part.kind == "overlay"]
        self._uppers = {part.path: directory / _UPPER / str(number) for number, part in enumerate(overlays)}
        self._works = {part.path: directory / "work" / str(number) for number, part in enumerate(overlays)}
        binds = [part.path for part in parts if part.kind in ("bind", "mount")]
        self._closed = frozenset(("/proc", "/dev", CHANNELS, *binds))  # not the container's files
        self._points = self._closed.union(self._uppers)
        self._inodes: dict[str, int] = {}
        self._privileged = privileged
        self._root_ids = (0, 0) if privileged else (os.geteuid(), os.getegid())
        self._new = self._initial_entries()
        self._cache: ScanCache = {}

    def make(self, changes: StoredChanges | None = None) -> None:
        """Creates the initial files of the container. `changes` are the changes of another container, from `capture`.

        Raises `SnapshotMismatchError` if the changes come from a host with another base, `UnsafeSnapshotError` if they
        include paths that do not belong to the container, and other `SnapshotError`s or `OSError` if a write fails.
        """
        for path in self._works.values():
            _make_directory(path)
        if changes is None:
            try:
                self._write(self._new, ObjectStore(self._root))  # the store is not read: there are no files
            except RestoreError as error:  # this is not a restore
                raise OSError(str(error).rstrip(".")) from error
        else:
            _require_base(changes.delta.base, self._base())
            self._refuse_mount_points(changes.delta.entries)
            gone = {path for path, entry in changes.delta.entries.items() if entry.kind != "directory"}
            kept = {path: entry for path, entry in self._new.items() if gone.isdisjoint((path, *parents(path)))}
            entries = kept | {
                path: entry
                for path, entry in changes.delta.entries.items()
                if entry.kind != "whiteout" or self._overlay_of(path) != "/"
            }
            self._write(entries, changes.objects)
            self._verify(entries, changes.objects)
        self._make_points()

    def mounts(self) -> list[str]:
        """Returns the arguments with which `bwrap` mounts these files as the container's root directory."""
        words = ["--bind", str(self._root), "/"]
        for part in self._parts:
            if part.kind == "overlay":
                words += _mount(part, "--overlay", str(self._uppers[part.path]), str(self._works[part.path]))
            elif part.kind in ("bind", "mount"):
                words += _mount(part)
        return words

    def capture(self, objects: ObjectStore) -> Delta:
        """Returns differences from a new container, including restored changes. Raises `CaptureError` if that fails."""
        notes: list[str] = []
        found = self._scan(objects, notes)
        for path, inode in self._inodes.items():
            with suppress(OSError):
                if (self._root / path[1:]).lstat().st_ino == inode:
                    continue
            raise CaptureError(f"A directory above the mount point {path} in the container was moved. Move it back.")
        changed = {path: entry for path, entry in found.items() if entry != self._new.get(path)}
        changed |= {parent: found[parent] for path in changed for parent in parents(path)}
        for path in self._new.keys() - found.keys():
            parent = found.get(path.rpartition("/")[0])
            if path.count("/") == 1 or (parent is not None and parent.kind == "directory"):
                changed |= {path: Entry("whiteout")} | {one: found[one] for one in parents(path)}
        return Delta(self._base(), sorted_by_path(changed), tuple(notes))

    def _base(self) -> str:
        return _host_base(tuple((one.kind, one.path) for one in self._parts if one.kind in ("overlay", "bind")))

    def _initial_entries(self) -> dict[str, Entry]:
        age = Path("/").stat().st_mtime_ns
        entries: dict[str, Entry] = {}
        for part in self._parts:
            around = self._overlay_of(part.path.rpartition("/")[0] or "/")
            between = [path for path in parents(part.path) if path.startswith(f"{around.rstrip('/')}/")]
            if around == "/":
                entries |= {path: Entry("directory", 0o755, mtime_ns=age) for path in between if path not in entries}
            elif part.kind == "overlay":  # other parts need no entry in the upper layer of the outer overlay
                entries |= {path: self._mirrored(path) for path in between}
            if part.kind == "overlay":
                entries[part.path] = self._mirrored(part.sources[0])
            elif part.kind == "symlink":
                entries[part.path] = Entry("symlink", mtime_ns=age, target=part.sources[0])
            elif part.kind == "directory" and around == "/" and part.path not in entries:
                entries[part.path] = Entry("directory", part.mode, mtime_ns=age)
        return entries

    def _mirrored(self, path: str) -> Entry:
        """Returns an entry for an upper layer: a directory with the attributes of the host's directory `path`."""
        found = Path(path).stat()
        uid, gid = (found.st_uid, found.st_gid) if self._privileged else (0, 0)
        return Entry("directory", stat.S_IMODE(found.st_mode) | stat.S_IRWXU, uid, gid, mtime_ns=found.st_mtime_ns)

    def _write(self, entries: Mapping[str, Entry], objects: ObjectStore) -> None:
        for layer in (self._root, *self._uppers.values()):
            _make_directory(layer)
        by_mount: dict[str, dict[str, Entry]] = {"/": {}, **{path: {} for path in self._uppers}}
        for path, entry in entries.items():
            by_mount[self._overlay_of(path)][path] = entry
        for at, inside in by_mount.items():
            mark = _OPAQUE if at in self._uppers else None
            directory = self._uppers.get(at, self._root)
            write_tree(inside, objects, directory, at=at, opaque_xattr=mark, root_ids=self._root_ids)

    def _verify(self, entries: Mapping[str, Entry], objects: ObjectStore) -> None:
        try:
            wrong = differences(Delta("", entries), Delta("", self._scan(objects, [])))
        except CaptureError as error:
            raise RestoreError(f"The snapshot's files were written, but cannot be read back: {error}") from error
        if wrong:
            more = f" and {len(wrong) - _SHOWN_DIFFERENCES} more" if len(wrong) > _SHOWN_DIFFERENCES else ""
            raise RestoreError(
                "The snapshot's files differ after they were written (first: the snapshot, second: the files "
                f"on disk): {'; '.join(wrong[:_SHOWN_DIFFERENCES])}{more}."
            )

    def _scan(self, objects: ObjectStore, notes: list[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for at, directory in {"/": self._root, **self._uppers}.items():
            entries = scan(
                directory,
                objects,
                self._cache,
                notes=notes,
                at=at,
                skip=self._points.__contains__,
                root_ids=self._root_ids,
            )
            if at == "/":  # not an overlay: marks of overlays that were created in the container are meaningless
                kept = ((path, entry) for path, entry in entries.items() if entry.kind != "whiteout")
                entries = {path: replace(entry, opaque=False) if entry.opaque else entry for path, entry in kept}
            found |= entries
        return found

    def _overlay_of(self, path: str) -> str:
        return next((one for one in (path, *parents(path)) if one in self._uppers), "/")

    def _refuse_mount_points(self, changes: Mapping[str, Entry]) -> None:
        """Rejects changes that could redirect a mount to another path of the host, for example by a symlink."""
        for path in changes:
            if not self._closed.isdisjoint((path, *parents(path))):
                raise UnsafeSnapshotError(
                    f"A snapshot must not contain {path!r}, because this path does not belong to the container."
                )
        for point in self._points:
            for path in (*parents(point), *([point] if point in self._uppers else [])):
                if path in changes and changes[path].kind != "directory":
                    raise UnsafeSnapshotError(
                        f"Expected {path!r} to be a directory, because the container has a mount at {point}."
                    )

    def _make_points(self) -> None:
        """Creates the mount points that bubblewrap needs. Keeps the modification times of their parent directories."""
        files = {part.path for part in self._parts if part.kind == "bind" and not Path(*part.sources).is_dir()}
        for point in sorted(self._points):
            if self._overlay_of(point.rpartition("/")[0] or "/") != "/":
                continue  # it is in a directory of the host
            path = self._root / point[1:]
            before = path.parent.stat()
            if point in files:
                path.touch()
            else:
                _make_directory(path)
            os.utime(path.parent, ns=(before.st_atime_ns, before.st_mtime_ns))
            self._inodes[point] = path.lstat().st_ino


def _make_directory(path: Path) -> None:
    """Creates a directory that all users can enter, whatever our umask is. Leaves an existing directory unchanged."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir()
        path.chmod(0o755)
