"""Selection of an agent's builds: which builds are mounted into containers, and which build fits a container.

All installed builds are mounted, because only the running container shows which build fits. A container with the glibc
loader needs the glibc build, even if musl is also installed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.toolbox.installing import NODE, PYTHON, ensure
from ares_exp.agents.toolbox.package import PACKAGES, PYTHONS, AgentPackage, Build, this_machine, user_package
from ares_exp.agents.toolbox.package_store import AgentStore, Installed
from ares_exp.cancellation import in_thread
from ares_exp.containers.container import GLIBC_LOADERS, find_missing_glibc
from ares_exp.errors import AgentInstallError, ConfigError, ToolboxError, close_matches

_LOOK_SEC = 60.0
_CHECK_SEC = 120.0
_SHOWN_CHARS = 1500
_PYTHON_PLACES = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", *(f"python{minor}" for minor in PYTHONS))


@dataclass(frozen=True, slots=True)
class Placed:
    """The build that fits a container.

    Attributes:
        build: Build that fits.
        python: Path of the container's Python interpreter that runs the build; empty if the build does not need it.
    """

    build: Build
    python: str = ""

    def path(self, *names: str) -> str:
        """Returns the container path of a file in the build's directory, from the parts of its relative path."""
        return "/".join((self.build.target, *names))


def package_for(name: str) -> AgentPackage:
    """Returns the package for `agent.package`: the user's pack with this name, or a package of ares_exp.

    Raises:
        ConfigError: No pack and no pinned package has this name.
    """
    store = AgentStore()
    users = user_package(name)
    if store.find(users.builds[0]) is not None:
        return users
    if name in PACKAGES and PACKAGES[name].is_packed:
        return PACKAGES[name]
    names = sorted(
        {*(one.name for one in PACKAGES.values() if one.is_packed), *(one.build.name for one in store.packed())}
    )
    raise ConfigError(
        f"Expected agent.package to be one of {', '.join(names)}, got {name!r}.{close_matches(name, names)} To pack a "
        f"program of npm or PyPI, use `ares-exp agents pack npm:PACKAGE --name {name}`."
    )


def default_builds(package: AgentPackage, *, libc: str | None = None, pythons: Sequence[str] = ()) -> list[Build]:
    """Returns the builds to install for a C library (default: glibc) and for Python versions.

    The default Python version is the version of this process or, if ares_exp does not support it for agents, the newest
    supported version.

    Raises:
        ToolboxError: The package has no build for this machine and C library.
    """
    libc = libc or "glibc"
    builds = [build for build in package.for_machine() if build.libc in (libc, "any")]
    if not builds:
        raise ToolboxError(
            f"{package.title} {package.version} cannot be installed for {this_machine()} with {libc}. "
            f"It is available for: {', '.join(build.key for build in package.builds)}."
        )
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = pythons or [ours if ours in PYTHONS else PYTHONS[-1]]
    return [build for build in builds if build.python is None or build.python in wanted]


async def ready_builds(
    package: AgentPackage, *, libc: str | None = None, pythons: Sequence[str] = ()
) -> list[Installed]:
    """Installs missing builds of a package, and returns all its installed builds.

    If `libc` or `pythons` is given, installs the missing builds for these values. Otherwise, installs the default
    build, but only if no build of the package is installed.

    Raises:
        ToolboxError: A build cannot be installed.
    """
    store = AgentStore()
    there = await in_thread(lambda: [build for build in package.for_machine() if store.find(build) is not None])
    wanted = there
    if not there or libc is not None or pythons:
        asked = default_builds(package, libc=libc, pythons=pythons)
        wanted = [*there, *(build for build in asked if build not in there)]
    return await ensure(wanted)


async def fitting_build(container: AgentContainer, package: AgentPackage, builds: Sequence[Build]) -> Placed:
    """Returns the build, from the mounted `builds`, that fits the container's C library and Python.

    Raises:
        AgentInstallError: No build fits. The message contains the command that installs a fitting build, if one exists.
    """
    libc = "any" if any(build.libc == "any" for build in builds) else await _libc(container)
    chosen = [build for build in builds if build.libc == libc]
    if not chosen:
        has = "glibc" if libc == "glibc" else f"no glibc ({GLIBC_LOADERS[0]})"
        raise AgentInstallError(
            f"This container has {has}, but {package.title} is not installed for {libc}. "
            f"Run `ares-exp agents install {package.name} --libc {libc}`."
        )
    if chosen[0].python is None:
        return Placed(chosen[0])
    return await _for_python(container, package, {build.python or "": build for build in chosen})


