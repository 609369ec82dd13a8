"""The file that a compose project is started from: the task's, completed by us.

The compose program merges the task's file on top of ours (`base_document`) and prints the result. `complete` then sets
what the task cannot choose: labels, networks, images, the variables of `main`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.capabilities import Capabilities, gpu_request
from ares_exp.containers.docker.container_lifetime import FIRST_COMMAND
from ares_exp.errors import ContainerStartError

MAIN = "main"
"""The service of the agent's container."""

_MiB = 1024 * 1024
_DEFAULT = "default"

# A network without a way out, on which this machine has no address either.
_CLOSED = {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}
# The engine resolves names of services itself; queries for other names would leave through it.
_NO_RESOLVER = {"dns": ["127.0.0.1"], "dns_opt": ["timeout:1", "attempts:2"]}


@dataclass(frozen=True, slots=True)
class Ours:
    """The settings of a project that do not depend on its task's file.

    Attributes:
        labels: Labels of everything in the project.
        env: Variables of `main` that the task may override.
        extra_hosts: More lines of `/etc/hosts`.
        pids_limit: Bound on the processes of each service without its own.
        memory_mb: Bound on the memory of each service beside `main` without its own; `None`: no bound.
        swap_mb: Swap of `main` on top of its memory limit, and on top of `memory_mb`.
        no_new_privileges: Whether programs may gain no rights when they start.
        closed: Whether its networks have no way out.
        capabilities: The engine's capabilities.
    """

    labels: Mapping[str, str]
    env: Mapping[str, str]
    extra_hosts: Mapping[str, str]
    pids_limit: int
    memory_mb: int | None
    swap_mb: int
    no_new_privileges: bool
    closed: bool
    capabilities: Capabilities


def base_document(spec: ContainerSpec) -> dict[str, Any]:
    """Returns the document below the task's file: `main` with its image and first process. Blocking."""
    main: dict[str, Any] = {"command": FIRST_COMMAND}
    if spec.docker_image is not None:
        main["image"] = literal(spec.docker_image)
    elif spec.context_dir is not None and (spec.context_dir / "Dockerfile").is_file():
        main["build"] = {"context": literal(str(spec.context_dir))}
    return {"services": {MAIN: main}}


def complete(document: Mapping[str, Any], spec: ContainerSpec, ours: Ours, images: Mapping[str, str]) -> dict[str, Any]:
    """Returns the document to start the project from.

    Args:
        document: The compose program's merge of `base_document` and the task's file, with variables filled in.
        spec: The task's settings of `main`.
        ours: Our settings.
        images: The image of each service, by name.

    Raises:
        UnsupportedTaskError: It asks for GPUs that the engine lacks.
        ContainerStartError: The service `main` is missing, or has several containers.
    """
    whole = copy.deepcopy(dict(document))
    whole.pop("name", None)  # the project's name is given on the command line
    services: dict[str, dict[str, Any]] = whole["services"]
    if MAIN not in services or _count(services[MAIN]) != 1:
        raise ContainerStartError(f"Expected one container of a service `{MAIN}` in {spec.compose_file}.")
    for name, service in services.items():
        service["image"] = literal(images[name])
        _complete_service(service, ours)
        if name != MAIN and ours.memory_mb is not None:
            _bound_memory(service, ours.memory_mb, ours.swap_mb)
    _complete_main(services[MAIN], spec, ours)
    whole["networks"] = {_DEFAULT: None, **(whole.get("networks") or {})}
    if not any(_DEFAULT in _networks(service) for service in services.values()):
        del whole["networks"][_DEFAULT]
    for kind in ("networks", "volumes"):
        for name, one in (whole.get(kind) or {}).items():
            if not (one or {}).get("external"):
                whole[kind][name] = _owned(one or {}, ours)
    if ours.closed:
        for name in whole["networks"]:
            whole["networks"][name] |= _CLOSED
    return whole


def literal(text: str) -> str:
    """Escapes `text` for a compose file, where a `$` begins a variable."""
    return text.replace("$", "$$")


def names_of(document: Mapping[str, Any]) -> list[str]:
    """Returns the names by which the services of a file reach each other."""
    services: Mapping[str, Mapping[str, Any]] = document["services"]
    return [*services, *(one["container_name"] for one in services.values() if one.get("container_name"))]


