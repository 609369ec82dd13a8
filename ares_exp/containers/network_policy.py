"""Network policies of containers: a mode, and for the mode `allowlist`, the hosts that a container may reach."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

NetworkMode = Literal["public", "no-network", "allowlist"]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_NAME = 253


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """The hosts that a container may reach in addition to itself: all, none, or the hosts in a list.

    Attributes:
        mode: `"public"`, `"no-network"` or `"allowlist"`.
        allowed_hosts: Entries as accepted by `normalise_host`, stored in canonical form; only for `"allowlist"`. If
            empty, no host may be reached.

    Raises:
        ValueError: The mode is unknown, an entry is malformed, or a mode other than `"allowlist"` has hosts.
    """

    mode: NetworkMode
    allowed_hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.mode not in get_args(NetworkMode):
            raise ValueError(f"Expected one of {', '.join(get_args(NetworkMode))} as network mode, got {self.mode!r}.")
        if self.allowed_hosts and self.mode != "allowlist":
            raise ValueError(f'allowed_hosts needs network_mode = "allowlist", got network_mode = "{self.mode}"')
        object.__setattr__(self, "allowed_hosts", frozenset(normalise_host(entry) for entry in self.allowed_hosts))

    def with_hosts(self, entries: Iterable[str]) -> NetworkPolicy:
        """Returns this policy with more allowed hosts. `no-network` becomes `allowlist`, and `public` is unchanged."""
        more = frozenset(entries)
        return self if self.mode == "public" or not more else NetworkPolicy("allowlist", self.allowed_hosts | more)

    def allows_name(self, name: str) -> bool:
        """Returns whether a canonical DNS name may be reached. `*.a.b` matches all names below `a.b`, but not `a.b`."""
        above = name.split(".")[1:]
        wildcards = ("*." + ".".join(above[start:]) for start in range(len(above)))
        return self.mode == "public" or not self.allowed_hosts.isdisjoint((name, *wildcards))

    def allows_address(self, address: IPAddress) -> bool:
        """Returns whether an IP address may be reached. An allowlist may contain the address or a network around it."""
        entries = (entry for entry in self.allowed_hosts if _ip(entry))
        return self.mode == "public" or any(address in ipaddress.ip_network(entry) for entry in entries)


PUBLIC = NetworkPolicy("public")
NO_NETWORK = NetworkPolicy("no-network")


def normalise_host(entry: str) -> str:
    """Returns the canonical form of one entry of `allowed_hosts`.

    `entry` is a DNS name, a DNS name prefixed with `*.`, an IP address, or a network in CIDR notation without host
    bits, such as `10.0.0.0/8`. Raises `ValueError` if it has none of these forms.
    """
    host = entry.strip().lower().rstrip(".")
    canonical = _ip(host) or _dns_name(host)
    if canonical is None:
        raise ValueError(
            f"expected a host name, *.name, an IP address or a CIDR network without host bits, got {entry!r}. "
            "Remove URL schemes, ports, paths and brackets"
        )
    return canonical


def _ip(text: str) -> str | None:
    """Returns the canonical form of an IP address or a network in CIDR notation; `None` for any other text."""
    _, slash, prefix = text.partition("/")
    if "%" in text or (slash and not prefix.isdecimal()):
        return None
    try:
        return str(ipaddress.ip_network(text) if slash else ipaddress.ip_address(text))
    except ValueError:
        return None


def _dns_name(text: str) -> str | None:
    name = text.removeprefix("*.")
    fits = len(name) <= _MAX_NAME and not (name != text and _ip(name))
    return text if fits and all(_LABEL.fullmatch(label) for label in name.split(".")) else None
