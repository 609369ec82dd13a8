"""What is known of one sandbox, and of one snapshot."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from ares_exp.containers.terminal import Terminal
from tests.daytona.emulator.boxes import Box, Source
from tests.daytona.emulator.wire import now_text

DEFAULT_USER = "daytona"
AUTO_STOP_MIN = 15
GONE = ("destroying", "destroyed")
_DESIRED = {"stopping": "stopped", "stopped": "stopped", "destroying": "destroyed", "destroyed": "destroyed"}


@dataclass(eq=False)
class Sandbox:
    """One sandbox.

    Attributes:
        id, name, labels, state: As the API shows them.
        number: Those that were made later have a larger one.
        params: The CreateSandbox JSON as it was sent; of a fork, that of its origin.
        source: What its files come from; of a stopped one, with what it changed.
        box: What runs; `None` before and after.
        error_reason: Why `state` is `error` or `build_failed`.
        dies: Set when it ends in whatever way.
        expiry, idle: The timers that end it.
        auto_stop, auto_delete, ttl: Minutes.
        last_activity: Loop time.
        blocked, allow_list, domains: Its network.
        terminals: By name.
    """

    id: str
    name: str
    labels: dict[str, str]
    params: dict[str, Any]
    source: Source
    cpu: int
    memory: int
    disk: int
    auto_stop: int
    auto_delete: int
    ttl: int
    blocked: bool
    allow_list: str | None
    domains: str | None
    number: int = 0
    state: str = "creating"
    box: Box | None = None
    error_reason: str | None = None
    created_at: str = field(default_factory=now_text)
    last_activity_at: str = field(default_factory=now_text)
    last_activity: float = 0.0
    destroy_at: str | None = None
    expiry: asyncio.TimerHandle | None = None
    idle: asyncio.TimerHandle | None = None
    dies: asyncio.Event = field(default_factory=asyncio.Event)
    life: asyncio.Task[None] | None = None
    terminals: dict[str, Terminal] = field(default_factory=dict)

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing may be reached. No list of hosts is enforced here, so that none of them is let through."""
        return self.blocked or self.allow_list is not None or self.domains is not None

    @property
    def user(self) -> str:
        return str(self.params.get("user") or DEFAULT_USER)

    def shown(self, base: str, *, in_list: bool = False) -> dict[str, Any]:
        """What the API says of it."""
        entry = {
            "id": self.id,
            "organizationId": "org",
            "name": self.name,
            "target": "us",
            "sandboxClass": "container",
            "state": self.state,
            "desiredState": _DESIRED.get(self.state, "started"),
            "snapshot": self.params.get("snapshot"),
            "user": self.user,
            "errorReason": self.error_reason,
            "recoverable": False,
            "public": bool(self.params.get("public")),
            "networkBlockAll": self.blocked,
            "networkAllowList": self.allow_list,
            "domainAllowList": self.domains,
            "cpu": self.cpu,
            "gpu": 0,
            "memory": self.memory,
            "disk": self.disk,
            "labels": self.labels,
            "backupState": "None",
            "autoStopInterval": self.auto_stop,
            "autoArchiveInterval": 10080,
            "autoDeleteInterval": self.auto_delete,
            "autoDestroyAt": self.destroy_at,
            "createdAt": self.created_at,
            "updatedAt": self.created_at,
            "lastActivityAt": self.last_activity_at,
            "daemonVersion": "0.226.0",
            "toolboxProxyUrl": f"{base}/toolbox",
        }
        if not in_list:
            entry |= {"env": self.params.get("env") or {}, "kvm": False, "volumes": []}
        return entry


@dataclass(eq=False)
class Snapshot:
    """A named snapshot, which sandboxes can start from."""

    name: str
    source: Source
    cpu: int = 1
    memory: int = 1
    disk: int = 3
    state: str = "active"
    error_reason: str | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: str = field(default_factory=now_text)
    origin: str | None = None

    def shown(self) -> dict[str, Any]:
        """What the API says of it."""
        return {
            "id": self.id,
            "organizationId": "org",
            "general": False,
            "name": self.name,
            "imageName": None,
            "state": self.state,
            "size": 0,
            "entrypoint": None,
            "cpu": self.cpu,
            "gpu": 0,
            "mem": self.memory,
            "disk": self.disk,
            "errorReason": self.error_reason,
            "createdAt": self.created_at,
            "updatedAt": self.created_at,
            "lastUsedAt": None,
            "sourceSandboxId": self.origin,
        }


def requested(params: dict[str, Any], source: Source, base: Snapshot | None) -> Sandbox:
    """A sandbox that has not started.

    Args:
        params: What was asked for, a CreateSandbox.
        source: What its files come from.
        base: The snapshot that it starts from, which has its size; `None`: it is built.
    """
    fresh = str(uuid.uuid4())
    auto_stop, auto_delete = params.get("autoStopInterval"), params.get("autoDeleteInterval")
    return Sandbox(
        id=fresh,
        name=params.get("name") or fresh,
        labels={},
        params=params,
        source=source,
        cpu=base.cpu if base else params.get("cpu") or 1,
        memory=base.memory if base else params.get("memory") or 1,
        disk=base.disk if base else params.get("disk") or 3,
        auto_stop=AUTO_STOP_MIN if auto_stop is None else auto_stop,
        auto_delete=-1 if auto_delete is None else auto_delete,
        ttl=params.get("ttlMinutes") or 0,
        blocked=bool(params.get("networkBlockAll")),
        allow_list=params.get("networkAllowList"),
        domains=params.get("domainAllowList"),
        state="creating" if base else "pending_build",
    )
