"""The cache of installed agents on this machine. Builds are added and removed atomically.

A build is in `<folder>/<key>/`, with its manifest in `ares_exp.json`. The installing process creates the build in a
temporary directory, and then renames this directory. Other processes that need the same build wait for the installing
process. A build that a running process uses cannot be removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.agents.toolbox.package import USERS_PACK, Build, user_package
from ares_exp.containers.container import Mount
from ares_exp.containers.ownership import locked
from ares_exp.containers.user_cache import changing, hold, user_cache_dir, workspace
from ares_exp.errors import ToolboxError

MANIFEST = "ares_exp.json"
_PURPOSE = "agent"


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed build.

    Attributes:
        build: Build that is installed.
        path: Directory of the build.
        version: Version of the agent.
        digest: Digest of the files, computed during the installation.
        size: Total size of the files in bytes.
        packages: Packages in the build, with their versions, such as `npm:@github/copilot@1.0.102`.
        programs: Names of the programs in `bin/` of a packed build.
        last_used: Time of the last use by a run, or of the installation, in seconds since the epoch.
    """

    build: Build
    path: Path
    version: str
    digest: str
    size: int
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    last_used: float = field(compare=False)

    @property
    def mount(self) -> Mount:
        """Mount that makes the build available in a container, at `Build.target`."""
        return Mount(self.path, self.build.target, self.digest)


class AgentStore:
    """The builds that are installed for this user. Several processes may use the store at once. Methods block."""

    def __init__(self, folder: Path | None = None) -> None:
        """Sets the folder, by default `agents` in the user's cache. The folder need not exist yet."""
        self.folder = folder or user_cache_dir() / "agents"

    def place(self, build: Build) -> Path:
        """Returns the path of a build. The build need not be installed."""
        return self.folder / build.key

    def find(self, build: Build, *, thoroughly: bool = False) -> Installed | None:
        """Returns an installed build; `None` if it is missing, has no valid manifest, or has other parts than `build`.

        With `thoroughly`, also returns `None` if the files do not have the digest in the manifest.
        """
        place = self.place(build)
        try:
            manifest = json.loads((place / MANIFEST).read_bytes())
            if build.parts and manifest["parts"] != repr(build.parts):
                return None
            if thoroughly and digest_and_size(place, MANIFEST)[0] != manifest["digest"]:
                return None
            return Installed(
                build=build,
                path=place,
                version=manifest["version"],
                digest=manifest["digest"],
                size=manifest["size"],
                packages=tuple(manifest["packages"]),
                programs=tuple(manifest["programs"]),
                last_used=(place / MANIFEST).stat().st_mtime,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def packed(self) -> list[Installed]:
        """Returns the installed packages that the user has packed with `ares-exp agents pack`."""
        names = [path.name.removesuffix(USERS_PACK) for path in sorted(self.folder.glob(f"*{USERS_PACK}"))]
        found = [self.find(user_package(name).builds[0]) for name in names]
        return [one for one in found if one is not None]

    def keep(
        self,
        build: Build,
        make: Callable[[Path], dict[str, Any]],
        *,
        stop: threading.Event,
        timeout_sec: float,
        replace: bool = False,
    ) -> Installed:
        """Returns an installed build. If `find` does not find it, or if `replace` is set, creates it first.

        Args:
            build: Build to return.
            make: Function that creates the build in a directory and returns facts for the manifest. Only one process at
                a time calls it.
            stop: Event that ends the wait for another process that installs the build.
            timeout_sec: Maximum time to wait for the other process, in seconds.
            replace: Whether to replace the build if it exists.

        Raises:
            ToolboxError: The build cannot be created or stored.
        """
        try:
            hold(self.folder)
            lock = self.folder / f".{build.key}.lock"
            lock.touch(0o600)
            with ExitStack() as stack:
                try:
                    stack.enter_context(changing(lock, stop=stop, timeout_sec=timeout_sec))
                except TimeoutError:
                    raise ToolboxError(
                        f"Another process is installing {build.name} {build.version}. Wait until it has finished, and "
                        "try again."
                    ) from None
                if replace or self.find(build) is None:
                    with workspace(self.folder, _PURPOSE) as place:
                        made = place / build.key
                        made.mkdir()
                        _seal(made, build, make(made))
                        self.remove(build)
                        made.rename(self.place(build))
        except OSError as error:
            raise ToolboxError(
                f"{build.name} cannot be installed in {self.folder}: {error.strerror or error}. Free some space there, "
                "or set another XDG_CACHE_HOME."
            ) from error
        found = self.find(build)
        if found is None:
            raise ToolboxError(
                f"{build.name} was installed in {self.place(build)}, and has since been deleted. Install it again."
            )
        return found

    def use(self, build: Build) -> Installed | None:
        """Finds a build (see `find`), updates `last_used`, and protects it from removal until this process ends."""
        if not self.place(build).is_dir():
            return None
        hold(self.folder)
        hold(self.place(build))
        with suppress(OSError):
            os.utime(self.place(build) / MANIFEST)
        return self.find(build)  # another process may just have removed it

    def remove(self, build: Build) -> bool:
        """Removes a build. Returns whether it existed. Raises `ToolboxError` if it is in use or cannot be deleted."""
        place = self.place(build)
        try:
            with locked(place, os.O_RDONLY | os.O_DIRECTORY), workspace(self.folder, _PURPOSE) as folder:
                place.rename(folder / "removed")
        except FileNotFoundError:
            return False
        except BlockingIOError:
            raise ToolboxError(f"{place} is in use by a running process. Remove it after the process ends.") from None
        except OSError as error:
            raise ToolboxError(f"{place} cannot be removed: {error.strerror}.") from error
        return True


def _seal(made: Path, build: Build, facts: dict[str, Any]) -> None:
    """Completes a new build: makes its files read-only and readable for all users, and writes the manifest."""
    for path in made.rglob("*"):
        if path.is_symlink():
            raise ToolboxError(f"Expected the package of {build.name} to have no links, found the link {path.name!r}.")
        if path.is_dir():
            path.chmod(0o755)
        else:
            path.chmod(0o555 if path.stat().st_mode & 0o100 else 0o444)
    made.chmod(0o755)
    digest, size = digest_and_size(made)
    manifest = {"name": build.name, **facts, "digest": digest, "size": size, "parts": repr(build.parts)}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1))


def digest_and_size(folder: Path, left_out: str = "") -> tuple[str, int]:
    """Returns a digest of the names, modes and contents of a folder's files, and their total size in bytes.

    The file `left_out` is not included.
    """
    digest, size = hashlib.sha256(), 0
    for path in sorted(folder.rglob("*")):
        status, name = path.lstat(), str(path.relative_to(folder))
        if path.is_symlink():
            digest.update(f"{name}\0{path.readlink()}\0".encode(errors="surrogateescape"))
        elif path.is_file() and name != left_out:
            size += status.st_size
            digest.update(f"{name}\0{status.st_mode:o}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{digest.hexdigest()}", size
