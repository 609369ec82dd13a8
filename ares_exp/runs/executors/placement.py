"""The choice of a host for each environment. Attempts at a task share few hosts, so that few nodes need its image."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BOUND = 1.25
"""Factor by which the load of a host may exceed its share of all environments.

A host above this limit is used only if no host below the limit has room.
"""
FEWER = 8
"""Factor by which the number of environments on an attempt's host shrinks with each host that the attempt has lost."""

HostT = TypeVar("HostT")


@dataclass(eq=False, slots=True)
class Seat(Generic[HostT]):
    """A host and the environments that run on it.

    Attributes:
        node: Name of the host's node, which stores the images.
        slots: Maximum number of environments on the host.
        limits: One number for each environment on the host: the maximum number of environments, including itself, that
            may run on the host at the same time.
        kept_for: Attempt that waits for the host to have few enough environments. Until then, the host takes no other
            environments. `None` if no attempt waits for this host.
    """

    host: HostT
    node: str
    slots: int
    limits: list[int] = field(default_factory=list)
    kept_for: object | None = None

    def has_room(self, limit: int) -> bool:
        """Returns whether the host can take an environment that accepts at most `limit` environments on its host.

        The limits of the environments that already run on the host also apply.
        """
        return len(self.limits) < min([self.slots, limit, *self.limits])


class Placement(Generic[HostT]):
    """Assigns environments to slots on hosts. Hosts can be added and removed at any time.

    Attempts at a task prefer the same host, so that few nodes pull or build the image of the task. The more often an
    attempt has lost its host, the fewer environments share its next host, until it has a host to itself. A task that
    makes hosts fail therefore affects few other tasks, and can be identified.
    """

    def __init__(self) -> None:
        self._seats: list[Seat[HostT]] = []
        self._changed = asyncio.Event()
        self._gave_up: Exception | None = None

    @property
    def slots(self) -> int:
        """Number of slots on all hosts."""
        return sum(seat.slots for seat in self._seats)

    @property
    def hosts(self) -> list[HostT]:
        """All hosts."""
        return [seat.host for seat in self._seats]

    def add(self, host: HostT, node: str, slots: int) -> None:
        """Adds a host."""
        self._seats.append(Seat(host, node, slots))
        self.tell()

    def remove(self, host: HostT) -> None:
        """Removes a host, so that it gets no more environments. Environments on the host are not affected."""
        self._seats = [seat for seat in self._seats if seat.host is not host]

    @asynccontextmanager
    async def slot(self, task_name: str, *, losses: int = 0) -> AsyncIterator[HostT]:
        """Waits for a free slot on a host, and reserves this slot during the block.

        `losses` is the number of hosts that were lost while they ran an episode of this attempt.

        Raises:
            Exception: The error that was passed to `give_up`.
        """
        waiter = object()
        try:
            while (seat := self._chosen(task_name, losses, waiter)) is None:
                await self._change()
        finally:
            for kept in self._seats:
                if kept.kept_for is waiter:
                    kept.kept_for = None
        limit = beside(losses, seat.slots)
        seat.limits.append(limit)
        try:
            yield seat.host
        finally:
            seat.limits.remove(limit)
            self.tell()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` is true. Checks it whenever hosts or slots have changed."""
        while not condition():
            await self._change()

    def tell(self) -> None:
        """Wakes all waiting calls to check their conditions again. Call this when hosts or slots have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def give_up(self, error: Exception) -> None:
        """Makes all current and later calls of `slot` and `wait_for` raise `error` instead of waiting."""
        self._gave_up = error
        self.tell()

    async def _change(self) -> None:
        if self._gave_up is not None:
            raise self._gave_up
        await self._changed.wait()

    def _chosen(self, task_name: str, losses: int, waiter: object) -> Seat[HostT] | None:
        open_to_it = [seat for seat in self._seats if seat.kept_for in (None, waiter)]
        found = [seat for seat in open_to_it if seat.has_room(beside(losses, seat.slots))]
        if not found:
            if losses and open_to_it and not any(seat.kept_for == waiter for seat in self._seats):
                min(open_to_it, key=lambda seat: len(seat.limits)).kept_for = waiter
            return None
        share = BOUND * (sum(len(seat.limits) for seat in self._seats) + 1) / self.slots
        fair = [seat for seat in found if len(seat.limits) + 1 <= math.ceil(share * seat.slots)]
        if fair:
            # Rendezvous hashing: a task prefers the same node, even after other nodes have joined or left.
            return max(fair, key=lambda seat: hashlib.sha256(f"{seat.node}\0{task_name}".encode()).digest())
        return min(found, key=lambda seat: len(seat.limits) / seat.slots)


def beside(losses: int, slots: int) -> int:
    """Returns how many environments a host may have in total while it runs an attempt that has lost `losses` hosts.

    This is the number `slots`, divided by `FEWER` for every lost host, but at least 1: the attempt itself.
    """
    return max(1, slots // int(FEWER**losses))
