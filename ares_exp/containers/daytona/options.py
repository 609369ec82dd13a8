"""What is the same for every sandbox of a factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ares_exp.containers.container import Shell
from ares_exp.containers.network_policy import NetworkPolicy

CaptureWay = Literal["files", "provider"]
"""How snapshots keep a sandbox's files: what differs from its image, portable; or a snapshot that the service keeps."""


@dataclass(frozen=True, slots=True)
class DaytonaOptions:
    """See `DaytonaContainerFactory`, which explains and checks them.

    Attributes:
        snapshot: A named snapshot of the service that every sandbox starts from, whatever image the task names.
        cpus, memory_mb, storage_mb: In place of the task's own.
        ttl_min: Minutes until the service removes a sandbox that nobody keeps alive; `None`: by the task's limits.
        network: A policy for every phase, in place of the task's.
        allowed_hosts: Hosts that may be reached besides.
        env: Variables of every sandbox; the task's own win.
        shell: What reads commands.
        capture: How snapshots are kept; `None`: there will be none.
    """

    snapshot: str | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    ttl_min: int | None = None
    network: NetworkPolicy | None = None
    allowed_hosts: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    shell: Shell = "bash -lc"
    capture: CaptureWay | None = None
