"""A pool of containers that are started before they are requested.

Most of an episode's start is the start of its container, and the next attempt needs an equal one. So the next
containers of a requested kind are started in the background, and handed out after a liveness check.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from ares_exp.cancellation import finish
from ares_exp.containers.container import (
    Container,
    ContainerSpec,
    ExecOptions,
    ExecResult,
    SnapshottableContainer,
    User,
    refuse_second_start,
)
from ares_exp.containers.door import DOOR_PORT, Door, Serve, ServingContainer
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.terminal import Terminal, TerminalContainer
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerStartError,
    DoorUnavailableError,
    SnapshotUnsupportedError,
)
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.objects import ObjectStore

MAX_WARM = 32
"""Bound on the waiting containers, all kinds together."""

_ALIVE_WITHIN_SEC = 5.0
_STOP_WITHIN_SEC = 10.0

_logger = logging.getLogger(__name__)


class WarmPool:
    """Keeps started containers of the most recently requested kinds.

    It only starts containers, runs a command in them and stops them. The waiting ones belong to the event loop that
    asked first and end with it; on other loops containers are started on request. One container is started at a time,
    and only while no request waits for one.
    """

    def __init__(
        self,
        make: Callable[[ContainerSpec], Container],
        *,
        ahead: int,
        kind_of: Callable[[ContainerSpec], Awaitable[Hashable]],
    ) -> None:
        """Starts nothing.

        Args:
            make: Makes an unstarted container.
            ahead: Number of waiting containers per kind, from 1 to `MAX_WARM`.
            kind_of: Returns equal values for two specs whose containers are interchangeable.
        """
        self.make = make
        self.kind_of = kind_of
        self._ahead = ahead
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._waiting = 0
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def container(self, spec: ContainerSpec) -> Container:
        """Returns a container whose start takes one out of the pool, or starts a new one if the pool is empty.

        A container that starts with changed files is unique: it neither comes out of the pool nor has others started.
        """
        return _PooledContainer(spec, self) if spec.changes is None else self.make(spec)

    async def take(self, kind: Hashable) -> Container | None:
        """Hands over a warm container that has just passed the liveness check, or `None`."""
        while self._is_here() and (found := self._kinds.get(kind)) is not None and found.ready:
            container = found.ready.popleft()
            self._changed.set()
            alive = False
            try:
                alive = await _is_alive(container)
            finally:
                if not alive:
                    await finish(_stop([container]))
            if alive:
                return container
            _logger.info("A container started ahead for %s is dead.", found.spec.name)
        return None

    def expect(self, kind: Hashable, spec: ContainerSpec) -> None:
        """Schedules the start of the next containers of this kind, once no request waits."""
        if self._keeper is None or self._keeper.done() or self._keeper.get_loop().is_closed():
            self._kinds, self._changed = OrderedDict(), asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(self._kinds), name="containers started ahead")
        if self._is_here():
            self._kinds.setdefault(kind, _Kind(spec))
            self._kinds.move_to_end(kind)
            self._changed.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends starting ahead during the `with` block."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._is_here():
                self._changed.set()

    async def close(self) -> None:
        """Stops the waiting containers. Idempotent, bounded; the pool can be used again."""
        if self._is_here():
            keeper, self._keeper = self._keeper, None
            assert keeper is not None
            keeper.cancel()
            await finish(asyncio.wait_for(asyncio.wait({keeper}), 2 * _STOP_WITHIN_SEC))

    @property
    def ready(self) -> int:
        """The number of waiting containers."""
        return sum(len(kind.ready) for kind in self._kinds.values())

    def _is_here(self) -> bool:
        """Returns whether the waiting containers belong to the running event loop."""
        return self._keeper is not None and self._keeper.get_loop() is asyncio.get_running_loop()

    async def _keep(self, kinds: OrderedDict[Hashable, _Kind]) -> None:
        """Owns the waiting containers: starts them, and stops them when it is cancelled."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._drop_surplus(kinds)
                while not self._waiting and (kind := self._next(kinds)) is not None:
                    await self._start(kind)
        finally:
            await finish(_stop(container for kind in kinds.values() for container in kind.ready))
            kinds.clear()

    def _next(self, kinds: OrderedDict[Hashable, _Kind]) -> _Kind | None:
        """Returns the most recently requested kind that lacks containers."""
        lacking = (kind for kind in reversed(kinds.values()) if not kind.failed and len(kind.ready) < self._ahead)
        return next(lacking, None)

    async def _start(self, kind: _Kind) -> None:
        container = self.make(kind.spec)
        try:
            await container.start()
        except Exception as error:  # any error: the next request for such a container reports it
            kind.failed = True
            _logger.warning("Stopped starting containers ahead for %s: %s", kind.spec.name, error)
        else:
            kind.ready.append(container)

    async def _drop_surplus(self, kinds: OrderedDict[Hashable, _Kind]) -> None:
        """Drops the least recently requested kinds, to keep within `MAX_WARM`."""
        while len(kinds) > MAX_WARM // self._ahead:
            _, kind = kinds.popitem(last=False)
            await finish(_stop(kind.ready))


