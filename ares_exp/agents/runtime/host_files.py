"""Files of the host that an agent copied out of its container, or into it: small enough for its journal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ares_exp.errors import CaptureError, SnapshotUnsupportedError
from ares_exp.records.secrets import KnownSecrets

MAX_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The content of a file (its only name is empty) or of a directory.

    Attributes:
        files: Relative path, permission bits, content. Symbolic links and empty directories are left out. `None` when
            they are more than is kept.
    """

    files: tuple[tuple[str, int, bytes], ...] | None

    @classmethod
    def read(cls, path: Path) -> HostFiles:
        """Reads the files at `path`, unless they are more than `MAX_BYTES`. Blocking."""
        total, found = 0, []
        for one in [path] if path.is_file() else sorted(path.rglob("*")):
            if one.is_symlink() or not one.is_file():
                continue
            total += one.stat().st_size
            if total > MAX_BYTES:
                return cls(None)
            name = "" if one == path else str(one.relative_to(path))
            found.append((name, one.stat().st_mode & 0o777, one.read_bytes()))
        return cls(tuple(found))

    def to_keep(self) -> tuple[tuple[str, int, bytes], ...]:
        """Returns the files in the journal's form.

        Raises:
            SnapshotUnsupportedError: They were too much.
            CaptureError: One holds the value of a secret.
        """
        if self.files is None:
            raise SnapshotUnsupportedError(
                f"The agent has copied more than {MAX_BYTES:,} bytes at once out of its container. They are not kept, "
                "so it cannot be run again. Have it look at large files in the container, by commands."
            )
        known = KnownSecrets()
        for name, _, data in self.files:
            if known.found_in(data):
                raise CaptureError(
                    f"The agent has copied a file{f' {name!r}' if name else ''} out of its container that holds the "
                    "value of a secret: it cannot be kept."
                )
        return self.files

    def write(self, path: Path) -> None:
        """Makes them at `path` again.

        Raises:
            SnapshotUnsupportedError: A name leads out of it.
        """
        for name, mode, data in self.to_keep():
            target = path / name if name else path
            if not target.resolve().is_relative_to(path.resolve()):
                raise SnapshotUnsupportedError(f"A downloaded file's name leads out of {path}: {name!r}.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(mode)


def digest_of(path: Path) -> str:
    """Computes a digest of a file, or of a directory's files with their names. Blocking.

    Raises:
        OSError: It cannot be read.
    """
    total = hashlib.sha256()
    for one in [path] if path.is_file() else sorted(path.rglob("*")):
        if one.is_file():
            with one.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{one.relative_to(path)}\0{content}\n".encode(errors="surrogateescape"))
    return total.hexdigest()
