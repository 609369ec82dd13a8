"""Directory trees with everything that a file system can hold, overlays on them, and what is in them."""

import hashlib
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

IS_ROOT = os.geteuid() == 0
NOBODY = 65534


class Overlay:
    """`base` with `upper` on top, seen at `merged` while it is mounted."""

    def __init__(self, directory: Path, base: Path) -> None:
        self.base, self.merged, self.upper = base, directory / "merged", directory / "upper"
        self._work = directory / "work"
        for each in (self.merged, self.upper, self._work):
            each.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def mounted(self, *options: str) -> Iterator[Path]:
        """Skips the test where this user may not mount overlays here."""
        paths = f"lowerdir={self.base},upperdir={self.upper},workdir={self._work}"
        command = ["mount", "-t", "overlay", "overlay", "-o", ",".join([paths, *options]), str(self.merged)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()}")
        try:
            yield self.merged
        finally:
            subprocess.run(["umount", str(self.merged)], check=True)


def make_base(root: Path) -> Path:
    for name in ("etc", "usr/share/gone", "usr/share/renewed/deep", "usr/share/becomes-file", "usr/lib/kept"):
        (root / name).mkdir(parents=True)
    files = ["etc/appended", "etc/mode", "etc/mtime", "etc/owner", "etc/removed", "etc/becomes-directory", "etc/linked"]
    files += ["usr/share/gone/a", "usr/share/renewed/old", "usr/share/renewed/deep/old", "usr/share/becomes-file/a"]
    files += ["usr/lib/kept/library", "etc/attribute"]
    for name in files:
        (root / name).write_text(f"{name} of the base\n" * 10)
    (root / "etc/old-link").symlink_to("removed")
    return root


def change_everything(root: Path) -> None:
    """Every awkward kind of change to a `make_base`, made through an overlay."""
    with (root / "etc/appended").open("a") as file:
        file.write("more\n")
    (root / "etc/mode").chmod(0o600)
    os.utime(root / "etc/mtime", ns=(1234567890_123456789, 1234567890_123456789))
    (root / "etc/removed").unlink()
    (root / "etc/old-link").unlink()
    shutil.rmtree(root / "usr/share/gone")
    shutil.rmtree(root / "usr/share/renewed")
    (root / "usr/share/renewed").mkdir()
    (root / "usr/share/renewed/only").write_text("new")
    shutil.rmtree(root / "usr/share/becomes-file")
    (root / "usr/share/becomes-file").write_text("a file now")
    (root / "etc/becomes-directory").unlink()
    (root / "etc/becomes-directory").mkdir()
    (root / "etc/becomes-directory/inner").write_text("inside")
    os.link(root / "etc/linked", root / "etc/linked-again")
    if IS_ROOT:
        os.chown(root / "etc/owner", 1000, 1234567)
        os.setxattr(root / "etc/attribute", "security.capability", bytes.fromhex("01000002" + "00040000" + "00" * 12))
    make_awkward(root / "n")


def make_awkward(new: Path, *, owners: bool = IS_ROOT) -> None:
    """Makes new files, directories, links and pipes of every awkward kind."""
    new.mkdir()
    for target, name in (
        ("target", "sym"),
        ("/etc/passwd", "absolute"),
        ("../../../../etc/shadow", "out"),
        ("/tmp", "d"),
    ):
        (new / name).symlink_to(target)
    (new / "h1").write_bytes(b"hard" * 100)
    (new / "elsewhere").mkdir()
    os.link(new / "h1", new / "h2")
    os.link(new / "h1", new / "elsewhere/h3")
    (new / "attributes").write_text("x")
    os.setxattr(new / "attributes", "user.note", b"\x00\x01bin\xff")
    os.setxattr(new / "elsewhere", "user.empty", b"")
    for name, mode in (("suid", 0o4755), ("none", 0 if owners else 0o400), ("sticky", 0o1777), ("read-only", 0o555)):
        if name in ("suid", "none"):
            (new / name).write_text(name)
        else:
            (new / name).mkdir()
            (new / name / "inside").write_text(name)
        (new / name).chmod(mode)
    os.mkfifo(new / "fifo", 0o640)
    with (new / "sparse").open("wb") as file:
        file.write(b"start")
        file.seek(20 << 20)
        file.write(b"middle")
        file.truncate((40 << 20) + 5)
    (new / "hole").touch()
    os.truncate(new / "hole", 3 << 20)
    (new / "large").write_bytes(hashlib.shake_256(b"large").digest(1_000_000))
    (new / "empty").touch()
    names: list[bytes] = [
        b"new\nline",
        "üñí-文件.txt".encode(),
        b"-rf",
        b" sp ace ",
        b"bad\xff\xfeutf8",
        b"q'uo\"te`$(x)",
        b"\\n",
    ]
    for name in [*names, b"d" * 100 + b"/" + b"e" * 200 + b"/" + b"f" * 250]:
        path = os.path.join(os.fsencode(new), name)  # noqa: PTH118  # bytes
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(name)
    for name, seconds in (("future", 9_000_000_000), ("past", -1000)):
        (new / name).touch()
        os.utime(new / name, ns=(seconds * 10**9 + 5, seconds * 10**9 + 5))
    if owners:
        os.chown(new / "fifo", 3_000_000_000, 3_000_000_001)
        os.chown(new / "sym", 12, 34, follow_symlinks=False)


def make_unkept(root: Path) -> None:
    """What no delta has."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    if IS_ROOT:
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def tree_of(root: Path) -> dict[str, Any]:
    """All that can be seen in a tree, by path; which paths are one file included. Not of `root` itself."""
    found: dict[str, Any] = {}
    names: dict[int, list[str]] = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(directory, name)
            seen = path.lstat()
            inside = f"/{path.relative_to(root)}"
            content: Any = None
            if path.is_symlink():
                content = str(path.readlink())
            elif stat.S_ISREG(seen.st_mode):
                content = (seen.st_size, hashlib.sha256(path.read_bytes()).hexdigest())
                names.setdefault(seen.st_ino, []).append(inside)
            attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in _listxattr(path)}
            found[inside] = [seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, content, attributes]
    for group in names.values():
        for inside in group:
            found[inside].append(sorted(group))
    return found


def _listxattr(path: Path) -> list[str]:
    return [name for name in os.listxattr(path, follow_symlinks=False) if "overlay." not in name]


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process as an ordinary user."""
    if not IS_ROOT:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
