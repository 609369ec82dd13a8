"""The placement of environments on hosts: free slots first, then the host that has had the task's image."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

BOUND = 1.25
"""How much more than its share of the environments a host may have before another one is chosen for a task."""
FEWER = 8
"""An attempt that was lost with its host is placed beside so many times fewer others, each time that it is lost."""

HostT = TypeVar("HostT")


@dataclass(eq=False, slots=True)
class Seat(Generic[HostT]):
    """A host with slots.

    Attributes:
        host: The host.
        node: Name of its node: that is where images are.
        slots: How many environments it may have.
        limits: For each environment in it, how many may be in it with that one, itself included.
        kept_for: Number of the waiter that it is being emptied for, if any.
    """

    host: HostT
    node: str
    slots: int
    limits: list[int] = field(default_factory=list)
    kept_for: int | None = None

    def has_room(self, limit: int) -> bool:
        """Whether one more environment may come, beside which there may be `limit` - 1 others."""
        return len(self.limits) < min([self.slots, limit, *self.limits])


class Placement(Generic[HostT]):
    """Gives slots in hosts, which come and go.

    All attempts at a task go to the same host while that has not much more than its share, so that the image of a task
    is pulled or built on few nodes. The more often an attempt was lost with its host, the fewer others are placed
    beside it, in the end none: one that ends hosts is found, and takes ever fewer others with it.
    """

    def __init__(self) -> None:
        self._seats: list[Seat[HostT]] = []
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._waiters = count()
        self._gave_up: Exception | None = None

    @property
    def slots(self) -> int:
        """Number of slots in all hosts."""
        return sum(seat.slots for seat in self._seats)

    @property
    def hosts(self) -> list[HostT]:
        """The hosts."""
        return [seat.host for seat in self._seats]

    def add(self, host: HostT, node: str, slots: int) -> None:
        """Adds a host."""
        self._seats.append(Seat(host, node, slots))
        self.tell()

    def remove(self, host: HostT) -> None:
        """Takes a host out; what is placed in it stays there."""
        self._seats = [seat for seat in self._seats if seat.host is not host]

    @asynccontextmanager
    async def slot(self, task_name: str, *, losses: int = 0) -> AsyncIterator[HostT]:
        """Waits for a slot, which is held inside the block.

        Args:
            task_name: What is run.
            losses: How often it was lost with its host.

        Raises:
            Exception: What `give_up` was called with.
        """
        waiter = next(self._waiters)
        try:
            while (seat := self._chosen(task_name, losses, waiter)) is None:
                await self._change()
        finally:
            self._keep_for_nobody(waiter)
        limit = beside(losses, seat.slots)
        seat.limits.append(limit)
        try:
            yield seat.host
        finally:
            seat.limits.remove(limit)
            self.tell()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds; it is asked whenever hosts or slots have changed."""
        while not condition():
            await self._change()

    def tell(self) -> None:
        """Has all that wait look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def give_up(self, error: Exception) -> None:
        """Has all that wait for a slot, now or later, raise `error`."""
        self._gave_up = error
        self.tell()

    async def _change(self) -> None:
        if self._gave_up is not None:
            raise self._gave_up
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            await waiting
        finally:
            del self._waiting[waiting]

    def _chosen(self, task_name: str, losses: int, waiter: int) -> Seat[HostT] | None:
        open_to_it = [seat for seat in self._seats if seat.kept_for in (None, waiter)]
        found = [seat for seat in open_to_it if seat.has_room(beside(losses, seat.slots))]
        if not found:
            if losses and open_to_it and not any(seat.kept_for == waiter for seat in self._seats):
                min(open_to_it, key=lambda seat: len(seat.limits)).kept_for = waiter
            return None
        share = BOUND * (sum(len(seat.limits) for seat in self._seats) + 1) / self.slots
        fair = [seat for seat in found if len(seat.limits) + 1 <= math.ceil(share * seat.slots)]
        if fair:
            return max(fair, key=lambda seat: _affinity(task_name, seat.node))
        return min(found, key=lambda seat: len(seat.limits) / seat.slots)

    def _keep_for_nobody(self, waiter: int) -> None:
        for seat in self._seats:
            if seat.kept_for == waiter:
                seat.kept_for = None


def beside(losses: int, slots: int) -> int:
    """Returns how many environments may be in a host with one that was lost so often, itself included."""
    return max(1, slots // int(FEWER**losses))


def _affinity(task_name: str, node: str) -> bytes:
    """Returns what orders nodes for a task, the same everywhere (rendezvous hashing)."""
    return hashlib.sha256(f"{node}\0{task_name}".encode()).digest()
