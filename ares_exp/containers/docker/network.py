"""The network of a Docker container under each network policy.

| policy | interfaces of the container |
|---|---|
| `public` | the engine's default bridge |
| `no-network` | only its loopback |
| `allowlist` | its loopback, where programs reach the egress proxy (named by `HTTPS_PROXY` and similar variables) |

To switch the policy of a running container, its bridge is connected or disconnected, and the proxy gets the new policy.
Under an allowlist, the container is not on the bridge, so it has no DNS and no route to this machine or to other
containers. The proxy's socket is created inside the container's network, which needs root on the engine's machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.engine import Engine, address_of_engine, engine_errors, in_thread, reason
from ares_exp.containers.egress_proxy import EgressProxy
from ares_exp.containers.network_namespace import listen_inside, obstacle
from ares_exp.containers.network_policy import NO_NETWORK, IPAddress, NetworkPolicy
from ares_exp.errors import ContainerError, ContainerStartError, UnsupportedTaskError

PROXY_ADDRESS = ("127.0.0.1", 61080)
"""The proxy's address inside a container. Its port is outside the range that the kernel assigns automatically."""

HOST_GATEWAY = "host-gateway"
_NONE = "none"
_PEER_TIMEOUT_SEC = 2.0

_URL = "http://{}:{}".format(*PROXY_ADDRESS)
_VARIABLES = {
    "http_proxy": _URL,
    "https_proxy": _URL,
    "all_proxy": _URL,
    "no_proxy": "localhost,127.0.0.1,::1",  # the container's own services
}
PROXY_ENV: Mapping[str, str] = {**_VARIABLES, **{name.upper(): value for name, value in _VARIABLES.items()}}


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """The network options of a factory, which modify the policies of tasks.

    `override` replaces all policies of a task. `allowed_hosts` are added to each policy. `extra_hosts` maps names to
    addresses or `"host-gateway"`.
    """

    override: NetworkPolicy | None = None
    allowed_hosts: frozenset[str] = frozenset()
    extra_hosts: Mapping[str, str] = field(default_factory=dict)

    def in_force(self, policy: NetworkPolicy) -> NetworkPolicy:
        """Returns the policy that applies with these options if a task has the policy `policy`."""
        return (self.override or policy).with_hosts(self.allowed_hosts)


def check_network(spec: ContainerSpec, options: NetworkOptions, host: str | None) -> list[str]:
    """Checks, before the start, that the network policies of `spec` can be enforced. Returns warnings.

    Raises `UnsupportedTaskError` if a policy is an allowlist, and no egress proxy can be created.
    """
    modes = {options.in_force(policy).mode for policy in spec.networks}
    why = namespace_obstacle(host) if "allowlist" in modes else None
    if why is not None:
        raise UnsupportedTaskError(
            f"Task {spec.name} has a network with allowed_hosts. To enforce it, container=docker needs root on "
            f"the engine's own machine, and the engine's unix socket, but {why}. Run ares_exp there as root, or "
            "use container.network=no-network or container.network=public."
        )
    if "public" in modes and options.allowed_hosts:
        return ["container.allowed_hosts has no effect on a public network"]
    return []


def namespace_obstacle(host: str | None) -> str | None:
    """Returns why this process cannot create sockets in a container's network; `None` if it can. Blocking."""
    url = urlsplit(address_of_engine(host))
    if url.scheme != "unix":
        return f"DOCKER_HOST is {url.geturl()}"
    why = obstacle()
    if why is not None:
        return why
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PEER_TIMEOUT_SEC)
            probe.connect(url.path)
            peer = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError as error:
        return f"the engine does not respond ({error})"
    return None if peer[0] else "this process is in a container itself, so it cannot see the engine's processes"


