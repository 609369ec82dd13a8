"""The sandboxes and snapshots of the service: how they start, live and end."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from ares_exp.errors import AresExpError
from tests.daytona.emulator.boxes import Box, Boxes, Demand, Source
from tests.daytona.emulator.sandbox import GONE, Sandbox, Snapshot, requested
from tests.daytona.emulator.wire import Refusal, now_text, time_text

DEFAULT_SNAPSHOT = "daytona-small"
_UPGRADE = "To increase concurrency limits, upgrade your organization's Tier by visiting the dashboard."


class Deadlines:
    """The timers of all sandboxes.

    Attributes:
        minute: Seconds in a minute of the service; what is set from now on is counted in it.
    """

    def __init__(self, *, stop: Callable[[Sandbox], None], delete: Callable[[Sandbox], None]) -> None:
        """Args: stop, delete: What ends a sandbox."""
        self.minute = 60.0
        self._stop, self._delete = stop, delete

    def note_activity(self, sandbox: Sandbox) -> None:
        """Puts its auto-stop off."""
        sandbox.last_activity = asyncio.get_running_loop().time()
        sandbox.last_activity_at = now_text()

    def set_ttl(self, sandbox: Sandbox, minutes: int) -> None:
        """Minutes from now until it is removed, whatever its state; 0: never."""
        sandbox.ttl = minutes
        _cancel(sandbox.expiry)
        sandbox.expiry = sandbox.destroy_at = None
        if minutes > 0:
            seconds = minutes * self.minute
            sandbox.expiry = asyncio.get_running_loop().call_later(seconds, self._delete, sandbox)
            when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
            sandbox.destroy_at = time_text(when)

    def watch(self, sandbox: Sandbox) -> None:
        """Stops it when it has been idle for long enough, or looks again when it may have been."""
        self.cancel_idle(sandbox)
        if sandbox.auto_stop <= 0 or sandbox.state != "started":
            return
        loop = asyncio.get_running_loop()
        due = sandbox.last_activity + sandbox.auto_stop * self.minute
        if due <= loop.time():
            self._stop(sandbox)
        else:
            sandbox.idle = loop.call_at(due, self.watch, sandbox)

    def cancel_idle(self, sandbox: Sandbox) -> None:
        """Whatever it does or does not do from now on ends it not."""
        _cancel(sandbox.idle)
        sandbox.idle = None

    def cancel(self, sandbox: Sandbox) -> None:
        """Forgets its timers."""
        self.cancel_idle(sandbox)
        _cancel(sandbox.expiry)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Sandboxes:
    """All of them.

    Attributes:
        by_id: In the order of their creation.
        by_name: Those that are not being destroyed.
        snapshots: By name.
        deadlines: What ends them by and by.
        max_count: Quota; `None`: none.
    """

    def __init__(self, boxes: Boxes) -> None:
        self.by_id: dict[str, Sandbox] = {}
        self.by_name: dict[str, Sandbox] = {}
        self._count = 0
        self.snapshots: dict[str, Snapshot] = {}
        self.deadlines = Deadlines(stop=self.stop, delete=self.delete)
        self.max_count: int | None = None
        self._boxes = boxes
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, params: dict[str, Any]) -> Sandbox:
        """Starts to make what a CreateSandbox asks for.

        Raises:
            Refusal: As the service does.
        """
        name, build = params.get("name"), params.get("buildInfo")
        if build is not None:
            source, base = source_of(build), None
        else:
            wanted = params.get("snapshot") or DEFAULT_SNAPSHOT
            base = self.find_snapshot(wanted)
            if base is None:
                raise Refusal(400, f"Snapshot {wanted} not found. Did you add it through the Daytona Dashboard?")
            if base.state != "active":
                raise Refusal(400, f"Snapshot {wanted} is {base.state}")
            if any(params.get(key) is not None for key in ("cpu", "memory", "disk")):
                raise Refusal(400, "Cannot specify Sandbox resources when using a snapshot")
            source = base.source
        self._check_room(name)
        sandbox = requested(params, source, base)
        self._count += 1
        sandbox.number, sandbox.labels = self._count, params.get("labels") or {}
        self.by_id[sandbox.id] = self.by_name[sandbox.name] = sandbox
        self.deadlines.set_ttl(sandbox, sandbox.ttl)
        sandbox.life = self._launch(self._start(sandbox))
        return sandbox

    def find(self, id_or_name: str) -> Sandbox:
        """The sandbox of that id or name.

        Raises:
            Refusal: There is none.
        """
        found = self.by_id.get(id_or_name) or self.by_name.get(id_or_name)
        if found is None:
            raise Refusal(404, f"Sandbox with ID or name {id_or_name} not found")
        return found

    def take_snapshot(self, origin: Sandbox, name: str) -> None:
        """Starts to keep the files that `origin` has now under a name.

        Raises:
            Refusal: It does not run, or the name is taken.
        """
        box = self.running(origin, "Sandbox must be in started or stopped state to create a snapshot")
        if name in self.snapshots:
            raise Refusal(409, f'Snapshot with name "{name}" already exists for this organization')
        origin.state = "snapshotting"

        async def make() -> None:
            try:
                source = replace(origin.source, changes=await box.changes(self._boxes.objects))
                self.snapshots[name] = Snapshot(name, source, origin.cpu, origin.memory, origin.disk, origin=origin.id)
            finally:
                if origin.state == "snapshotting":
                    origin.state = "started"
                    self.deadlines.watch(origin)

        self._launch(self._guard(origin, make))

    def find_snapshot(self, id_or_name: str) -> Snapshot | None:
        by_id = (one for one in self.snapshots.values() if one.id == id_or_name)
        return self.snapshots.get(id_or_name) or next(by_id, None)

    def running(self, sandbox: Sandbox, otherwise: str) -> Box:
        """Its box.

        Raises:
            Refusal: It does not run.
        """
        if sandbox.state != "started" or sandbox.box is None:
            raise Refusal(400, otherwise)
        return sandbox.box

    def stop(self, sandbox: Sandbox) -> None:
        """Ends one that was idle for too long, which is then deleted if it asked for that."""
        if sandbox.auto_delete == 0:
            self.delete(sandbox)
        else:
            self.lose(sandbox, "stopped")

    def delete(self, sandbox: Sandbox) -> None:
        """Starts to remove one. Its name is free at once."""
        if sandbox.state in GONE:
            return
        sandbox.state = "destroying"
        sandbox.dies.set()
        self.deadlines.cancel(sandbox)
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
        """It dies by itself, at once.

        Args:
            sandbox: Which.
            state: What becomes of it. `destroyed`: it is forgotten. Else it is still shown, as `error` or `stopped`.
        """
        if state == "destroyed":
            self.by_id.pop(sandbox.id, None)
            self.delete(sandbox)
        elif sandbox.box is not None:
            self.deadlines.cancel_idle(sandbox)
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

    def _check_room(self, name: str | None) -> None:
        if self._is_closed:
            raise Refusal(503, "The service is being shut down")
        if name is not None and name in self.by_name:
            raise Refusal(409, f"Sandbox with name {name} already exists")
        if self.max_count is not None and len(self.by_name) >= self.max_count:
            raise Refusal(400, f"Total CPU limit exceeded. Maximum allowed: {self.max_count}.\n{_UPGRADE}")

    async def _start(self, sandbox: Sandbox) -> None:
        env = sandbox.params.get("env") or {}
        asked = (sandbox.params.get(key) for key in ("cpu", "memory", "disk"))
        demand = Demand(env, *asked)
        user = sandbox.params.get("user")
        try:
            sandbox.box = await self._boxes.start(sandbox.source, demand, user=user, blocked=sandbox.is_cut_off)
        except AresExpError as error:
            sandbox.error_reason = str(error)
            sandbox.state = "build_failed" if sandbox.params.get("buildInfo") else "error"
            return
        if sandbox.state not in GONE:
            sandbox.state = "started"
            self.deadlines.note_activity(sandbox)
            self.deadlines.watch(sandbox)

    async def _end(self, sandbox: Sandbox) -> None:
        """Ends what runs of it."""
        terminals, sandbox.terminals = sandbox.terminals, {}
        for terminal in terminals.values():
            await terminal.close()
        if sandbox.box is not None:
            await sandbox.box.stop()
        sandbox.box = None

    async def _guard(self, sandbox: Sandbox, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except AresExpError as error:
            if sandbox.state not in GONE:
                sandbox.state, sandbox.error_reason = "error", str(error)

    def _launch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def source_of(build: dict[str, Any]) -> Source:
    """What a CreateBuildInfo asks for.

    Raises:
        Refusal: It names files in the object storage, which this service does not have.
    """
    if build.get("contextHashes"):
        raise Refusal(400, f"Context {build['contextHashes'][0]} not found")
    return Source(build["dockerfileContent"])
