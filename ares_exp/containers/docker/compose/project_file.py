"""The file from which a compose project is started: the task's file, completed by this module.

First, the compose program merges the task's file on top of `base_document`. Then `complete` sets the values that the
task cannot choose: labels, networks, images, and the environment variables of `main`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.container import DockerOptions
from ares_exp.containers.docker.container_lifetime import FIRST_COMMAND
from ares_exp.containers.docker.engine import Capabilities, gpu_request
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import ContainerStartError

MAIN = "main"
"""Name of the service whose container the agent works in."""

_MiB = 1024 * 1024
_DEFAULT = "default"

# A network without a way out, on which this machine also has no address.
_CLOSED = {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}
# The engine resolves names of services itself; queries for other names would leave through it.
_NO_RESOLVER = {"dns": ["127.0.0.1"], "dns_opt": ["timeout:1", "attempts:2"]}


def is_closed(policy: NetworkPolicy, options: DockerOptions) -> bool:
    """Returns whether the project's networks are isolated from the outside, because the policy is not `public`."""
    return options.network.in_force(policy).mode != "public"


def base_document(spec: ContainerSpec) -> dict[str, Any]:
    """Returns a compose document with defaults for the service `main`, which the task's file can override. Blocking."""
    main: dict[str, Any] = {"command": FIRST_COMMAND}
    if spec.docker_image is not None:
        main["image"] = literal(spec.docker_image)
    elif spec.context_dir is not None and (spec.context_dir / "Dockerfile").is_file():
        main["build"] = {"context": literal(str(spec.context_dir))}
    return {"services": {MAIN: main}}


def complete(
    document: Mapping[str, Any],
    spec: ContainerSpec,
    options: DockerOptions,
    images: Mapping[str, str],
    capabilities: Capabilities,
) -> dict[str, Any]:
    """Returns the compose document from which the project is started.

    Args:
        document: Merge of `base_document` and the task's file, printed by the compose program with substituted
            variables.
        spec: Settings of the task for the service `main`.
        options: Options of the container factory.
        images: Image of each service, by the service's name.
        capabilities: The engine's capabilities.
    """
    closed = is_closed(spec.network, options)
    whole = copy.deepcopy(dict(document))
    whole.pop("name", None)  # the project's name is set on the command line
    services: dict[str, dict[str, Any]] = whole["services"]
    if MAIN not in services or _count(services[MAIN]) != 1:
        raise ContainerStartError(f"{spec.compose_file}: expected exactly one container for the service `{MAIN}`.")
    for name, service in services.items():
        service["image"] = literal(images[name])
        _complete_service(service, options, closed=closed)
        if name != MAIN and not options.compose_trusted:
            _bound_memory(service, options.compose_max_memory_mb, options.swap_mb)
    _complete_main(services[MAIN], spec, options, capabilities)
    whole["networks"] = {_DEFAULT: None, **(whole.get("networks") or {})}
    if not any(_DEFAULT in _networks(service) for service in services.values()):
        del whole["networks"][_DEFAULT]
    for kind in ("networks", "volumes"):
        for name, one in (whole.get(kind) or {}).items():
            if not (one or {}).get("external"):
                rest = {key: value for key, value in (one or {}).items() if key != "name"}
                whole[kind][name] = {**rest, "labels": {**_table(rest.get("labels")), **owner_labels()}}
    if closed:
        for name in whole["networks"]:
            whole["networks"][name] |= _CLOSED
    return whole


def literal(text: str) -> str:
    """Escapes each `$` in `text` as `$$`, because `$` starts a variable in a compose file."""
    return text.replace("$", "$$")


def names_of(document: Mapping[str, Any]) -> list[str]:
    """Returns the host names of the services: the service names and their `container_name`s."""
    services: Mapping[str, Mapping[str, Any]] = document["services"]
    return [*services, *(one["container_name"] for one in services.values() if one.get("container_name"))]


