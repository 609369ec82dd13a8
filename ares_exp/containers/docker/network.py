"""The network of a Docker container, phase by phase.

| policy | what the container has |
|---|---|
| `public` | the engine's default bridge |
| `no-network` | its loopback, nothing else |
| `allowlist` | its loopback, and on it the egress proxy of this process, which the usual variables name |

A switch connects or disconnects the bridge while the container runs, and gives the proxy its new policy. Under an
allow-list there is thus no interface to get around by, no route to this machine or to other containers, and no DNS. The
proxy's socket is made inside the container's network, which takes root on the engine's own machine.
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
"""Inside a container; above the ports that connections are given."""

HOST_GATEWAY = "host-gateway"
_BRIDGE, _NONE = "bridge", "none"
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
    """What a factory makes of the networks that tasks ask for.

    Attributes:
        override: In force instead of everything a task asks for; `None` leaves it to the task.
        allowed_hosts: Allowed on top of that.
        extra_hosts: Names with their addresses, or `"host-gateway"`.
    """

    override: NetworkPolicy | None = None
    allowed_hosts: frozenset[str] = frozenset()
    extra_hosts: Mapping[str, str] = field(default_factory=dict)

    def in_force(self, policy: NetworkPolicy) -> NetworkPolicy:
        """What `policy` of a task becomes."""
        return (self.override or policy).with_hosts(self.allowed_hosts)


def check_network(spec: ContainerSpec, options: NetworkOptions) -> list[str]:
    """Finds out before the start whether the network of `spec` can be enforced.

    Returns:
        Warnings.

    Raises:
        UnsupportedTaskError: There is an allow-list among its policies, and no egress proxy can be made.
    """
    modes = {options.in_force(policy).mode for policy in spec.networks}
    why = _proxy_obstacle() if "allowlist" in modes else None
    if why is not None:
        raise UnsupportedTaskError(
            f"Task {spec.name} asks for a network with allowed_hosts. container=docker enforces that as root on the "
            f"engine's own machine, over the engine's unix socket, but {why}. Run it there as root, or play the task "
            "under another network with container.network=no-network or container.network=public."
        )
    if "public" in modes and options.allowed_hosts:
        return ["container.allowed_hosts adds nothing to a public network"]
    return []


def _proxy_obstacle() -> str | None:
    """Why no egress proxy can be put into a container, a clause; `None` when it can."""
    url = urlsplit(address_of_engine())
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
        return f"the engine does not answer ({error})"
    return (
        None if peer[0] else "the engine's processes cannot be seen from here (this process is in a container itself)"
    )


class ContainerNetwork:
    """The network of one container."""

    def __init__(
        self, spec: ContainerSpec, options: NetworkOptions, *, neighbours: Sequence[str] | None = None
    ) -> None:
        """Touches nothing yet.

        Args:
            spec: Of the container.
            options: Of the factory.
            neighbours: Names that it reaches under every policy, over networks that are not ours to switch. `None`:
                it has no such networks.
        """
        self._spec = spec
        self._neighbours = neighbours
        self._options = options
        self._policy: NetworkPolicy | None = options.in_force(spec.network)
        self._proxy: EgressProxy | None = None
        self._engine: Engine | None = None
        self._container = ""
        self._line = asyncio.Lock()

    @property
    def create_options(self) -> dict[str, Any]:
        """Arguments of docker-py's `create_host_config`."""
        reaches = any(self._options.in_force(policy) != NO_NETWORK for policy in self._spec.networks)
        return {
            "network_mode": None if self._options.in_force(self._spec.network).mode == "public" else _NONE,
            "extra_hosts": dict(self._options.extra_hosts) if reaches else None,
        }

    @property
    def env(self) -> Mapping[str, str]:
        """Variables of every command under the policy that is in force."""
        if self._policy is None or self._policy.mode != "allowlist":
            return {}
        around = ",".join((PROXY_ENV["no_proxy"], *(self._neighbours or ())))
        return {**PROXY_ENV, "no_proxy": around, "NO_PROXY": around}

    async def start(self, engine: Engine, container: str) -> None:
        """Takes over the network of a container that has just been started.

        Raises:
            ContainerStartError: No egress proxy could be put into it.
        """
        self._engine, self._container = engine, container
        if any(self._options.in_force(policy).mode == "allowlist" for policy in self._spec.networks):
            known_hosts = await self._known_hosts(engine)
            proxy = self._proxy = EgressProxy(self._options.in_force(self._spec.network), known_hosts=known_hosts)
            try:
                await proxy.start(await in_thread(lambda: _listener(engine, container)))
            except OSError as error:
                raise ContainerStartError(
                    f"The network of {self._spec.name} cannot be enforced: no egress proxy could be put into the "
                    f"container: {reason(error)}. Run as root on the engine's own machine."
                ) from error

    async def set(self, policy: NetworkPolicy) -> None:
        """As `Container.set_network`."""
        if policy not in self._spec.networks:
            raise ValueError(f"Expected one of the policies that the container was made for, got {policy}.")
        wanted = self._options.in_force(policy)
        async with self._line:
            if wanted == self._policy:
                return
            assert self._engine is not None
            engine, network = self._engine, _BRIDGE if wanted.mode == "public" else _NONE
            self._policy = None  # until it is done
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
        """Ends the proxy. Idempotent."""
        if self._proxy is not None:
            await self._proxy.close()

    async def _known_hosts(self, engine: Engine) -> dict[str, IPAddress]:
        hosts = dict(self._options.extra_hosts)
        if HOST_GATEWAY in hosts.values():
            gateway = await in_thread(lambda: _gateway(engine))
            hosts = {name: gateway if address == HOST_GATEWAY else address for name, address in hosts.items()}
        return {name: ipaddress.ip_address(address) for name, address in hosts.items()}


def _gateway(engine: Engine) -> str:
    """This machine's address on the default bridge; the first of its subnet unless the engine says otherwise."""
    config = engine.api.inspect_network(_BRIDGE)["IPAM"]["Config"][0]
    return str(config.get("Gateway") or next(ipaddress.ip_network(config["Subnet"]).hosts()))


def _listener(engine: Engine, container: str) -> socket.socket:
    found = engine.api.inspect_container(container)
    return listen_inside(found["State"]["Pid"], found["Id"], PROXY_ADDRESS)


def _move(engine: Engine, container: str, network: str) -> None:
    """Makes `network` the only one of the container; what is no longer wanted goes first. Blocking."""
    connected = set(engine.api.inspect_container(container)["NetworkSettings"]["Networks"])
    for other in connected - {network}:
        engine.api.disconnect_container_from_network(container, other)
    if network not in connected:
        engine.api.connect_container_to_network(container, network)
