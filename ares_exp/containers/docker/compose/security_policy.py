"""The security policy for a task's compose file: its containers have no access to the host, and limited resources.

The policy rejects all keys that are not known to be harmless, including new keys of later Compose versions. A user who
trusts the file can disable the policy. It is applied twice. The first check reads the original file, before the compose
program opens the local files that `env_file`, `extends` and `include` name. The second check reads the program's
output, which has substituted variables and all included files.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.compose.project_file import MAIN
from ares_exp.containers.docker.compose.tool import refuse_obeyed
from ares_exp.containers.docker.container import DockerOptions
from ares_exp.errors import TaskError, UnsupportedTaskError

_MAX_FILE_BYTES = 1024 * 1024

# fmt: off
_HARMLESS = {
    "attach", "cap_drop", "command", "configs", "container_name", "cpu_count", "cpu_percent", "cpu_period", "cpu_quota",
    "cpu_shares", "cpus", "cpuset", "depends_on", "develop", "dns", "dns_opt", "dns_search", "domainname", "entrypoint",
    "environment", "expose", "extra_hosts", "group_add", "healthcheck", "hostname", "image", "init", "labels", "links",
    "mem_limit", "mem_reservation", "mem_swappiness", "memswap_limit", "networks", "pids_limit", "platform", "ports",
    "profiles", "pull_policy", "read_only", "restart", "scale", "secrets", "shm_size", "stdin_open",
    "stop_grace_period", "stop_signal", "storage_opt", "sysctls", "tmpfs", "tty", "ulimits", "user", "working_dir",
}
_HARMLESS_OF_BUILDS = {"args", "dockerfile_inline", "labels", "no_cache", "pull", "shm_size", "target"}
_HARMLESS_OF_NETWORKS = {"attachable", "enable_ipv6", "internal", "labels", "name"}
_HARMLESS_OF_VOLUMES = {"labels", "name"}
_HARMLESS_OF_FILES = {"content", "environment", "labels", "name"}
_HARMLESS_SECTIONS = {"configs", "name", "networks", "secrets", "services", "version", "volumes"}
# fmt: on
_NETWORK_OPTIONS = {"com.docker.network.driver.mtu", "com.docker.network.bridge.enable_icc"}
_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
"""Address ranges that a project's networks may use. Other ranges could redirect this machine's own traffic."""
_LOG_DRIVERS = (None, "", "json-file", "local", "none")
_FILE = "file"


_MIB = 2**20
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgtp]?)(?:i?b)?", re.IGNORECASE)
_PIDS = ("pids_limit", "deploy.resources.limits.pids")
_MEMORY = (
    *("mem_limit", "memswap_limit", "mem_reservation"),
    *("deploy.resources.limits.memory", "deploy.resources.reservations.memory"),
)
_MEMORY_LIMITS = ("mem_limit", "deploy.resources.limits.memory")
"""Keys of memory limits for which 0 means no limit, so that the policy must reject 0."""


def check_file(spec: ContainerSpec, options: DockerOptions) -> list[str]:
    """Applies the policy to a task's compose file, before variables are substituted. Returns warnings. Blocking.

    Raises `UnsupportedTaskError` if the file violates the policy, or uses a variable such as `PATH` (see
    `refuse_obeyed`). Raises `TaskError` if the file cannot be read or is not a compose file.
    """
    path = spec.compose_file
    assert path is not None
    documents = dict[Path, dict[str, Any]]()
    pending = {path}
    while pending:  # include extended files, which the output of the compose program does not show either
        one = pending.pop()
        text, document = _read(one)
        documents[one] = document
        refuse_obeyed(spec, text)
        refuse_violations(one, document, options)
        extends = (service.get("extends") for _, service in _tables(document["services"]))
        files = {one.parent / str(table[_FILE]) for table in extends if isinstance(table, dict) and table.get(_FILE)}
        pending |= set() if options.compose_trusted else files - documents.keys()
    with_ports = sorted(str(name) for name, service in _tables(documents[path]["services"]) if service.get("ports"))
    if with_ports:
        return [
            "ports are not published, because attempts that run at the same time would use the same ports "
            f"({path.name}: services {', '.join(with_ports)}). The services can still connect to each other"
        ]
    return []


def refuse_violations(path: Path, document: Mapping[str, Any], options: DockerOptions) -> None:
    """Rejects a compose document that violates the policy. Does nothing if the user trusts the file. Blocking.

    `path` is the compose file. `document` is its contents as written, or as printed by the compose program. Raises
    `UnsupportedTaskError` with all keys that violate the policy, and `TaskError` if the document is not valid.
    """
    if options.compose_trusted:
        return
    trust = "Leave the task out. If you trust it like your own programs, you can set container.compose_trusted=true."
    try:
        if forbidden := sorted(set(_Reading(path.parent.resolve()).violations(document))):
            raise UnsupportedTaskError(
                f"{path}: the file has unknown keys, or keys that give containers access to more than their own files "
                f"and networks: {', '.join(forbidden)}. {trust}"
            )
        if excesses := list(_excesses(document, options)):
            raise UnsupportedTaskError(
                f"{path}: the file exceeds limits of this run: {'; '.join(excesses)}. Increase these options. {trust}"
            )
    except TaskError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise TaskError(f"{path}: a part of this compose file is invalid: {error}.") from error


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise TaskError(f"{path}: the compose file has more than {_MAX_FILE_BYTES} bytes.")
        found: object = yaml.safe_load(data)
    except TaskError:
        raise
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: the compose file cannot be read: {error}") from error
    services = found.get("services") if isinstance(found, dict) else None
    are_tables = isinstance(services, dict) and all(one is None or isinstance(one, dict) for one in services.values())
    if not isinstance(found, dict) or not are_tables:
        raise TaskError(f"{path}: the compose file must contain a mapping `services`, whose values are mappings.")
    return data.decode("utf-8", "replace"), found


Look = Callable[[Any], Iterable[str]]
"""A check of a key's value. It yields the violations, as suffixes of the key's name."""


def _violations(table: Mapping[str, Any], harmless: Set[str], looks: Mapping[str, Look]) -> Iterator[str]:
    """Yields the keys of a table that are neither empty nor harmless. `looks` checks keys that may be harmless."""
    for key, value in table.items():
        if value and key not in harmless and not str(key).startswith("x-"):
            yield from (f"{key}{violation}" for violation in looks.get(key, lambda _: ("",))(value))


def _allows(allowed: Callable[[Any], object], *, shown: bool = False) -> Look:
    """Returns a check that accepts values for which `allowed` is true. `shown`: violations contain the value."""
    return lambda value: () if allowed(value) else (f" ({value})" if shown else "",)


class _Reading:
    """Finds keys that violate the policy. Accepts values with variables, which the second check sees substituted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of_service: dict[str, Look] = {
            "build": self._of_build,
            "deploy": _of_deploy,
            "volumes": self._of_volumes,
            "volumes_from": _allows(lambda value: not any("container:" in str(one) for one in value)),
            "network_mode": _allows(lambda value: re.match(r"none$|service:|.*\$", str(value)), shown=True),
            "ipc": _allows(lambda value: re.match(r"none$|private$|shareable$|service:", str(value)), shown=True),
            "pid": _allows(lambda value: str(value).startswith("service:"), shown=True),
            "security_opt": _allows(lambda value: all(str(one).startswith("no-new-privileges") for one in value)),
            "logging": lambda value: () if value.get("driver") in _LOG_DRIVERS else (".driver",),
            "env_file": self._of_env_file,
            "extends": lambda value: (
                () if isinstance(value, str) or self._is_read_from_ours(value.get(_FILE)) else (".file",)
            ),
        }

    def violations(self, document: Mapping[str, Any]) -> Iterator[str]:
        yield from _violations(document, _HARMLESS_SECTIONS, {})
        for section, harmless, looks in (
            ("services", _HARMLESS, self._of_service),
            ("networks", _HARMLESS_OF_NETWORKS, _OF_NETWORKS),
            ("volumes", _HARMLESS_OF_VOLUMES, {"driver": _allows(lambda value: value == "local")}),
            ("configs", _HARMLESS_OF_FILES, {_FILE: _allows(self._is_ours)}),
            ("secrets", _HARMLESS_OF_FILES, {_FILE: _allows(self._is_ours)}),
        ):
            for name, table in _tables(document.get(section)):
                yield from (f"{section}.{name}.{violation}" for violation in _violations(table, harmless, looks))

    def _of_build(self, build: str | Mapping[str, Any]) -> Iterator[str]:
        table = {"context": build} if isinstance(build, str) else build
        context = str(table.get("context", "."))
        looks = {
            "context": _allows(self._is_ours),
            "dockerfile": _allows(lambda value: self._is_ours(value, below=context)),
        }
        yield from (f".{violation}" for violation in _violations(table, _HARMLESS_OF_BUILDS, looks))

    def _of_volumes(self, volumes: Sequence[str | Mapping[str, Any]]) -> Iterator[str]:
        for volume in volumes:
            if isinstance(volume, str):
                source, _, rest = volume.partition(":")
                kind, read_only = "bind" if source[:1] in "/.~" else "volume", "ro" in rest.split(":")[-1].split(",")
                if not rest:  # an anonymous volume
                    continue
            else:
                source, kind = str(volume.get("source", "")), str(volume.get("type"))
                read_only = bool(volume.get("read_only"))
            if kind == "bind":
                if not self._is_ours(source):
                    yield f" ({source})"
                elif not read_only:
                    yield f" ({source}, which is not mounted read-only)"
            elif kind not in ("bind", "volume", "tmpfs"):
                yield f" ({kind})"

    def _of_env_file(self, value: object) -> Iterator[str]:
        for one in value if isinstance(value, list) else [value]:
            path = one.get("path") if isinstance(one, dict) else one
            if not self._is_read_from_ours(path):
                yield f" ({path})"

    def _is_read_from_ours(self, path: object) -> bool:
        """Returns `_is_ours`, but false for variables: the compose program opens the file before the second check."""
        return "$" not in str(path) and self._is_ours(path)

    def _is_ours(self, path: object, below: str = ".") -> bool:
        """Returns whether a path (links resolved) is in the compose file's folder. True for a path with a variable."""
        if path is None:
            return True
        text = posixpath.join(below, str(path)).replace("$$", "\0")  # an escaped `$`
        if "$" in text:
            return True
        if "://" in text or str(path).startswith(("~", "git@")):
            return False
        return (self._folder / text.replace("\0", "$")).resolve().is_relative_to(self._folder)


