"""The virtual clock and the seeded random generators of an agent, which return the same values again in a replay.

While agent code runs, functions in the modules `time`, `random` and `uuid` are replaced. Other threads still use the
original functions. The clock shows the time of the last result in the journal.

Some sources cannot be replaced: imported names (`from time import time`), the agent's own unseeded generators
(`random.Random()`), `datetime.now()`, `os.urandom` and `secrets`. If an agent uses such a value in a command or a
prompt, its replay fails with a `DivergenceError`.
"""

from __future__ import annotations

import operator
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

_lock = threading.RLock()
"""Lock that a thread holds while it runs agent code, because all threads share the modules with replaced functions."""

# A fork waits for the lock. Otherwise, the child could inherit a lock that stays locked, and replaced functions.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class VirtualClockAndRandom:
    """A context manager in which the current thread uses the clock and the random generators of one agent.

    Attributes:
        started_at: Start time of the agent in epoch seconds.
        now: Time on the agent's clock, in seconds since the start. The owner sets it.
    """

    __slots__ = ("_around", "_generators", "_seed", "now", "started_at")

    def __init__(self, *, seed: int, started_at: float, now: float = 0.0) -> None:
        self.started_at, self.now = started_at, now
        self._around: VirtualClockAndRandom | None = None
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Replaces the random generators by generators with a new seed."""
        self._seed = seed
        self._generators: tuple[random.Random, random.Random] | None = None  # 5 kB, unused by most agents

    @property
    def generators(self) -> tuple[random.Random, random.Random]:
        """A pair of generators: one for the functions of `random`, and one for the functions of `uuid`."""
        if self._generators is None:
            self._generators = random.Random(self._seed), random.Random(self._seed ^ 0x5EED)
        return self._generators

    def __enter__(self) -> None:
        """Replaces the functions of `time`, `random` and `uuid`, unless an outer context has replaced them."""
        _lock.acquire()
        self._around, _here.inside = _here.inside, self
        if self._around is None:
            for one in _exchanges:
                originals = one.read(one.names)
                if originals != one.originals:  # usually the same as the last time
                    one.originals, one.before = originals, dict(zip(one.ours, originals, strict=True))
                one.names.update(one.ours)

    def __exit__(self, *_: object) -> None:
        """Restores the original functions, unless an outer context still needs the replacements."""
        if self._around is None:
            for one in _exchanges:
                one.names.update(one.before)
        self._around, _here.inside = None, self._around
        _lock.release()


class _Here(threading.local):
    inside: VirtualClockAndRandom | None = None


_here = _Here()


class _Exchange:
    """The functions of one module that are replaced while agent code runs.

    `names` is the `__dict__` of the module, in which the functions are replaced. `ours` contains the replacements by
    name, and `before` the original functions by name. `read` returns the functions of a `__dict__` that have the names
    in `ours`. `originals` is the result of `read` from which `before` was made.
    """

    __slots__ = ("before", "names", "originals", "ours", "read")

    def __init__(self, names: dict[str, Any], ours: Mapping[str, Callable[..., Any]]) -> None:
        self.names = names
        self.ours = {name: self._here_only(name, function) for name, function in ours.items()}
        self.before: dict[str, Any] = {}
        self.read = operator.itemgetter(*ours)
        self.originals: tuple[Any, ...] = ()

    def _here_only(self, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls `ours` if its thread is running agent code, otherwise the original function."""

        def function(*args: Any, **kwargs: Any) -> Any:
            inside = _here.inside
            return self.before[name](*args, **kwargs) if inside is None else ours(inside, *args, **kwargs)

        return function


def _clock_functions() -> Mapping[str, Callable[..., Any]]:
    local, utc, text, shown, formatted = time.localtime, time.gmtime, time.ctime, time.asctime, time.strftime

    def epoch(there: VirtualClockAndRandom) -> float:
        return there.started_at + there.now

    def of_moment(convert: Callable[[float], Any]) -> Callable[..., Any]:
        return lambda there, moment=None: convert(epoch(there) if moment is None else moment)

    return {
        "time": epoch,
        "time_ns": lambda there: int(epoch(there) * 1e9),
        "monotonic": lambda there: there.now,
        "monotonic_ns": lambda there: int(there.now * 1e9),
        "perf_counter": lambda there: there.now,
        "perf_counter_ns": lambda there: int(there.now * 1e9),
        "localtime": of_moment(local),
        "gmtime": of_moment(utc),
        "ctime": of_moment(text),
        "asctime": lambda there, moment=None: shown(moment or local(epoch(there))),
        "strftime": lambda there, form, moment=None: formatted(form, moment or local(epoch(there))),
    }


def _draw_functions() -> Mapping[str, Callable[..., Any]]:
    """Returns replacements for the functions of `random` that use or set the module's shared generator."""

    def draw(name: str) -> Callable[..., Any]:
        return lambda there, *args, **kwargs: getattr(there.generators[0], name)(*args, **kwargs)

    shared = random.random.__self__  # type: ignore[attr-defined]
    return {name: draw(name) for name in random.__all__ if getattr(getattr(random, name), "__self__", None) is shared}


def _id_function(version: int) -> Callable[..., uuid.UUID]:
    return lambda there, *_, **__: uuid.UUID(int=there.generators[1].getrandbits(128), version=version)


_exchanges = (
    _Exchange(vars(time), _clock_functions()),
    _Exchange(vars(random), _draw_functions()),
    _Exchange(vars(uuid), {"uuid1": _id_function(1), "uuid4": _id_function(4)}),
)
