"""What a task's compose file may not ask for, unless the user trusts it: a way out of its containers.

Keys that are not known to be harmless are refused, so that what a later version of Compose brings is, too. The file is
looked at twice: as it is written, before anything starts, and as the compose program has read it, with variables and
the files that it extends.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.compose.bounds import Bounds, refuse_excess
from ares_exp.containers.docker.compose.variables import refuse_obeyed
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
# fmt: on
_NETWORK_OPTIONS = {"com.docker.network.driver.mtu", "com.docker.network.bridge.enable_icc"}
_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
"""What a network may have of addresses. Others would be this machine's way to somebody else."""
_LOG_DRIVERS = (None, "", "json-file", "local", "none")
_FILE = "file"


def check_file(spec: ContainerSpec, bounds: Bounds | None) -> list[str]:
    """Looks at a task's compose file as it is written. Blocking.

    Args:
        spec: With a compose file.
        bounds: How much it may ask for; `None`: the file may ask for anything.

    Returns:
        What of it is not done, a sentence each.

    Raises:
        UnsupportedTaskError: It asks for too much, or uses a variable that is not filled in.
        TaskError: It cannot be read, or is no compose file.
    """
    path = spec.compose_file
    assert path is not None
    text, document = _read(path)
    refuse_obeyed(spec, text)
    refuse_what_is_not_allowed(path, document, bounds)
    with_ports = sorted(str(name) for name, service in _tables(document["services"]) if service.get("ports"))
    if with_ports:
        return [
            f"ports are not published, as attempts at the same time would need the same ones ({path.name}: services "
            f"{', '.join(with_ports)}); the services reach each other as ever"
        ]
    return []


def refuse_what_is_not_allowed(path: Path, document: Mapping[str, Any], bounds: Bounds | None) -> None:
    """Refuses a compose file that asks for a way out of its containers, or for too much. Blocking.

    Args:
        path: The task's file.
        document: What is in it.
        bounds: How much it may ask for; `None`: anything is allowed.

    Raises:
        UnsupportedTaskError, TaskError: As `refuse_dangers` and `refuse_excess`.
    """
    if bounds is not None:
        refuse_dangers(path, document)
        refuse_excess(path, document, bounds)


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise TaskError(f"{path}: expected a compose file of at most {_MAX_FILE_BYTES} bytes, got a longer one.")
        found: object = yaml.safe_load(data)
    except TaskError:
        raise
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: expected a compose file, and it cannot be read: {error}") from error
    services = found.get("services") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(services, dict) or not all(map(_is_table, services.values())):
        raise TaskError(f"{path}: expected a compose file, found no table `services` of tables.")
    return data.decode("utf-8", "replace"), found


def refuse_dangers(path: Path, document: Mapping[str, Any]) -> None:
    """Refuses a compose file that asks for a way out of its containers. Blocking.

    Args:
        path: The task's file.
        document: What is in it.

    Raises:
        UnsupportedTaskError: With every key that asks for one.
        TaskError: Something in it has another form than in a compose file.
    """
    try:
        found = sorted(set(_Reading(path.parent.resolve()).dangers(document)))
    except (AttributeError, TypeError, ValueError) as error:
        raise TaskError(f"{path}: expected a compose file, and something in it has another form: {error}.") from error
    if found:
        raise UnsupportedTaskError(
            f"{path}: it has keys that are unknown here or give its containers more than their own files and networks: "
            f"{', '.join(found)}. Leave the task out, or, where you trust it as you trust a program that you run, set "
            "container.compose_trusted=true."
        )


