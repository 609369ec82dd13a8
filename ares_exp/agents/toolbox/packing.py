"""Packing of npm and Python packages into one directory, together with the Node.js or Python that runs them.

npm and uv install the packages. The install scripts of npm packages are not run, because they would run code from the
network on this machine. Programs in `bin/` always use the Node.js or Python in the directory, not the container's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, cast

from ares_exp.agents.toolbox.package import Build, Pack
from ares_exp.containers.archive import remove
from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.errors import ToolboxError

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
