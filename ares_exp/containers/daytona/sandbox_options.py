"""The options of a Daytona factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ares_exp.containers.container import Shell
from ares_exp.containers.network_policy import NetworkPolicy

CaptureWay = Literal["files", "provider"]
"""Ways to capture a sandbox: changed files, portable; or a snapshot kept by the service."""


@dataclass(frozen=True, slots=True)
class DaytonaOptions:
    """The options shared by all sandboxes of a `DaytonaContainerFactory`, which documents and checks them.

    Attributes:
        snapshot: A named snapshot of the service that every sandbox starts from, in place of the task's image.
        cpus, memory_mb, storage_mb: In place of the task's.
        ttl_min: Minutes until the service removes a sandbox that is not kept alive; `None`: by the task's limits.
        network: A policy for every phase, in place of the task's.
        allowed_hosts: Additional allowed hosts.
        env: Variables of every sandbox; the task's win.
        shell: The default shell of commands.
        capture: The way to capture; `None`: no captures.
        forwarded_port_lease_sec: Seconds without a word of this process after which a forwarded port closes.
    """

    snapshot: str | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    ttl_min: int | None = None
    network: NetworkPolicy | None = None
    allowed_hosts: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    shell: Shell = "bash -c"
    capture: CaptureWay | None = None
    forwarded_port_lease_sec: int = 2
