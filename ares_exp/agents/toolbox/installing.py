"""Installation of an agent's build: download of its parts, check of their digests, and addition to the store.

npm and Node.js are required only for a `Pack`. No code of a package is run.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import importlib.util
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.markers import Marker

from ares_exp.agents.toolbox.package import GNU_MACHINES, Build, NpmTarball, Pack, Wheels
from ares_exp.agents.toolbox.package_store import AgentStore, Installed
from ares_exp.agents.toolbox.packing import compile_modules, find_uv, make_pack, run_program
from ares_exp.containers.archive import remove, unpack_directory
from ares_exp.containers.child_process import ChildProcess
from ares_exp.containers.user_cache import announce
from ares_exp.errors import ToolboxError, TransferError
from ares_exp.records.terminal_text import format_size

REGISTRY = "https://registry.npmjs.org"
REGISTRY_VARIABLE = "npm_config_registry"
WAITS_SEC = (0.0, 0.5, 1.5, 3.5)
"""Seconds to wait before each attempt of a download."""
_CHUNK = 256 * 1024
_MAX_FILES = 20_000
_SILENCE_SEC = 60.0
_ANY_PYTHON = "3.12"
"""Python version for which wheels are requested if the build does not depend on a Python version."""


def fetch_tarball(tarball: NpmTarball, target: Path, scratch: Path, *, child: ChildProcess) -> None:
    """Downloads a tarball from an npm registry, checks its digest, and unpacks it into `target`.

    The environment variable `npm_config_registry` selects another registry than npm's public registry.

    Raises:
        ToolboxError: The tarball cannot be downloaded or unpacked, or has a different digest.
    """
    registry = (os.environ.get(REGISTRY_VARIABLE) or REGISTRY).rstrip("/")
    if not registry.startswith(("https://", "http://")):
        raise ToolboxError(f"Expected npm_config_registry to be an https:// address, got {registry}.")
    base = tarball.package.rpartition("/")[2]
    address = f"{registry}/{quote(tarball.package, safe='@/')}/-/{base}-{tarball.version}.tgz"
    file = scratch / "download.tgz"
    _download(tarball, address, file, child)
    try:
        with gzip.open(file, "rb") as stream:
            unpack_directory(
                stream,  # type: ignore[arg-type]  # only read(size) is needed
                target,
                strip_root=True,
                max_bytes=tarball.unpacked,
                max_members=_MAX_FILES,
            )
    except (TransferError, EOFError, gzip.BadGzipFile) as error:
        raise ToolboxError(f"{tarball.title} from {registry} cannot be unpacked: {error}") from error
    file.unlink()
    for name in tarball.left_out:
        remove(target / name)
    for name in tarball.executables:
        if not (target / name).is_file():
            raise ToolboxError(f"Expected {tarball.title} to contain the file {name}, but the file is missing.")
        (target / name).chmod(0o755)


def _download(tarball: NpmTarball, address: str, file: Path, child: ChildProcess) -> None:
    """Downloads a tarball and checks its digest. Tries again after lost connections and server errors."""
    problem = ""
    for wait in WAITS_SEC:
        if child.stopped.wait(wait):
            raise ToolboxError(f"The download of {tarball.title} was stopped.")
        try:
            found = _download_once(address, file, tarball.size, child)
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, http.client.HTTPException) as error:
            problem = str(error.reason if isinstance(error, urllib.error.URLError) else error) or type(error).__name__
        else:
            if found == tarball.integrity:
                return
            raise ToolboxError(
                f"Expected {address} to have the digest {tarball.integrity}, got {found}. The file was changed, so "
                "nothing was installed. Ask the operator of that registry, or download from the official registry "
                f"with {REGISTRY_VARIABLE}={REGISTRY}."
            )
    raise ToolboxError(
        f"{tarball.title} cannot be fetched from {address}: {problem}. Nothing was installed. Check the network and "
        "its proxy (HTTPS_PROXY), or set the variable npm_config_registry to a registry that can be reached."
    )


def _download_once(address: str, file: Path, expected: int, child: ChildProcess) -> str:
    """Downloads a file and returns its digest. Reads at most `expected` + 1 bytes, in case a server sends too much."""
    request = urllib.request.Request(address, headers={"User-Agent": "ares-exp", "Accept-Encoding": "identity"})
    digest, size = hashlib.sha512(), 0
    with urllib.request.urlopen(request, timeout=_SILENCE_SEC) as response, file.open("wb") as out:
        while size <= expected and (chunk := response.read(min(_CHUNK, expected + 1 - size))):
            digest.update(chunk)
            out.write(chunk)
            size += len(chunk)
            if child.stopped.is_set():
                raise OSError("stopped")
        if size < expected and response.headers.get("Content-Length") not in (None, str(size)):
            raise http.client.IncompleteRead(b"", expected - size)
    return f"sha512-{base64.b64encode(digest.digest()).decode()}"


def fetch_wheels(wheels: Wheels, build: Build, target: Path, scratch: Path, *, child: ChildProcess) -> None:
    """Downloads and unpacks wheels with pip or uv, for the build's Python and C library.

    Raises:
        ToolboxError: A wheel cannot be downloaded or has a different digest, or pip and uv are missing.
    """
    python, what = build.python or _ANY_PYTHON, f"The wheels of {build.name} {build.version}"
    requirements = scratch / "requirements.txt"
    requirements.write_text(requirement_lines(wheels, python))
    run_program(_installer(build, python, requirements, target), what, child)
    for name in wheels.left_out:
        remove(target / name)
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    program = sys.executable if build.python == ours else shutil.which(f"python{build.python}")
    if build.python is not None and program is not None:
        compile_modules([program, "-I"], target, f"{build.target}/{wheels.into}", what, child)


def requirement_lines(wheels: Wheels, python: str) -> str:
    """Returns the lines of a requirements file for a minor version of Python.

    Drops lines whose marker (`; python_version < "3.12"`) excludes this version, and removes the markers. Otherwise,
    pip would evaluate the markers for the Python that runs pip.
    """
    text = wheels.lock
    if text.endswith(".lock"):
        text = files(__package__).joinpath(text).read_text("utf-8")
    chosen = []
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, _, hashes = entry.partition(" --hash=")
        name, _, marker = requirement.partition(";")
        if not marker.strip() or Marker(marker.strip()).evaluate(
            {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        ):
            chosen.append(f"{name.strip()} --hash={' '.join(hashes.split())}")
    return "\n".join(chosen) + "\n"


def _installer(build: Build, python: str, requirements: Path, target: Path) -> list[str]:
    machine, is_musl = GNU_MACHINES[build.machine], build.libc == "musl"
    common = ["--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    common += ["--only-binary=:all:", "--python-version", python]
    if importlib.util.find_spec("pip") is not None:
        older = ["manylinux2014", "manylinux2010", "manylinux1"] if build.machine == "x64" else ["manylinux2014"]
        glibc = [*(f"manylinux_2_{minor}" for minor in (28, 27, 26, 24, 17, 12, 5)), *older]
        tags = ["musllinux_1_2", "musllinux_1_1"] if is_musl else glibc
        platforms = [word for tag in tags for word in ("--platform", f"{tag}_{machine}")]
        options = ["--no-input", "--disable-pip-version-check", "--no-compile", "--implementation", "cp"]
        return [sys.executable, "-m", "pip", "install", *options, *platforms, *common]
    if (uv := find_uv()) is None:
        raise ToolboxError(
            f"{build.name} is installed from wheels, which needs pip or uv. Run `{sys.executable} -m "
            "ensurepip`, or install uv."
        )
    platform = f"{machine}-{'unknown-linux-musl' if is_musl else 'manylinux_2_28'}"
    options = ["--link-mode=copy", "--python", sys.executable, "--python-platform", platform]
    return [*uv, "pip", "install", *options, *common]


_WAIT_SEC = 3600.0
"""Maximum time in seconds to wait for another process that installs the same build."""


def install(
    build: Build,
    *,
    say: Callable[[str], None],
    store: AgentStore | None = None,
    child: ChildProcess | None = None,
    replace: bool = False,
) -> Installed:
    """Returns an installed build. If the build is missing or `replace` is set, installs it first.

    An installation may take minutes, and blocks the thread. Before a download, `say` is called with a message for the
    user. To stop the installation, stop `child`.

    Raises:
        ToolboxError: The build cannot be installed. The message suggests a fix.
    """
    store, child = store or AgentStore(), child or ChildProcess()

    def make(target: Path) -> dict[str, Any]:
        packs = [spec for part in build.parts if isinstance(part, Pack) for spec in part.specs]
        how = f"Packing {build.name} from {', '.join(packs)}" if packs else f"Fetching {build.name} {build.version}"
        details = f"{format_size(build.size)}, {build.variant}" if build.size else build.variant
        say(f"{how} ({details}), once, to {store.folder}.")
        return _make(build, target, child)

    return store.keep(build, make, stop=child.stopped, timeout_sec=_WAIT_SEC, replace=replace)


async def ensure(builds: Sequence[Build]) -> list[Installed]:
    """Installs the missing builds, and returns all `builds`. Announces each download on stderr.

    While this process runs, other processes cannot remove these builds from the store.

    Raises:
        ToolboxError: A build cannot be installed. The message contains the command to try again.
    """
    child, store = ChildProcess(), AgentStore()

    def install_all() -> list[Installed]:
        for build in builds:
            install(build, say=announce, store=store, child=child)
        return [found for build in builds if (found := store.use(build)) is not None]

    try:
        return await child.stop_if_cancelled(asyncio.to_thread(install_all))
    except ToolboxError as error:
        names = " ".join(dict.fromkeys(build.name for build in builds))
        raise ToolboxError(f"{error}\nTo repeat only the installation: `ares-exp agents install {names}`.") from error


def _make(build: Build, target: Path, child: ChildProcess) -> dict[str, Any]:
    """Installs every part of a build into `target`. Returns facts for its manifest: version, packages and programs."""
    scratch = target.with_name("scratch")
    scratch.mkdir()
    facts: dict[str, Any] = {"version": build.version, "packages": [], "programs": []}
    for part in build.parts:
        if isinstance(part, NpmTarball):
            fetch_tarball(part, target, scratch, child=child)
            facts["packages"].append(f"npm:{part.package}@{part.version}")
        elif isinstance(part, Wheels):
            fetch_wheels(part, build, target / part.into, scratch, child=child)
        else:
            facts = make_pack(part, build, target, child)
    return facts
