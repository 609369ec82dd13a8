"""Containers that are started before anybody asks for them.

Most of an episode's start is the start of its container, and the next attempt needs one just like it. So the next ones
of a kind that was asked for are started in the background, and handed out after a look whether they are alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import Container, ContainerSpec, ExecOptions, ExecResult, SnapshottableContainer
from ares_exp.containers.container_start import refuse_second_start
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.errors import ContainerDiedError, ContainerStartError, SnapshotUnsupportedError
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.objects import ObjectStore

MAX_WARM = 32
"""Bound on the containers that wait, of all kinds together."""

_ALIVE_WITHIN_SEC = 5.0
_STOP_WITHIN_SEC = 10.0

_logger = logging.getLogger(__name__)


class WarmPool:
    """Keeps containers of the kinds that were asked for last started.

    It knows of a container only that it starts, runs a command and stops. What waits in it belongs to the event loop
    that asked first and ends with it; on other loops containers are started when they are asked for. One container is
    started at a time, and only while nobody waits for one.
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
            make: Makes a container, not started yet.
            ahead: How many of a kind wait, from 1 to `MAX_WARM`.
            kind_of: Equal for two specs whose containers can take each other's place.
        """
        self.make = make
        self.kind_of = kind_of
        self._ahead = ahead
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._waiting = 0
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def container(self, spec: ContainerSpec) -> Container:
        """A container that is taken out of the pool when it is started, and else starts by itself.

        One that starts with changed files is like no other: it neither comes out of the pool nor has others started.
        """
        return _PooledContainer(spec, self) if spec.changes is None else self.make(spec)

    async def take(self, kind: Hashable) -> Container | None:
        """A warm container that has just run a command, or `None`. It is the caller's now."""
        while self._is_here() and (found := self._kinds.get(kind)) is not None and found.ready:
            box = found.ready.popleft()
            self._changed.set()
            alive = False
            try:
                alive = await _is_alive(box)
            finally:
                if not alive:
                    await finish(_stop([box]))
            if alive:
                return box
            _logger.info("A container that was started ahead for %s is dead.", found.spec.name)
        return None

    def expect(self, kind: Hashable, spec: ContainerSpec) -> None:
        """Has the next containers of this kind started, once nobody waits for one."""
        if self._keeper is None or self._keeper.done() or self._keeper.get_loop().is_closed():
            self._kinds, self._changed = OrderedDict(), asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(self._kinds), name="containers started ahead")
        if self._is_here():
            self._kinds.setdefault(kind, _Kind(spec))
            self._kinds.move_to_end(kind)
            self._changed.set()

    @contextmanager
    def somebody_waits(self) -> Iterator[None]:
        """Nothing is started ahead meanwhile."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._is_here():
                self._changed.set()

    async def close(self) -> None:
        """Stops the containers that wait. Idempotent, bounded; the pool can be used again."""
        if self._is_here():
            keeper, self._keeper = self._keeper, None
            assert keeper is not None
            keeper.cancel()
            await finish(asyncio.wait_for(asyncio.wait({keeper}), 2 * _STOP_WITHIN_SEC))

    @property
    def ready(self) -> int:
        """How many containers wait."""
        return sum(len(kind.ready) for kind in self._kinds.values())

    def _is_here(self) -> bool:
        """Whether what waits belongs to the running event loop."""
        return self._keeper is not None and self._keeper.get_loop() is asyncio.get_running_loop()

    async def _keep(self, kinds: OrderedDict[Hashable, _Kind]) -> None:
        """The owner of what waits: it starts it, and stops it when it is cancelled itself."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._drop_surplus(kinds)
                while not self._waiting and (kind := self._next(kinds)) is not None:
                    await self._start(kind)
        finally:
            await finish(_stop(box for kind in kinds.values() for box in kind.ready))
            kinds.clear()

    def _next(self, kinds: OrderedDict[Hashable, _Kind]) -> _Kind | None:
        """Of the kinds that lack containers, the one that was asked for last."""
        lacking = (kind for kind in reversed(kinds.values()) if not kind.failed and len(kind.ready) < self._ahead)
        return next(lacking, None)

    async def _start(self, kind: _Kind) -> None:
        box = self.make(kind.spec)
        try:
            await box.start()
        except Exception as error:  # whatever it is: who asks for such a container next will be told
            kind.failed = True
            _logger.warning("No more containers are started ahead for %s: %s", kind.spec.name, error)
        else:
            kind.ready.append(box)

    async def _drop_surplus(self, kinds: OrderedDict[Hashable, _Kind]) -> None:
        """Drops the kinds that were asked for longest ago, to keep within `MAX_WARM`."""
        while len(kinds) > MAX_WARM // self._ahead:
            _, kind = kinds.popitem(last=False)
            await finish(_stop(kind.ready))


@dataclass(slots=True)
class _Kind:
    """Containers that can take each other's place."""

    spec: ContainerSpec
    ready: deque[Container] = field(default_factory=deque)
    failed: bool = False


class _PooledContainer(Container):
    """A `Container` whose inside comes out of a pool, or is started when the pool has none."""

    def __init__(self, spec: ContainerSpec, pool: WarmPool) -> None:
        self._spec = spec
        self._pool = pool
        self._box: Container | None = None
        self._begun = self._stopped = False

    @property
    def image(self) -> str | None:
        """As `Container.image`."""
        return self._box.image if self._box is not None else None

    async def start(self) -> None:
        """As `Container.start`."""
        refuse_second_start(begun=self._begun or self._stopped)
        self._begun = True
        with self._pool.somebody_waits():
            kind = await self._pool.kind_of(self._spec)
            warm = await self._pool.take(kind)
            self._box = box = warm or self._pool.make(self._spec)
            if self._stopped:
                await box.stop()
                raise ContainerStartError("The container was stopped while it was being started.")
            if warm is None:
                await box.start()
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
        box = self._started()
        if not isinstance(box, SnapshottableContainer):
            raise SnapshotUnsupportedError("Containers of this backend cannot be captured.")
        return await box.capture_changes(objects)

    async def stop(self) -> None:
        """As `Container.stop`."""
        self._stopped = True
        if self._box is not None:
            await self._box.stop()

    def _started(self) -> Container:
        if self._box is None:
            raise ContainerDiedError("The container has not been started, or has been stopped.")
        return self._box


async def _is_alive(box: Container) -> bool:
    try:
        result = await box.exec("echo alive", cwd="/", timeout_sec=_ALIVE_WITHIN_SEC, shell="sh -c")
    except Exception:  # whatever it is: a container that does not run this is of no use
        return False
    return result.output == "alive\n"


async def _stop(boxes: Iterable[Container]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_WITHIN_SEC):
            await asyncio.gather(*(box.stop() for box in boxes), return_exceptions=True)