def _owned(thing: Mapping[str, Any], ours: Ours) -> dict[str, Any]:
    """Returns a network or volume with a generated name and our labels."""
    rest = {key: value for key, value in thing.items() if key != "name"}
    return {**rest, "labels": {**_table(rest.get("labels")), **ours.labels}}


def _complete_service(service: dict[str, Any], ours: Ours) -> None:
    service.pop("build", None)
    service.pop("ports", None)  # simultaneous attempts would need the same ports
    service["labels"] = {**_table(service.get("labels")), **ours.labels}
    if name := service.pop("container_name", None):  # likewise; an alias keeps the name reachable
        joined = _networks(service)
        if joined:
            service["networks"] = {
                network: {**(options or {}), "aliases": [*((options or {}).get("aliases") or ()), name]}
                for network, options in joined.items()
            }
    # Compose version 1 ignores limits in `deploy`; both versions read these keys.
    limits = ((service.get("deploy") or {}).get("resources") or {}).pop("limits", None) or {}
    for key, name in (("cpus", "cpus"), ("memory", "mem_limit"), ("pids", "pids_limit")):
        if limits.get(key) is not None:
            service.setdefault(name, float(limits[key]) if key == "cpus" else limits[key])
    service.setdefault("pids_limit", ours.pids_limit)
    if ours.no_new_privileges:
        service["security_opt"] = [*(service.get("security_opt") or ()), "no-new-privileges:true"]
    if ours.extra_hosts and not service.get("network_mode"):
        lines = service.get("extra_hosts") or []
        lines = [f"{name}:{address}" for name, address in lines.items()] if isinstance(lines, dict) else lines
        service["extra_hosts"] = [*lines, *(f"{name}:{address}" for name, address in ours.extra_hosts.items())]
    if ours.closed and not service.get("network_mode"):
        service |= _NO_RESOLVER


def _bound_memory(service: dict[str, Any], memory_mb: int, swap_mb: int) -> None:
    """Sets the memory limit of a service without one."""
    if "mem_limit" not in service:
        service["mem_limit"] = f"{memory_mb * _MiB}b"
        service["memswap_limit"] = f"{(memory_mb + swap_mb) * _MiB}b"


def _complete_main(main: dict[str, Any], spec: ContainerSpec, ours: Ours) -> None:
    wins = {name: literal(value) for name, value in spec.env.items()}
    yields = {name: literal(value) for name, value in ours.env.items()}
    main["environment"] = {**yields, **_table(main.get("environment")), **wins}
    main |= {"stdin_open": True, "tty": False, "restart": "no"}
    if spec.mounts:
        mounts = [
            {"type": "bind", "source": literal(str(one.source)), "target": one.target, "read_only": True}
            for one in spec.mounts
        ]
        main["volumes"] = [*(main.get("volumes") or ()), *mounts]
    if spec.cpus is not None:
        main.setdefault("cpus", min(spec.cpus, ours.capabilities.cpus))
    if spec.memory_mb is not None:
        _bound_memory(main, spec.memory_mb, ours.swap_mb)
    if spec.storage_mb is not None and ours.capabilities.disk_quota:
        main.setdefault("storage_opt", {"size": f"{spec.storage_mb}m"})
    if spec.gpus:
        request = gpu_request(spec.name, spec.gpus, ours.capabilities)
        resources = main.setdefault("deploy", {}).setdefault("resources", {})
        device = {"driver": request["Driver"] or "nvidia", "capabilities": ["gpu"]}
        device |= {"device_ids": request["DeviceIDs"]} if request["DeviceIDs"] else {"count": request["Count"]}
        resources.setdefault("reservations", {}).setdefault("devices", [device])


def _networks(service: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the networks of a service, with their options."""
    if service.get("network_mode"):
        return {}
    found = service.get("networks") or {_DEFAULT: None}
    return dict(found) if isinstance(found, dict) else dict.fromkeys(found)


def _table(value: object) -> dict[str, Any]:
    """Returns a table, also for a list of `name=value`, without names that have no value (the host's)."""
    if isinstance(value, list):
        value = dict(str(line).split("=", 1) for line in value if "=" in str(line))
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else {}


def _count(service: Mapping[str, Any]) -> object:
    return service.get("scale", (service.get("deploy") or {}).get("replicas", 1))
