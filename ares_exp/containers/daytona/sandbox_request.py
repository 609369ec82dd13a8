"""The parameters of requests to the service: for a new sandbox, and for its network.

`check_spec` rejects tasks that exceed the limits of the service before a run starts. The limits are defined in
`apps/api` of the repository daytonaio/daytona.
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.container import ContainerSpec, Shell
from ares_exp.containers.images.image_plan import ImagePlan, plan_image
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import ConfigError, UnsupportedTaskError

if TYPE_CHECKING:
    from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Image, Resources

DEFAULT_TTL_MIN = 24 * 60
"""TTL of a sandbox in minutes, if it is unknown how long the task may take."""

TTL_MARGIN_MIN = 10
"""Minutes that are added to the time that a task may take, for retries and the time between its phases."""

MAX_DOMAINS, MAX_NETWORKS = 20, 10
"""Maximum numbers of domains and of networks in one allowlist of the service."""

_MB_PER_GIB = 1024
_DOMAIN = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,}")


@dataclass(frozen=True, slots=True)
class DaytonaOptions:
    """The options of a `DaytonaContainerFactory`, which apply to all of its sandboxes. The factory documents them."""

    snapshot: str | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    ttl_min: int | None = None
    network: NetworkPolicy | None = None
    allowed_hosts: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    shell: Shell = "bash -c"
    forwarded_port_lease_sec: int = 2


def check_spec(spec: ContainerSpec, options: DaytonaOptions) -> list[str]:
    """Checks whether the service can run `spec`, without sending a request. Blocks to read the task's files.

    Returns warnings about settings of the task that the sandbox will not have.

    Raises:
        UnsupportedTaskError: The image cannot be created, or a network policy cannot be enforced.
        TaskError: The task's image definition is malformed.
        ConfigError: The option `ttl_min` is shorter than the task may take.
    """
    warnings = list(plan_image(spec, options.snapshot).warnings)
    if spec.mounts:
        copied = ", ".join(one.target for one in spec.mounts)
        warnings.append(f"{copied}: copied from this machine into every sandbox when the sandbox starts")
    ttl_minutes(spec, options)
    for policy in sorted(spec.networks, key=str):
        try:
            network_settings(policy, options)
        except UnsupportedTaskError as error:
            raise UnsupportedTaskError(f"Task {spec.name}: {error}") from error
    return [*warnings, *(f"{spec.name}: {warning}" for warning in _resource_warnings(spec, options))]


def create_params(
    spec: ContainerSpec,
    options: DaytonaOptions,
    plan: ImagePlan,
    *,
    labels: Mapping[str, str],
    ttl_min: int,
    directory: Path,
) -> CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams:
    """Returns the SDK's parameters for creating a sandbox.

    If `plan` has steps to run after the start, the sandbox first has a public network, as in an image build. After
    these steps, the caller must apply `network_settings`.

    Args:
        spec: The task's container.
        options: The factory's options.
        plan: Plan of the image, as returned by `ImagePlan.stored` or `ImagePlan.after_start`.
        labels: Labels that name the owner of the sandbox.
        ttl_min: Minutes after which the service removes the sandbox, whatever its state is, unless the TTL is renewed.
        directory: Directory with the files of the plan. It is empty if the plan has no files.
    """
    from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

    if plan.local is not None:
        raise ValueError(f"Internal error: the sandbox plan for {spec.name} is used before it is computed.")
    network = (
        network_settings(PUBLIC, DaytonaOptions())
        if plan.builds_after_start
        else network_settings(spec.network, options)
    )
    common: dict[str, Any] = {
        "os_user": "root",  # root runs commands as other users
        # The sandbox's variables override the image's. The image's variables override the options' variables.
        "env_vars": {name: value for name, value in options.env.items() if name not in plan.env} | dict(spec.env),
        "labels": dict(labels),
        "auto_stop_interval": ttl_min,
        "ttl_minutes": ttl_min,
        "auto_delete_interval": 0,  # as soon as it stops
        **{key: value for key, value in network.items() if value},
    }
    if plan.snapshot is not None:
        return CreateSandboxFromSnapshotParams(snapshot=plan.snapshot, **common)
    image = plan.image if plan.image is not None else _built_image(plan, directory)
    return CreateSandboxFromImageParams(image=image, resources=_resources(spec, options), **common)


def ttl_minutes(spec: ContainerSpec, options: DaytonaOptions) -> int:
    """Returns the TTL of a sandbox in minutes: the option `ttl_min`, or the time that the task may take, with a margin.

    Raises `ConfigError` if the option is shorter than the time that the task may take.
    """
    needed = spec.lifetime_sec
    if options.ttl_min is None:
        return DEFAULT_TTL_MIN if needed is None else math.ceil(needed / 60) + TTL_MARGIN_MIN
    if needed is not None and options.ttl_min * 60 <= needed:
        enough = math.ceil(needed / 60) + TTL_MARGIN_MIN
        raise ConfigError(
            f"Task {spec.name}: container.ttl_min={options.ttl_min} is too short, because start, agent and scoring may "
            f"take {needed:g} s. Set container.ttl_min={enough}, or lower the task's limits, for example with "
            "timeouts.multiplier=…"
        )
    return options.ttl_min


def network_settings(policy: NetworkPolicy, options: DaytonaOptions) -> dict[str, Any]:
    """Returns the arguments of the SDK's `update_network_settings` for `policy`. In them, `""` means no allowlist.

    Raises `UnsupportedTaskError` with the entries and the reason if the service does not support this allowlist.
    """
    policy = (options.network or policy).with_hosts(options.allowed_hosts)
    is_blocked = policy != PUBLIC and (policy == NO_NETWORK or not policy.allowed_hosts)
    networks, domains = ([], []) if is_blocked or policy == PUBLIC else _split_hosts(policy)
    return {
        "network_block_all": is_blocked,
        "network_allow_list": ",".join(networks),
        "domain_allow_list": ",".join(domains),
    }


def _split_hosts(policy: NetworkPolicy) -> tuple[list[str], list[str]]:
    """Returns an allowlist's networks and its domains. One list is empty, because the service does not support both."""
    networks: list[str] = []
    domains: list[str] = []
    strange: list[str] = []
    for entry in sorted(policy.allowed_hosts):
        try:
            network = ipaddress.ip_network(entry)
        except ValueError:
            (domains if _DOMAIN.fullmatch(entry) else strange).append(entry)
        else:
            (networks if network.version == 4 else strange).append(str(network))
    if strange:
        raise _unsupported(
            f"can contain only IPv4 networks and names under an alphabetic top-level domain, not {', '.join(strange)}"
        )
    if networks and domains:
        raise _unsupported(
            f"can contain either names or addresses, not both ({', '.join(domains)}; {', '.join(networks)}). Remove "
            "the names or the addresses"
        )
    if len(domains) > MAX_DOMAINS or len(networks) > MAX_NETWORKS:
        raise _unsupported(
            f"can contain at most {MAX_DOMAINS} names or {MAX_NETWORKS} networks, not {len(domains) or len(networks)}"
        )
    return networks, domains


