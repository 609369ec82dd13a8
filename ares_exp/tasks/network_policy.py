"""Network policies of a task: a mode, and for `allowlist` the hosts that may be reached."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator

from ares_exp.tasks.toml_table import TomlTable

NetworkMode = Literal["public", "no-network", "allowlist"]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def normalise_host(entry: str) -> str:
    """The canonical form of one entry of `allowed_hosts`.

    Args:
        entry: A DNS name, `*.` and a DNS name, an IP address, or a network in CIDR notation without host bits.

    Raises:
        ValueError: It is none of these.
    """
    host = entry.strip().lower().rstrip(".")
    canonical = _network(host) if "/" in host else _address(host) or _dns_name(host)
    if canonical is None:
        raise ValueError(
            f"expected a host name, *.name, an IP address or a CIDR network without host bits, got {entry!r}. "
            "URLs, ports, paths and brackets do not belong here"
        )
    return canonical


def _network(text: str) -> str | None:
    prefix = text.partition("/")[2]
    try:
        return str(ipaddress.ip_network(text)) if prefix.isdecimal() and "%" not in text else None
    except ValueError:
        return None


def _address(text: str) -> str | None:
    try:
        return None if "%" in text else str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _dns_name(text: str) -> str | None:
    name = text.removeprefix("*.")
    if len(name) > 253 or (name != text and _address(name)):
        return None
    return text if all(_LABEL.fullmatch(label) for label in name.split(".")) else None


AllowedHost = Annotated[str, AfterValidator(normalise_host)]


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What may be reached: everything, nothing, or `hosts`."""

    mode: NetworkMode
    hosts: frozenset[str] = frozenset()


def check_hosts_fit(mode: NetworkMode, hosts: tuple[str, ...] | None) -> None:
    """Refuses hosts under a mode that does not read them.

    Raises:
        ValueError: `hosts` is not empty and `mode` is not `allowlist`.
    """
    if hosts and mode != "allowlist":
        raise ValueError(f'allowed_hosts needs network_mode = "allowlist", got network_mode = "{mode}"')


class PhaseTable(TomlTable):
    """A table that may override the network of one phase (`[agent]`, `[verifier]`)."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[AllowedHost, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_mode(self) -> Self:
        if self.network_mode is not None:
            check_hosts_fit(self.network_mode, self.allowed_hosts)
        elif self.allowed_hosts is not None:
            raise ValueError('allowed_hosts needs network_mode = "allowlist" beside it, got no network_mode')
        return self

    @property
    def network(self) -> NetworkPolicy | None:
        """The override, or `None` where the environment's policy stays in force."""
        return (
            None if self.network_mode is None else NetworkPolicy(self.network_mode, frozenset(self.allowed_hosts or ()))
        )