def _tables(value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, dict):
        yield from ((str(name), table) for name, table in value.items() if isinstance(table, dict))


def _of_ipam(value: Mapping[str, Any]) -> Iterator[str]:
    if value.get("driver") not in (None, "default") or not all(map(_is_private, value.get("config") or ())):
        yield ""


def _is_private(pool: Mapping[str, Any]) -> bool:
    subnet = str(pool.get("subnet"))
    if "subnet" not in pool or "$" in subnet:  # the engine chooses, or a variable is not substituted yet
        return True
    found = ipaddress.ip_network(subnet, strict=False)
    return any(found[0] in private and found[-1] in private for private in _PRIVATE)


_OF_NETWORKS: Mapping[str, Look] = {
    "driver": _allows(lambda value: value == "bridge"),
    "driver_opts": lambda value: (f".{name}" for name in value if name not in _NETWORK_OPTIONS),
    "ipam": _of_ipam,
}


def _of_deploy(deploy: Mapping[str, Any]) -> Iterator[str]:
    """Yields a violation for devices that are not NVIDIA GPUs: other drivers could give access to the host's files."""
    devices = _value(deploy, "resources.reservations.devices") or ()
    if any(device.get("driver") not in (None, "nvidia") for device in devices):
        yield ".resources.reservations.devices"


