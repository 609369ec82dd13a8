"""Installation of an agent's build: download of its parts, check of their digests, and addition to the store.

A `Pack` becomes one directory with its npm and Python packages, and the Node.js or Python that runs them. npm and uv
install these packages. Only a `Pack` needs npm and Node.js. No code of a package is run. The install scripts of npm
packages are therefore not run, because they would run code from the network on this machine. Programs in `bin/` of a
pack always use the Node.js or Python in the directory, not the container's.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from packaging.markers import Marker

from ares_exp.agents.toolbox.package import GNU_MACHINES, Build, NpmTarball, Pack, Wheels
from ares_exp.agents.toolbox.package_store import AgentStore, Installed
from ares_exp.containers.archive import remove, unpack_directory
from ares_exp.containers.child_process import ChildFailedError, ChildProcess
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


# Packing


NODE, PYTHON = "agent-node", "agent-python"
"""Names of the launchers of Node.js (for npm packages) and Python (for Python packages) in `bin/`."""
_TIMEOUT_SEC = 1800.0
_SHOWN_CHARS = 2000
_NODE_FILES_LEFT_OUT = ("include", "share", "CHANGELOG.md", "README.md")
_PYTHON_LEFT_OUT = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "config-*"),
    *("__pycache__", "_tkinter*.so", "EXTERNALLY-MANAGED", "terminfo", "man", "pkgconfig", "include", "*.a"),
)
_OF_GLIBC = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|util|resolv|anl|mvec))\.so\.\d+")
_NPM = re.compile(r"(?P<name>(@[\w.~-]+/)?[\w.~-]+)(@(?P<version>.+))?")
_PIP = re.compile(r"(?P<name>[\w.-]+)(\[[\w,.-]*\])?\s*(==(?P<version>[\w.+!-]+)|[<>=!~].*)?")
_FACTS = """\
import json, os, sys, sysconfig
paths = {name: sysconfig.get_path(name) for name in ("stdlib", "purelib", "scripts")}
print(json.dumps({"minor": "%d.%d" % sys.version_info[:2], "program": os.path.realpath(sys.executable), **paths}))
"""
_LOADER = """\
#!/bin/sh
# Starts Python with its own libraries, and without a variable that the programs it starts would also see.
self=$(readlink -f "$0")
root=${{self%/bin/*}}
exec {loader} --argv0 "$0" --library-path "$root/lib" "$root/lib/python.bin" "$@"
"""
_LAUNCHER = """\
#!/bin/sh
self=$(readlink -f "$0")
root=${{self%/bin/*}}
exec {words} "$@"
"""


def parse_spec(spec: str) -> tuple[str, str, str]:
    """Splits a requested package into its kind (`npm` or `pip`), its name, and its exact version (empty if not given).

    For example, `pip:aider-chat==0.86.2` has the name `aider-chat` and the version `0.86.2`.

    Raises:
        ToolboxError: `spec` is not a package of npm or PyPI.
    """
    kind, _, text = spec.partition(":")
    found = {"npm": _NPM, "pip": _PIP}[kind].fullmatch(text) if kind in ("npm", "pip") else None
    if found is None:
        raise ToolboxError(f"Expected a package such as npm:@github/copilot or pip:aider-chat==0.86.2, got {spec!r}.")
    return kind, found["name"], found["version"] or ""


def default_name(spec: str) -> str:
    """Returns the default name of a pack: the lower-case name of its package, such as `copilot`, without the scope."""
    return re.sub(r"[^a-z0-9_]+", "-", parse_spec(spec)[1].rpartition("/")[2].lower()).strip("-_")


def make_pack(pack: Pack, build: Build, target: Path, child: ChildProcess) -> dict[str, Any]:
    """Installs the packages of a pack and their runtimes (Node.js, Python) into the empty directory `target`.

    Returns:
        Facts for the manifest: `version` (of the first package), `packages` and `programs`.

    Raises:
        ToolboxError: A package cannot be installed, or npm or uv is missing.
    """
    (target / "bin").mkdir()
    installed: list[str] = []
    for prefix, add in (("npm:", _add_npm), ("pip:", _add_python)):
        if specs := [spec.removeprefix(prefix) for spec in pack.specs if spec.startswith(prefix)]:
            installed += add(specs, pack, build, target, child)
    kind, name, _ = parse_spec(pack.specs[0])
    names = [one.rpartition("==" if kind == "pip" else "@") for one in installed]
    version = next(version for one, _, version in names if one == f"{kind}:{_canonical(kind, name)}")
    return {"version": version, "packages": installed, "programs": sorted(one.name for one in target.glob("bin/*"))}


def _add_npm(specs: Sequence[str], pack: Pack, build: Build, target: Path, child: ChildProcess) -> list[str]:
    """Installs Node.js, npm packages and launchers. Returns the packages, such as `npm:@github/copilot@1.0.102`."""
    npm = shutil.which("npm")
    if npm is None:
        raise ToolboxError(
            f"The program npm, which installs {', '.join(specs)}, is not on PATH. Install Node.js, which includes npm."
        )
    node = f"node-linux-{build.machine}"
    options = ["--ignore-scripts", "--no-bin-links", "--no-audit", "--no-fund", "--loglevel=error", "--save-exact"]
    platform = ["--os=linux", f"--cpu={build.machine}", "--libc=glibc"]
    if all(parse_spec(f"npm:{spec}")[2] for spec in specs):
        options.append("--prefer-offline")  # exact versions do not change, so that npm may trust its cache
    command = [npm, "install", "--prefix", str(target), *options, *platform]
    modules = target / "node_modules"
    for packages in ([f"{node}@{pack.node}"], specs):
        # npm chooses versions for the Node.js that runs it. In the second step, this is the packed Node.js.
        path = f"{modules / node / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        run_program([*command, *packages], f"{', '.join(packages)} with npm", child, cwd=target, env={"PATH": path})
        (modules / node / "bin" / "node").chmod(0o755)
    for name in _NODE_FILES_LEFT_OUT:
        remove(modules / node / name)
    program = f'"$root/node_modules/{node}/bin/node"'
    _write_launcher(target / "bin" / NODE, program)
    for name in json.loads((target / "package.json").read_bytes())["dependencies"]:
        facts = json.loads((modules / name / "package.json").read_bytes())
        listed = facts.get("bin") or {}
        for script, path in ({name.rpartition("/")[2]: listed} if isinstance(listed, str) else listed).items():
            if name != node:
                _add_program(target, script, (modules / name / path).resolve(), program)
    locked = json.loads((target / "package-lock.json").read_bytes())["packages"]
    found = {
        f"npm:{path.rpartition('node_modules/')[2]}@{one['version']}"
        for path, one in locked.items()
        if path and (target / path).is_dir()
    }
    return sorted(found)


def _add_python(specs: Sequence[str], pack: Pack, build: Build, target: Path, child: ChildProcess) -> list[str]:
    """Installs a copy of Python, packages and launchers. Returns the packages, such as `pip:aider-chat==0.86.2`."""
    what = ", ".join(specs)
    if (uv := find_uv()) is None:
        raise ToolboxError(f"The program uv, which installs {what}, is not on PATH. Run `pip install uv`.")
    root = target / "python"
    minor = _copy_python(uv, pack.python, root, child)
    python = root / "bin" / f"python{minor}"
    # An index that is configured for pip does not apply, because uv reads only its own settings.
    install = [*uv, "pip", "install", "--python", str(python), "--link-mode=copy", *specs]
    run_program(install, f"{what} with uv", child, cwd=target)
    frozen = run_program([*uv, "pip", "freeze", "--python", str(python)], what, child)
    (target / "requirements.txt").write_text(frozen)
    facts = _facts(python, child)
    scripts = Path(facts["scripts"])
    for script in scripts.glob("*"):
        if script.read_bytes().startswith(b"#!"):
            script.write_bytes(script.read_bytes().replace(str(target).encode(), build.target.encode()))
    for record in root.rglob("*.dist-info/RECORD"):  # it has the digests of the scripts before the replacement
        record.write_text(re.sub(r"(?m)^(\S*/bin/[^,]+),.*$", r"\1,,", record.read_text("utf-8")), "utf-8")
    wanted = {_canonical("pip", parse_spec(f"pip:{spec}")[1]) for spec in specs}
    words = f'"$root/python/bin/python{minor}" -I'
    _write_launcher(target / "bin" / PYTHON, f'"$root/python/bin/python{minor}"')
    for found in distributions(path=[facts["purelib"]]):
        if _canonical("pip", found.metadata["Name"]) in wanted:
            places = [Path(str(file.locate())).resolve() for file in found.files or ()]
            for script in (place for place in places if place.parent == scripts.resolve() and place.is_file()):
                _add_program(target, script.name, script, words)
    compile_modules([str(python), "-s"], root, f"{build.target}/python", what, child)
    return [f"pip:{line.replace(' @ ', '==')}" for line in frozen.splitlines() if line and not line.startswith("#")]


def find_uv() -> list[str] | None:
    """Returns the command that starts uv, as a list of words, or `None` if uv is not installed."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    program = shutil.which("uv")
    return None if program is None else [program]


def compile_modules(python: Sequence[str], folder: Path, target: str, what: str, child: ChildProcess) -> None:
    """Compiles the Python modules in a folder, because Python cannot store compiled modules in a read-only mount.

    `target` is the folder's path in containers, and `what` describes the folder in error messages.
    """
    options = ["-f", "-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", target]
    with suppress(ToolboxError):  # a package may contain files for another Python
        run_program([*python, "-m", "compileall", *options, str(folder)], what, child, cwd=folder)


def _copy_python(uv: Sequence[str], version: str, root: Path, child: ChildProcess) -> str:
    """Copies a Python that uv installs, or a local Python if uv fails. Returns its minor version, such as `3.12`."""
    what = f"Python {version}"
    find, managed = [*uv, "python", "find", "--no-project"], "/" not in version
    pyenv = ":".join(str(path) for path in Path.home().glob(f".pyenv/versions/{version}*/bin")) if managed else ""
    local = {"PATH": f"{os.environ.get('PATH', '')}:{pyenv}", "UV_PYTHON_DOWNLOADS": "never"}
    choices: list[tuple[list[str], dict[str, str]]] = [([], local)]
    if managed:
        with suppress(ToolboxError):
            run_program([*uv, "python", "install", "--no-bin", version], what, child, env={"UV_HTTP_RETRIES": "0"})
        # Without --system, uv also returns the Python of an active virtual environment, which is not managed by uv.
        choices.insert(0, (["--managed-python", "--system"], {}))
    for options, env in choices:
        try:
            found = run_program([*find, *options, version], what, child, env=env).strip()
        except ToolboxError:
            continue
        return _copy_of(Path(found), root, child, is_relocatable=bool(options))
    raise ToolboxError(
        f"{what} is not installed on this machine, and uv could not download it. Install it, or pass the path of an "
        "interpreter: `--python PATH`."
    )


def _copy_of(python: Path, root: Path, child: ChildProcess, *, is_relocatable: bool) -> str:
    """Copies a Python interpreter with its standard and shared libraries. Returns its minor version, such as `3.12`.

    A Python that is not relocatable is started by a script, with the glibc loader and the copied libraries.
    """
    facts = _facts(python, child)
    minor, program = facts["minor"], Path(facts["program"])
    library, start = root / "lib" / f"python{minor}", root / "bin" / f"python{minor}"
    shutil.copytree(facts["stdlib"], library, ignore=shutil.ignore_patterns(*_PYTHON_LEFT_OUT))
    start.parent.mkdir()
    listed = run_program(["ldd", str(program), *map(str, library.glob("lib-dynload/*.so"))], str(python), child)
    for name, path in re.findall(r"^\s+(\S+) => (/\S+)", listed, re.MULTILINE):
        if not _OF_GLIBC.fullmatch(name):
            shutil.copy2(path, root / "lib" / name)
    if is_relocatable:
        shutil.copy2(program, start)
        return minor
    loader = re.search(r"^\s+(/\S*/ld-linux\S+)", listed, re.MULTILINE)
    if loader is None:
        raise ToolboxError(f"Expected a Python with glibc, got {python}. Pack the package on a machine with glibc.")
    shutil.copy2(program, root / "lib" / "python.bin")
    start.write_text(_LOADER.format(loader=loader[1]))
    start.chmod(0o755)
    return minor


def _facts(python: Path, child: ChildProcess) -> dict[str, str]:
    return cast("dict[str, str]", json.loads(run_program([str(python), "-I", "-c", _FACTS], str(python), child)))


def _add_program(target: Path, name: str, file: Path, interpreter: str) -> None:
    """Creates the launcher `bin/<name>` for a package's program `file`. If it is a script, `interpreter` runs it."""
    if not file.is_relative_to(target.resolve()) or "/" in name:
        raise ToolboxError(f"Expected the program {name!r} to be a file inside its package, got {file}.")
    with file.open("rb") as stream:
        is_script = stream.read(2) == b"#!" or file.suffix in (".js", ".mjs", ".cjs")
    file.chmod(0o755)
    own = f'"$root/{file.relative_to(target.resolve())}"'
    _write_launcher(target / "bin" / name, f"{interpreter} {own}" if is_script else own)


def _write_launcher(path: Path, words: str) -> None:
    path.write_text(_LAUNCHER.format(words=words))
    path.chmod(0o755)


def _canonical(kind: str, name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower() if kind == "pip" else name


def run_program(
    command: Sequence[str],
    what: str,
    child: ChildProcess,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs a program and returns its standard output. The program is killed if this process ends or `child` is stopped.

    `what` describes the program's purpose in error messages.

    Raises:
        ToolboxError: The program failed or was stopped. The message contains the end of its output.
    """
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0", **(env or {})}
    try:
        ended = child.run(command, env=variables, timeout_sec=_TIMEOUT_SEC, cwd=cwd)
    except ChildFailedError as error:
        last = "\n".join(error.errors)[-_SHOWN_CHARS:]
        raise ToolboxError(f"{what} cannot be installed (it {error}). No files were kept.\n{last}".rstrip()) from None
    printed = ended.output.decode("utf-8", "replace")
    if ended.exit_code != 0:
        problem = "\n".join(ended.errors) or printed.strip()
        raise ToolboxError(
            f"{what} cannot be installed (exit code {ended.exit_code}). No files were kept.\n{problem[-_SHOWN_CHARS:]}"
        )
    return printed