class _Reading:
    """Reads one file. Values with a `$` are variables yet, and looked at when they are known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def dangers(self, document: Mapping[str, Any]) -> Iterator[str]:
        for key, value in document.items():
            if value and key not in ("version", "name", "services", "networks", "volumes", "configs", "secrets"):
                yield from () if str(key).startswith("x-") else (str(key),)
        for name, service in _tables(document.get("services")):
            yield from (f"services.{name}.{danger}" for danger in self._of_service(service))
        for name, network in _tables(document.get("networks")):
            yield from (f"networks.{name}.{danger}" for danger in _of_network(network))
        for name, volume in _tables(document.get("volumes")):
            yield from (
                f"volumes.{name}.{key}" for key in volume if volume[key] and not _is_own_volume(key, volume[key])
            )
        for kind in ("configs", "secrets"):
            for name, one in _tables(document.get(kind)):
                yield from (f"{kind}.{name}.{danger}" for danger in self._of_files(one))

    def _of_service(self, service: Mapping[str, Any]) -> Iterator[str]:
        for key, value in service.items():
            if not value or key in _HARMLESS or str(key).startswith("x-"):
                continue
            looks: dict[str, Callable[[Any], Iterable[str]]] = {
                "build": self._of_build,
                "deploy": _of_deploy,
                "volumes": self._of_volumes,
                "volumes_from": lambda value: ("",) if any("container:" in str(one) for one in value) else (),
                "network_mode": lambda value: () if re.match(r"none$|service:|.*\$", str(value)) else (f" ({value})",),
                "ipc": lambda value: (
                    () if re.match(r"none$|private$|shareable$|service:", str(value)) else (f" ({value})",)
                ),
                "pid": lambda value: () if str(value).startswith("service:") else (f" ({value})",),
                "security_opt": lambda value: () if all(_is_no_new_privileges(one) for one in value) else ("",),
                "logging": lambda value: () if value.get("driver") in _LOG_DRIVERS else (".driver",),
                "env_file": self._of_env_file,
                "extends": lambda value: (
                    () if isinstance(value, str) or self._is_ours(value.get(_FILE)) else (".file",)
                ),
            }
            look = looks.get(key)
            yield from (f"{key}{danger}" for danger in look(value)) if look is not None else (str(key),)

    def _of_build(self, build: str | Mapping[str, Any]) -> Iterator[str]:
        table = {"context": build} if isinstance(build, str) else build
        context = str(table.get("context", "."))
        if not self._is_ours(context):
            yield ".context"
        if not self._is_ours(table.get("dockerfile"), below=context):
            yield ".dockerfile"
        for key, value in table.items():
            if value and key not in _HARMLESS_OF_BUILDS and key not in ("context", "dockerfile"):
                yield f".{key}"

    def _of_volumes(self, volumes: Sequence[str | Mapping[str, Any]]) -> Iterator[str]:
        for volume in volumes:
            if isinstance(volume, str):
                source, _, rest = volume.partition(":")
                kind, read_only = "bind" if source[:1] in "/.~" else "volume", "ro" in rest.split(":")[-1].split(",")
                if not rest:  # an anonymous one
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
            if not self._is_ours(path):
                yield f" ({path})"

    def _of_files(self, table: Mapping[str, Any]) -> Iterator[str]:
        if not self._is_ours(table.get(_FILE)):
            yield _FILE
        yield from (
            key for key in table if table[key] and key not in (_FILE, "content", "environment", "labels", "name")
        )

    def _is_ours(self, path: object, below: str = ".") -> bool:
        """Whether a path is inside of the file's folder, or not known yet; links are followed."""
        if path is None:
            return True
        text = posixpath.join(below, str(path)).replace("$$", "\0")  # a `$` that is meant so
        if "$" in text:
            return True
        if "://" in text or str(path).startswith(("~", "git@")):
            return False
        return (self._folder / text.replace("\0", "$")).resolve().is_relative_to(self._folder)


def _is_table(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _tables(value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, dict):
        yield from ((str(name), table) for name, table in value.items() if isinstance(table, dict))


def _of_network(network: Mapping[str, Any]) -> Iterator[str]:
    for key, value in network.items():
        if not value or key in _HARMLESS_OF_NETWORKS or str(key).startswith("x-"):
            continue
        if key == "driver_opts" and isinstance(value, dict):
            yield from (f"driver_opts.{name}" for name in value if name not in _NETWORK_OPTIONS)
        elif key == "ipam":
            if value.get("driver") not in (None, "default") or not all(map(_is_private, value.get("config") or ())):
                yield str(key)
        elif (key, value) != ("driver", "bridge"):
            yield str(key)


def _is_private(pool: Mapping[str, Any]) -> bool:
    subnet = str(pool.get("subnet"))
    if "subnet" not in pool or "$" in subnet:  # the engine chooses; or it is looked at when it is known
        return True
    found = ipaddress.ip_network(subnet, strict=False)
    return any(found[0] in private and found[-1] in private for private in _PRIVATE)


def _of_deploy(deploy: Mapping[str, Any]) -> Iterator[str]:
    """Of devices, GPUs by their own driver alone: others come with whatever files of the host their driver names."""
    reserved = (deploy.get("resources") or {}).get("reservations") or {}
    if any(device.get("driver") not in (None, "nvidia") for device in reserved.get("devices") or ()):
        yield ".resources.reservations.devices"


def _is_own_volume(key: str, value: object) -> bool:
    return key in ("labels", "name") or (key, value) == ("driver", "local") or str(key).startswith("x-")


def _is_no_new_privileges(option: object) -> bool:
    return str(option).startswith("no-new-privileges")