def _excesses(document: Mapping[str, Any], options: DockerOptions) -> Iterator[str]:
    services = {
        str(name): service or {}
        for name, service in document["services"].items()
        if not (service or {}).get("profiles")  # no profile is activated
    }
    counts = {MAIN: 1.0, **{name: _count(service) for name, service in services.items()}}
    option = f"at most {options.compose_max_containers}: container.compose_max_containers"
    if sum(counts.values()) > options.compose_max_containers:
        most = max(counts, key=lambda name: counts[name])
        times = f", {counts[most]:g} of them for services.{most}" if counts[most] > 1 else ""
        yield f"{sum(counts.values()):g} containers in total{times} ({option})"
    if len(document.get("networks") or {}) > options.compose_max_containers:
        yield f"{len(document['networks'])} networks ({option})"
    for name, service in services.items():
        for key in _PIDS:
            value = _value(service, key)
            if not _is_left_for_later(value) and not 1 <= _size(value) <= options.pids_limit:
                yield f"services.{name}.{key} ({value!r:.50}, from 1 to {options.pids_limit}: container.pids_limit)"
        for key in _MEMORY if name != MAIN else ():
            value = _value(service, key)
            is_none = key in _MEMORY_LIMITS and _size(value) == 0
            if not _is_left_for_later(value) and (is_none or not _size(value) <= options.compose_max_memory_mb * _MIB):
                told = f"{value!r:.50}, which means no limit" if is_none else f"{value!r:.50}"
                allowed = f"at most {options.compose_max_memory_mb} MiB: container.compose_max_memory_mb"
                yield f"services.{name}.{key} ({told}, {allowed})"


def _count(service: Mapping[str, Any]) -> float:
    said = [value for key in ("scale", "deploy.replicas") if (value := _value(service, key)) is not None]
    return max((1 if _is_left_for_later(value) else _size(value) for value in said), default=1)


def _value(table: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a path of keys, such as `deploy.replicas`; `None` if it is missing."""
    found: Any = table
    for key in path.split("."):
        found = (found or {}).get(key)
    return found


def _is_left_for_later(value: object) -> bool:
    """Returns whether a value cannot be checked yet, because it is missing or contains a variable."""
    return value is None or "$" in str(value)


def _size(value: object) -> float:
    """Converts a number, or a size such as `1.5g`, to bytes. Returns infinity for other values, such as -1."""
    match = _SIZE.fullmatch(str(value).strip())
    return float(match[1]) * 1024.0 ** " kmgtp".index(match[2].lower() or " ") if match else float("inf")
