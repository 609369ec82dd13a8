"""What an agent finds around it while its code runs: a clock that moves only with its journal, and seeded randomness.

Functions of `time`, `random` and `uuid` are exchanged for the moments in which agent code runs, in its thread only.
What an agent has imported by name (`from time import time`), generators of its own without a seed
(`random.Random()`), `datetime.now()`, `os.urandom` and `secrets` are out of reach: an agent that lets such a value
reach a command or a prompt diverges when it is run again, and is told so.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

_lock = threading.RLock()
"""Held while agent code runs anywhere in this process: the modules are everybody's."""

# A forked process has neither a lock whose owner is not there any more, nor somebody else's functions.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

_shared_generator = random.random.__self__  # type: ignore[attr-defined]
_DRAWS = tuple(name for name in random.__all__ if getattr(getattr(random, name), "__self__", None) is _shared_generator)
"""The functions of `random` that draw from the generator that everybody shares, or set it."""


class Surroundings:
    """A context manager: inside, this thread has the clock and the randomness of one agent."""

    def __init__(self, *, seed: int, started_at: float, now: Callable[[], float]) -> None:
        """Prepares them.

        Args:
            seed: Seed of what the agent draws.
            started_at: Epoch seconds at which the agent began.
            now: Seconds since then, as the agent is to see them.
        """
        self._generator = random.Random(seed)
        self._ids = random.Random(seed ^ 0x5EED)
        self._now, self._started_at = now, started_at
        self._thread = 0
        with _lock:
            self._exchanges = (
                self._exchange(vars(time), self._clock_functions()),
                self._exchange(vars(random), {name: getattr(self._generator, name) for name in _DRAWS}),
                self._exchange(vars(uuid), {"uuid1": self._uuid(1), "uuid4": self._uuid(4)}),
            )

    def reseed(self, seed: int) -> None:
        """From now on the agent draws other values."""
        self._generator.seed(seed)
        self._ids.seed(seed ^ 0x5EED)

    def __enter__(self) -> None:
        """Exchanges the functions."""
        _lock.acquire()
        self._thread = threading.get_ident()
        for exchange in self._exchanges:
            exchange.begin()

    def __exit__(self, *_: object) -> None:
        """Puts back what was there."""
        for exchange in self._exchanges:
            exchange.end()
        self._thread = 0
        _lock.release()

    def _exchange(self, names: dict[str, Any], ours: Mapping[str, Callable[..., Any]]) -> _Exchange:
        return _Exchange(names, {name: self._here_only(names[name], function) for name, function in ours.items()})

    def _here_only(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """What other threads find meanwhile is what was there before."""

        def function(*args: Any, **kwargs: Any) -> Any:
            return (ours if threading.get_ident() == self._thread else theirs)(*args, **kwargs)

        return function

    def _clock_functions(self) -> Mapping[str, Callable[..., Any]]:
        now, started_at = self._now, self._started_at
        local, utc, text, shown, formatted = time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime

        def or_now(seconds: float | None) -> float:
            return started_at + now() if seconds is None else seconds

        return {
            "time": lambda: started_at + now(),
            "time_ns": lambda: int((started_at + now()) * 1e9),
            "monotonic": now,
            "monotonic_ns": lambda: int(now() * 1e9),
            "perf_counter": now,
            "perf_counter_ns": lambda: int(now() * 1e9),
            "localtime": lambda seconds=None: local(or_now(seconds)),
            "gmtime": lambda seconds=None: utc(or_now(seconds)),
            "ctime": lambda seconds=None: text(or_now(seconds)),
            "asctime": lambda moment=None: shown(moment or local(or_now(None))),
            "strftime": lambda form, moment=None: formatted(form, moment or local(or_now(None))),
        }

    def _uuid(self, version: int) -> Callable[..., uuid.UUID]:
        return lambda *_, **__: uuid.UUID(int=self._ids.getrandbits(128), version=version)


class _Exchange:
    """Functions of one module that are put in the place of those that are there."""

    __slots__ = ("_before", "_names", "_ours", "_read", "_theirs")

    def __init__(self, names: dict[str, Any], ours: Mapping[str, Callable[..., Any]]) -> None:
        self._names, self._ours = names, dict(ours)
        self._read = itemgetter(*ours)
        self._theirs: tuple[Any, ...] = ()
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        theirs = self._read(self._names)
        if theirs != self._theirs:  # most often they are the same as the time before
            self._theirs, self._before = theirs, dict(zip(self._ours, theirs, strict=True))
        self._names.update(self._ours)

    def end(self) -> None:
        self._names.update(self._before)