class ContainerNetwork:
    """The network of one container: connects it according to the current policy, and runs its egress proxy."""

    def __init__(self, spec: ContainerSpec, options: NetworkOptions) -> None:
        self._spec = spec
        self._neighbours: Sequence[str] | None = None
        self._options = options
        self._policy: NetworkPolicy | None = options.in_force(spec.network)
        self._proxy: EgressProxy | None = None
        self._engine: Engine | None = None
        self._container = ""
        self._line = asyncio.Lock()

    def create_options(self, engine: Engine) -> dict[str, Any]:
        """Returns the network arguments of docker-py's `create_host_config`."""
        policies = [self._options.in_force(policy) for policy in self._spec.networks]
        reaches = any(policy != NO_NETWORK for policy in policies)
        is_public = self._options.in_force(self._spec.network).mode == "public"
        if engine.capabilities.is_podman:  # it cannot connect a container that was created without a network
            is_public = any(policy.mode == "public" for policy in policies)
        return {
            "network_mode": _bridge(engine) if is_public else _NONE,
            "extra_hosts": dict(self._options.extra_hosts) if reaches else None,
        }

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables that every command needs under the current policy, such as `HTTPS_PROXY`."""
        if self._policy is None or self._policy.mode != "allowlist":
            return {}
        around = ",".join((PROXY_ENV["no_proxy"], *(self._neighbours or ())))
        return {**PROXY_ENV, "no_proxy": around, "NO_PROXY": around}

    async def start(self, engine: Engine, container: str, *, neighbours: Sequence[str] | None = None) -> None:
        """Applies the first policy to a container that has just started, and starts the egress proxy if needed.

        `neighbours` are the names of the other services of a compose project. Their addresses bypass the proxy. The
        networks of a project are never switched, so the container reaches these services under every policy. `None`:
        the container is not in a project.
        """
        self._engine, self._container, self._neighbours = engine, container, neighbours
        if engine.capabilities.is_podman and self._policy is not None and self._policy.mode != "public":
            await in_thread(lambda: _move(engine, container, _NONE))
        if any(self._options.in_force(policy).mode == "allowlist" for policy in self._spec.networks):
            known_hosts = await self._known_hosts(engine)
            proxy = self._proxy = EgressProxy(self._options.in_force(self._spec.network), known_hosts=known_hosts)
            try:
                await proxy.start(await in_thread(lambda: _listener(engine, container)))
            except OSError as error:
                raise ContainerStartError(
                    f"The network of {self._spec.name} cannot be enforced, because the egress proxy cannot be "
                    f"started in the container: {reason(error)}. Run as root on the engine's machine."
                ) from error

    async def set(self, policy: NetworkPolicy) -> None:
        if policy not in self._spec.networks:
            raise ValueError(f"Expected one of the network policies in the container's spec, got {policy}.")
        wanted = self._options.in_force(policy)
        async with self._line:
            if wanted == self._policy:
                return
            assert self._engine is not None
            engine = self._engine
            network = _bridge(engine) if wanted.mode == "public" else _NONE
            self._policy = None  # unknown until the switch is done
            if self._proxy is not None:
                await self._proxy.set_policy(wanted)
            try:
                if self._neighbours is None:
                    await in_thread(lambda: _move(engine, self._container, network))
            except engine_errors() as error:
                raise ContainerError(
                    f"The network of {self._spec.name} could not be switched to {wanted.mode}: {reason(error)}."
                ) from error
            self._policy = wanted

    async def close(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()

    async def _known_hosts(self, engine: Engine) -> dict[str, IPAddress]:
        hosts = dict(self._options.extra_hosts)
        if HOST_GATEWAY in hosts.values():
            gateway = await in_thread(lambda: _gateway(engine))
            hosts = {name: gateway if address == HOST_GATEWAY else address for name, address in hosts.items()}
        return {name: ipaddress.ip_address(address) for name, address in hosts.items()}


def _bridge(engine: Engine) -> str:
    return "podman" if engine.capabilities.is_podman else "bridge"


def _gateway(engine: Engine) -> str:
    """Returns this machine's address on the default bridge: the gateway, or the first address of the subnet."""
    config = engine.api.inspect_network(_bridge(engine))["IPAM"]["Config"][0]
    return str(config.get("Gateway") or next(ipaddress.ip_network(config["Subnet"]).hosts()))


def _listener(engine: Engine, container: str) -> socket.socket:
    found = engine.api.inspect_container(container)
    return listen_inside(found["State"]["Pid"], found["Id"], PROXY_ADDRESS)


def _move(engine: Engine, container: str, network: str) -> None:
    """Makes `network` the container's only network, and disconnects all other networks. Blocking."""
    connected = set(engine.api.inspect_container(container)["NetworkSettings"]["Networks"])
    for other in connected - {network}:
        engine.api.disconnect_container_from_network(container, other)
    if network not in connected and not (network == _NONE and engine.capabilities.is_podman):  # it has no such network
        engine.api.connect_container_to_network(container, network)