@dataclass(slots=True)
class _Kind:
    """Interchangeable containers."""

    spec: ContainerSpec
    ready: deque[Container] = field(default_factory=deque)
    failed: bool = False


class _PooledContainer(Container):
    """A `Container` that wraps one from the pool, or a new one if the pool has none."""

    def __init__(self, spec: ContainerSpec, pool: WarmPool) -> None:
        self._spec = spec
        self._pool = pool
        self._container: Container | None = None
        self._begun = self._stopped = False

    @property
    def image(self) -> str | None:
        """As `Container.image`."""
        return self._container.image if self._container is not None else None

    async def start(self) -> None:
        """As `Container.start`."""
        refuse_second_start(begun=self._begun or self._stopped)
        self._begun = True
        with self._pool.paused():
            kind = await self._pool.kind_of(self._spec)
            warm = await self._pool.take(kind)
            self._container = container = warm or self._pool.make(self._spec)
            if self._stopped:
                await container.stop()
                raise ContainerStartError("The container was stopped while it was being started.")
            if warm is None:
                await container.start()
            self._pool.expect(kind, self._spec)

    async def exec(self, command: str, **options: Unpack[ExecOptions]) -> ExecResult:
        """As `Container.exec`."""
        return await self._started().exec(command, **options)

    async def upload(self, source: str | Path, target: str | Path) -> None:
        """As `Container.upload`."""
        await self._started().upload(source, target)

    async def download(self, source: str | Path, target: str | Path) -> None:
        """As `Container.download`."""
        await self._started().download(source, target)

    async def set_network(self, policy: NetworkPolicy) -> None:
        """As `Container.set_network`."""
        await self._started().set_network(policy)

    async def capture_changes(self, objects: ObjectStore) -> Delta:
        """As `SnapshottableContainer.capture_changes`."""
        container = self._started()
        if not isinstance(container, SnapshottableContainer):
            raise SnapshotUnsupportedError("Containers of this backend cannot be captured.")
        return await container.capture_changes(objects)

    async def open_terminal(
        self, *, columns: int, lines: int, user: User | None = None, env: Mapping[str, str] | None = None
    ) -> Terminal:
        """As `TerminalContainer.open_terminal`."""
        container = self._started()
        if not isinstance(container, TerminalContainer):
            raise ContainerError("Containers of this backend have no terminals.")
        return await container.open_terminal(columns=columns, lines=lines, user=user, env=env)

    async def open_door(self, serve: Serve, *, port: int = DOOR_PORT) -> Door:
        """As `ServingContainer.open_door`."""
        container = self._started()
        if not isinstance(container, ServingContainer):
            raise DoorUnavailableError("Doors cannot be opened in containers of this backend.")
        return await container.open_door(serve, port=port)

    async def stop(self) -> None:
        """As `Container.stop`."""
        self._stopped = True
        if self._container is not None:
            await self._container.stop()

    def _started(self) -> Container:
        if self._container is None:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return self._container


async def _is_alive(container: Container) -> bool:
    try:
        result = await container.exec("echo alive", cwd="/", timeout_sec=_ALIVE_WITHIN_SEC, shell="sh -c")
    except Exception:  # any error: a container that cannot run this is unusable
        return False
    return result.output == "alive\n"


async def _stop(containers: Iterable[Container]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_WITHIN_SEC):
            await asyncio.gather(*(container.stop() for container in containers), return_exceptions=True)
