"""Recorded exchanges by their lanes: the conversations of one agent come in another order each time it is played."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ares_exp.trajectories.records import lane_of

IsSame = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""Whether a recorded request and another one are the same."""


class Asked(Protocol):
    """What is recorded of one request."""

    @property
    def request(self) -> Mapping[str, Any]:
        """The request, as `serialize_llm_request` gives it."""
        ...


T = TypeVar("T", bound=Asked)


class RecordedLanes(Generic[T]):
    """What is left of recorded exchanges. Within a lane they are used in order."""

    def __init__(self, exchanges: Iterable[T], *, used: int = 0) -> None:
        """Takes the exchanges.

        Args:
            exchanges: In the order in which they were recorded.
            used: How many of the first are used up.
        """
        self._left: dict[int, T] = {}
        self._lanes: dict[str, deque[int]] = {}
        self._names: dict[str, str] = {}
        for number, exchange in enumerate(exchanges):
            queue = self._lanes.setdefault(lane_of(exchange.request), deque())
            if number >= used:
                self._left[number] = exchange
                queue.append(number)

    def __bool__(self) -> bool:
        """Whether any is left."""
        return bool(self._left)

    def next_of(self, request: Mapping[str, Any], is_same: IsSame) -> T | None:
        """Returns the next exchange of the lane of a request; `None` where that has none left.

        A lane is known by its name, or, where there was none of that name, by its first request.
        """
        queue = self._queue(request, is_same)
        return self._left[queue[0]] if queue else None

    def use(self, request: Mapping[str, Any]) -> None:
        """Takes the next exchange of the request's lane away."""
        del self._left[self._lanes[self._names[lane_of(request)]].popleft()]

    def forget(self, request: Mapping[str, Any]) -> list[T]:
        """Takes all that is left of the request's lane away, and returns it."""
        queue = self._lanes[self._names[lane_of(request)]]
        forgotten = [self._left.pop(number) for number in queue]
        queue.clear()
        return forgotten

    def _queue(self, request: Mapping[str, Any], is_same: IsSame) -> Sequence[int]:
        lane = lane_of(request)
        if lane not in self._names:
            taken = set(self._names.values())
            others = (
                name
                for name, queue in self._lanes.items()
                if name not in taken and queue and is_same(self._left[queue[0]].request, request)
            )
            self._names[lane] = lane if lane in self._lanes else next(others, lane)
        return self._lanes.setdefault(self._names[lane], deque())
