"""The sandboxes and snapshots of the service: their data, and how they start, live and end."""

import asyncio
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from ares_exp.containers.terminal import Terminal
from ares_exp.errors import AresExpError
from tests.daytona.emulator.boxes import Box, Boxes, Source
from tests.daytona.emulator.wire import Refusal, now_text

DEFAULT_SNAPSHOT = "daytona-small"
GONE = ("destroying", "destroyed")
NETWORK = ("networkBlockAll", "networkAllowList", "domainAllowList")


@dataclass(eq=False)
class Sandbox:
    """One sandbox.

    Attributes:
        id, name, labels, state: Fields as the API shows them.
        number: Those that were made later have a larger one.
        params: The CreateSandbox JSON as it was sent.
        source: What its files come from; of a stopped one, with what it changed.
        box: What runs; `None` before and after.
        error_reason: Why `state` is `error` or `build_failed`.
        dies: Set when it ends in whatever way.
        expiry: The timer that ends it.
        ttl: Minutes.
        network: Its restrictions by name, as the API names them.
        terminals: Terminals by name.
    """

    id: str
    name: str
    labels: dict[str, str]
    params: dict[str, Any]
    source: Source
    ttl: int
    network: dict[str, Any]
    number: int = 0
    state: str = "creating"
    box: Box | None = None
    error_reason: str | None = None
    created_at: str = field(default_factory=now_text)
    expiry: asyncio.TimerHandle | None = None
    dies: asyncio.Event = field(default_factory=asyncio.Event)
    life: asyncio.Task[None] | None = None
    terminals: dict[str, Terminal] = field(default_factory=dict)

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing may be reached. No list of hosts is enforced here, so that none of them is let through."""
        return any(self.network.values())

    def shown(self, base: str, *, in_list: bool = False) -> dict[str, Any]:
        """What the API says of it."""
        entry = {
            "id": self.id,
            "organizationId": "org",
            "name": self.name,
            "target": "us",
            "state": self.state,
            "user": self.params.get("user") or "daytona",
            "errorReason": self.error_reason,
            "public": False,
            "networkBlockAll": bool(self.network["networkBlockAll"]),
            **dict.fromkeys(("cpu", "gpu", "memory", "disk"), 1),
            "labels": self.labels,
            "createdAt": self.created_at,
            "toolboxProxyUrl": f"{base}/toolbox",
        }
        if not in_list:
            entry |= {"env": self.params.get("env") or {}, "kvm": False}
        return entry


@dataclass(eq=False)
class Snapshot:
    """A named snapshot, which sandboxes can start from."""

    name: str
    source: Source
    state: str = "active"
    error_reason: str | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: str = field(default_factory=now_text)

    def shown(self) -> dict[str, Any]:
        """What the API says of it."""
        return {
            "id": self.id,
            "organizationId": "org",
            "general": False,
            "name": self.name,
            "state": self.state,
            **dict.fromkeys(("size", "cpu", "gpu", "mem", "disk"), 1),
            **dict.fromkeys(("entrypoint", "lastUsedAt", "sourceSandboxId")),
            "errorReason": self.error_reason,
            "createdAt": self.created_at,
            "updatedAt": self.created_at,
        }


class Sandboxes:
    """All of them.

    Attributes:
        by_id: Sandboxes in the order of their creation.
        by_name: Those that are not being destroyed.
        snapshots: Snapshots by name.
        minute: Seconds in a minute of the service; later deadlines use it.
    """

    def __init__(self, boxes: Boxes) -> None:
        self.by_id: dict[str, Sandbox] = {}
        self.by_name: dict[str, Sandbox] = {}
        self._count = 0
        self.snapshots: dict[str, Snapshot] = {}
        self.minute = 60.0
        self._boxes = boxes
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, params: dict[str, Any]) -> Sandbox:
        """Starts to make what a CreateSandbox asks for."""
        name, build = params.get("name"), params.get("buildInfo")
        if build is not None:
            if hashes := build.get("contextHashes"):  # there is no object storage
                raise Refusal(400, f"Context {hashes[0]} not found")
            source, state = Source(build["dockerfileContent"]), "pending_build"
        else:
            wanted = params.get("snapshot") or DEFAULT_SNAPSHOT
            base = self.find_snapshot(wanted)
            if base is None:
                raise Refusal(400, f"Snapshot {wanted} not found. Did you add it through the Daytona Dashboard?")
            if base.state != "active":
                raise Refusal(400, f"Snapshot {wanted} is {base.state}")
            if any(params.get(key) is not None for key in ("cpu", "memory", "disk")):
                raise Refusal(400, "Cannot specify Sandbox resources when using a snapshot")
            source, state = base.source, "creating"
        if self._is_closed:
            raise Refusal(503, "The service is being shut down")
        if name is not None and name in self.by_name:
            raise Refusal(409, f"Sandbox with name {name} already exists")
        self._count += 1
        fresh = str(uuid.uuid4())
        sandbox = Sandbox(
            id=fresh,
            name=name or fresh,
            labels=params.get("labels") or {},
            params=params,
            source=source,
            ttl=params.get("ttlMinutes") or 0,
            network={name: params.get(name) for name in NETWORK},
            number=self._count,
            state=state,
        )
        self.by_id[sandbox.id] = self.by_name[sandbox.name] = sandbox
        self.set_ttl(sandbox, sandbox.ttl)
        sandbox.life = self._launch(self._start(sandbox))
        return sandbox

    def set_ttl(self, sandbox: Sandbox, minutes: int) -> None:
        """Minutes from now until it is removed, whatever its state; 0: never."""
        sandbox.ttl = minutes
        if sandbox.expiry is not None:
            sandbox.expiry.cancel()
        sandbox.expiry = None
        if minutes > 0:
            sandbox.expiry = asyncio.get_running_loop().call_later(minutes * self.minute, self.delete, sandbox)

    def find(self, id_or_name: str) -> Sandbox:
        """The sandbox of that id or name."""
        found = self.by_id.get(id_or_name) or self.by_name.get(id_or_name)
        if found is None:
            raise Refusal(404, f"Sandbox with ID or name {id_or_name} not found")
        return found

    def take_snapshot(self, origin: Sandbox, name: str) -> None:
        """Starts to keep the files that `origin` has now under a name."""
        box = self.running(origin, "Sandbox must be in started or stopped state to create a snapshot")
        if name in self.snapshots:
            raise Refusal(409, f'Snapshot with name "{name}" already exists for this organization')
        origin.state = "snapshotting"

        async def make() -> None:
            try:
                source = replace(origin.source, changes=await box.changes(self._boxes.objects))
                self.snapshots[name] = Snapshot(name, source)
            except AresExpError as error:
                if origin.state not in GONE:
                    origin.state, origin.error_reason = "error", str(error)
            finally:
                if origin.state == "snapshotting":
                    origin.state = "started"

        self._launch(make())

    def find_snapshot(self, id_or_name: str) -> Snapshot | None:
        by_id = (one for one in self.snapshots.values() if one.id == id_or_name)
        return self.snapshots.get(id_or_name) or next(by_id, None)

    def running(self, sandbox: Sandbox, otherwise: str) -> Box:
        """Its box, which must run."""
        if sandbox.state != "started" or sandbox.box is None:
            raise Refusal(400, otherwise)
        return sandbox.box

    def delete(self, sandbox: Sandbox) -> None:
        """Starts to remove one. Its name is free at once."""
        if sandbox.state in GONE:
            return
        sandbox.state = "destroying"
        sandbox.dies.set()
        self.set_ttl(sandbox, 0)
        if self.by_name.get(sandbox.name) is sandbox:
            del self.by_name[sandbox.name]
        before = sandbox.life

        async def make() -> None:
            if before is not None:
                before.cancel()
                await asyncio.wait({before})
            await self._end(sandbox)
            sandbox.state = "destroyed"
            self.by_id.pop(sandbox.id, None)

        sandbox.life = self._launch(make())

    def lose(self, sandbox: Sandbox, state: str = "destroyed") -> None:
        """It dies by itself, at once: `destroyed` removes it; `error` and `stopped` sandboxes are still shown."""
        if state == "destroyed":
            self.by_id.pop(sandbox.id, None)
            self.delete(sandbox)
        elif sandbox.box is not None:
            sandbox.dies.set()
            sandbox.state, sandbox.error_reason = state, "Sandbox died" if state == "error" else None
            sandbox.life = self._launch(self._end(sandbox))

    async def close(self) -> None:
        """Removes all of them, and makes no others."""
        self._is_closed = True
        for sandbox in list(self.by_id.values()):
            self.delete(sandbox)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _start(self, sandbox: Sandbox) -> None:
        try:
            sandbox.box = await self._boxes.start(sandbox.source, sandbox.params, blocked=sandbox.is_cut_off)
        except AresExpError as error:
            sandbox.error_reason = str(error)
            sandbox.state = "build_failed" if sandbox.params.get("buildInfo") else "error"
            return
        if sandbox.state not in GONE:
            sandbox.state = "started"

    async def _end(self, sandbox: Sandbox) -> None:
        terminals, sandbox.terminals = sandbox.terminals, {}
        for terminal in terminals.values():
            await terminal.close()
        if sandbox.box is not None:
            await sandbox.box.stop()
        sandbox.box = None

    def _launch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