async def check_runs(container: AgentContainer, package: AgentPackage, build: Build, command: str) -> None:
    """Checks that the agent runs in this container: `command` has to succeed and print the pinned version.

    For packages of npm and uv (`is_packed`), the output is not checked.

    Raises:
        AgentInstallError: The command fails, or a required shell is missing. The message contains the requirements and
            the output.
    """
    if package.shells:
        look = " || ".join(f"command -v {shell}" for shell in package.shells)
        if (await container.exec(look, cwd="/", timeout_sec=_LOOK_SEC)).exit_code != 0:
            raise AgentInstallError(
                f"{package.title} needs {' or '.join(package.shells)} to run commands, and this container has none "
                "of them. Choose an image with one of them, or another agent."
            )
    result = await container.exec(command, cwd="/", timeout_sec=_CHECK_SEC)
    if result.exit_code == 0 and (package.is_packed or build.version in result.output):
        return
    floor = package.floors.get(build.libc)
    found = await container.exec(_SHOW_LIBC, cwd="/", timeout_sec=_LOOK_SEC)
    has = found.output.strip() or "an unknown C library"
    needs = f"It needs {floor} or newer, and the container has {has}. " if floor else ""
    raise AgentInstallError(
        f"{' '.join(filter(None, (package.title, build.version)))} does not run in this container. {needs}"
        f"`{command:.200}` ended with exit code {result.exit_code}: {result.output.strip()[-_SHOWN_CHARS:]}"
    )


_SHOW_LIBC = (
    "getconf GNU_LIBC_VERSION 2>/dev/null || "
    "for loader in /lib/ld-musl-*.so.1; do [ ! -e $loader ] || echo musl $($loader 2>&1 | grep Version); done"
)


async def _libc(container: AgentContainer) -> str:
    tests = " || ".join(f"[ -e {path} ]" for path in GLIBC_LOADERS)
    result = await container.exec(f"if {tests}; then echo glibc; else echo musl; fi", cwd="/", timeout_sec=_LOOK_SEC)
    return result.output.strip()


async def _for_python(container: AgentContainer, package: AgentPackage, by_python: dict[str, Build]) -> Placed:
    """Returns the mounted build that fits a Python in the container. `by_python` has these builds by Python version.

    Raises:
        AgentInstallError: The container has no Python for which a build is mounted.
    """
    show = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    look = "; ".join(f"{place} -I -c {shlex.quote(show)} 2>/dev/null" for place in _PYTHON_PLACES)
    result = await container.exec(look, cwd="/", timeout_sec=_LOOK_SEC)
    found: dict[str, str] = {}
    for line in result.output.splitlines():
        minor, _, path = line.partition(" ")
        if path.startswith("/"):
            found.setdefault(minor, path)
    for minor, path in found.items():
        if minor in by_python:
            return Placed(by_python[minor], path)
    usable = [minor for minor in found if minor in PYTHONS]
    if not usable:
        has = f"only Python {', '.join(found)}" if found else "no Python"
        raise AgentInstallError(
            f"{package.title} needs Python {PYTHONS[0]} to {PYTHONS[-1]} in the container, and this container "
            f"has {has}. Choose an image with one of these versions, or another agent."
        )
    raise AgentInstallError(
        f"This container has Python {', '.join(usable)}, but {package.title} is only installed for Python "
        f"{', '.join(by_python)}. Run `ares-exp agents install {package.name} --python {usable[0]}`."
    )


async def ready_pack(name: str) -> Installed:
    """Returns the package that the option `agent.package` names. Packs it if it is not installed.

    Raises:
        ConfigError: No package has this name.
        ToolboxError: The package cannot be packed.
    """
    (found,) = await ready_builds(await in_thread(lambda: package_for(name)))
    return found


async def find_pack(container: AgentContainer, pack: Installed) -> str:
    """Returns the path of a mounted pack in a container.

    Raises:
        AgentInstallError: The container has no glibc, or the packed Node.js or Python does not run in it.
    """
    name = pack.build.name
    package = PACKAGES[name] if pack.build.version else user_package(name)
    has_glibc = await _libc(container) == "glibc"
    if problem := find_missing_glibc([replace(pack.mount, needs_glibc=name)], lambda _: has_glibc):
        raise AgentInstallError(problem)
    placed = Placed(pack.build)
    runtimes = [runtime for runtime in (NODE, PYTHON) if runtime in pack.programs]
    checks = " && ".join(f"{placed.path('bin', runtime)} --version" for runtime in runtimes)
    await check_runs(container, package, placed.build, checks)
    return placed.path()