def _unsupported(what: str) -> UnsupportedTaskError:
    return UnsupportedTaskError(
        f"an allowlist of the Daytona service {what}. Use container=docker for this task, or run it with another "
        "network: container.network=no-network or container.network=public."
    )


def _resources(spec: ContainerSpec, options: DaytonaOptions) -> Resources | None:
    from daytona import Resources

    cpus, memory_mb, storage_mb = _asked(spec, options)
    resources = Resources(
        cpu=_up(cpus),
        memory=_up(memory_mb, _MB_PER_GIB),
        disk=_up(storage_mb, _MB_PER_GIB),
        gpu=spec.gpus or None,
    )
    return None if resources == Resources() else resources


def _asked(spec: ContainerSpec, options: DaytonaOptions) -> tuple[float | None, float | None, float | None]:
    return (
        spec.cpus if options.cpus is None else options.cpus,
        spec.memory_mb if options.memory_mb is None else options.memory_mb,
        spec.storage_mb if options.storage_mb is None else options.storage_mb,
    )


def _up(amount: float | None, unit: int = 1) -> int | None:
    return None if amount is None else max(1, math.ceil(amount / unit))


def _resource_warnings(spec: ContainerSpec, options: DaytonaOptions) -> Iterator[str]:
    cpus, memory_mb, storage_mb = _asked(spec, options)
    if options.snapshot is not None:
        asked = {"cpus": cpus, "memory_mb": memory_mb, "storage_mb": storage_mb, "gpus": spec.gpus or None}
        named = ", ".join(f"{key}={value:g}" for key, value in asked.items() if value is not None)
        if named:
            yield f"{named}: not used, because the snapshot {options.snapshot} already sets the sandbox's resources"
        return
    if cpus is not None and _up(cpus) != cpus:
        yield f"cpus={cpus:g}: container=daytona supports only whole CPUs, and uses {_up(cpus)}"
    for key, amount in (("memory_mb", memory_mb), ("storage_mb", storage_mb)):
        whole = _up(amount, _MB_PER_GIB)
        if amount is not None and whole is not None and whole * _MB_PER_GIB != amount:
            yield (
                f"{key}={amount:g}: container=daytona supports only whole GiB, and uses {whole} "
                f"({whole * _MB_PER_GIB} MB)"
            )


def _built_image(plan: ImagePlan, directory: Path) -> Image:
    """Returns the SDK's definition of the image of a plan's Dockerfile. `directory` contains the files of the image."""
    from daytona import Image

    path = directory / f".ares_exp-{secrets.token_hex(8)}"
    path.write_text(f"{plan.dockerfile}\n" if plan.layers else plan.dockerfile or "")
    try:
        image = Image.from_dockerfile(path, strict_context=True)
    finally:
        path.unlink()  # otherwise `COPY .` would copy it
    for mount in plan.layers:
        image = image.add_local_dir(mount.source, mount.target)
    return image