def _complete_service(service: dict[str, Any], options: DockerOptions, *, closed: bool) -> None:
    service.pop("build", None)
    service.pop("ports", None)  # simultaneous attempts would need the same ports
    service["labels"] = {**_table(service.get("labels")), **owner_labels()}
    if name := service.pop("container_name", None):  # for the same reason; an alias keeps the name reachable
        joined = _networks(service)
        if joined:
            service["networks"] = {
                network: {**(given or {}), "aliases": [*((given or {}).get("aliases") or ()), name]}
                for network, given in joined.items()
            }
    # Compose version 1 ignores limits in `deploy`; both versions read these keys.
    limits = ((service.get("deploy") or {}).get("resources") or {}).pop("limits", None) or {}
    for key, name in (("cpus", "cpus"), ("memory", "mem_limit"), ("pids", "pids_limit")):
        if limits.get(key) is not None:
            service.setdefault(name, float(limits[key]) if key == "cpus" else limits[key])
    service.setdefault("pids_limit", options.pids_limit)
    if options.no_new_privileges:
        service["security_opt"] = [*(service.get("security_opt") or ()), "no-new-privileges:true"]
    if options.network.extra_hosts and not service.get("network_mode"):
        lines = service.get("extra_hosts") or []
        lines = [f"{name}:{address}" for name, address in lines.items()] if isinstance(lines, dict) else lines
        service["extra_hosts"] = [
            *lines,
            *(f"{name}:{address}" for name, address in options.network.extra_hosts.items()),
        ]
    if closed and not service.get("network_mode"):
        service |= _NO_RESOLVER


def _bound_memory(service: dict[str, Any], memory_mb: int, swap_mb: int) -> None:
    if "mem_limit" not in service:
        service["mem_limit"] = f"{memory_mb * _MiB}b"
        service["memswap_limit"] = f"{(memory_mb + swap_mb) * _MiB}b"


def _complete_main(
    main: dict[str, Any], spec: ContainerSpec, options: DockerOptions, capabilities: Capabilities
) -> None:
    wins = {name: literal(value) for name, value in spec.env.items()}
    yields = {name: literal(value) for name, value in options.env.items()}
    main["environment"] = {**yields, **_table(main.get("environment")), **wins}
    main |= {"stdin_open": True, "tty": False, "restart": "no"}
    if spec.mounts:
        mounts = [
            {"type": "bind", "source": literal(str(one.source)), "target": one.target, "read_only": True}
            for one in spec.mounts
        ]
        main["volumes"] = [*(main.get("volumes") or ()), *mounts]
    if spec.cpus is not None:
        main.setdefault("cpus", min(spec.cpus, capabilities.cpus))
    if spec.memory_mb is not None:
        _bound_memory(main, spec.memory_mb, options.swap_mb)
    if spec.storage_mb is not None and capabilities.disk_quota:
        main.setdefault("storage_opt", {"size": f"{spec.storage_mb}m"})
    if spec.gpus:
        request = gpu_request(spec.name, spec.gpus, capabilities)
        resources = main.setdefault("deploy", {}).setdefault("resources", {})
        device = {"driver": request["Driver"] or "nvidia", "capabilities": ["gpu"]}
        device |= {"device_ids": request["DeviceIDs"]} if request["DeviceIDs"] else {"count": request["Count"]}
        resources.setdefault("reservations", {}).setdefault("devices", [device])


def _networks(service: Mapping[str, Any]) -> dict[str, Any]:
    if service.get("network_mode"):
        return {}
    found = service.get("networks") or {_DEFAULT: None}
    return dict(found) if isinstance(found, dict) else dict.fromkeys(found)


def _table(value: object) -> dict[str, Any]:
    """Returns a list of `name=value`, or a dictionary, as a new dictionary. Omits names without a value."""
    if isinstance(value, list):
        value = dict(str(line).split("=", 1) for line in value if "=" in str(line))
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else {}


def _count(service: Mapping[str, Any]) -> object:
    return service.get("scale", (service.get("deploy") or {}).get("replicas", 1))
