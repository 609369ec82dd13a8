"""Creation of containers: as many at a time as the engine bears, and none that nobody knows of."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

from ares_exp.containers.docker.engine import Engine, EngineError, engine_errors, reason

APPEARS_WITHIN_SEC = 5.0
"""How long a container may take to appear after the engine's answer to its creation got lost."""

_POLL_SEC = 0.05


class AnswerLostError(EngineError):
    """The engine may have created a container, or may still do so: its answer got lost."""


class Throttle:
    """So many holders at a time, in the order in which they came, on whatever event loops they run."""

    def __init__(self, slots: int) -> None:
        """All slots are free."""
        self._free = slots
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a free slot and holds it."""
        turn = Future[None]()
        with self._lock:
            self._waiting.append(turn)
        self._hand_out()
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            if not turn.cancel():  # it had its slot, also when it was cancelled just then
                with self._lock:
                    self._free += 1
            self._hand_out()

    def _hand_out(self) -> None:
        granted = []
        with self._lock:
            while self._free and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._free -= 1
                    granted.append(turn)
        for turn in granted:
            turn.set_result(None)


def starts(engine: Engine) -> Throttle:
    """The throttle of this process for creating and starting containers on an engine."""
    return _starts(os.getpid(), engine.host, engine.capabilities.simultaneous_starts)


@functools.lru_cache(maxsize=16)
def _starts(pid: int, host: str, slots: int) -> Throttle:
    return Throttle(slots)


def create(engine: Engine, name: str, config: Mapping[str, Any]) -> None:
    """Creates the container `name`, which nobody else has. Blocking.

    Where the answer gets lost it is asked for again: the engine then says that the name is taken, by ours.

    Args:
        engine: The engine.
        name: A name that is used once in the world.
        config: The body of the request; its `Labels` say whose the container is.

    Raises:
        AnswerLostError: It may be there, or may yet appear.
        EngineError, docker.errors.DockerException, requests.exceptions.RequestException: It is not there.
    """
    from docker.errors import APIError
    from requests.exceptions import RequestException

    lost: Exception | None = None
    for _ in range(2):
        try:
            engine.api.create_container_from_config(config, name)
        except APIError as error:
            if lost is None or error.status_code != 409:
                raise
            adopt(engine, name, config["Labels"])
        except (RequestException, OSError) as error:
            if lost is None and _never_sent(error):
                raise
            lost = error
            continue
        return
    assert lost is not None
    raise AnswerLostError(f"the engine's answer to the creation of the container got lost ({reason(lost)})") from lost


def adopt(engine: Engine, name: str, labels: Mapping[str, str]) -> None:
    """Waits for a container whose name is taken already, and makes sure that it is ours. Blocking.

    Raises:
        AnswerLostError: It does not appear.
        EngineError: It is somebody else's.
    """
    deadline = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < deadline:
        with contextlib.suppress(*engine_errors()):
            answer = engine.ask(f"/containers/{name}/json")
            if answer.status_code == 200:
                if labels.items() <= answer.json()["Config"]["Labels"].items():  # an image adds its own
                    return
                raise EngineError(f"the name {name} belongs to a container of somebody else", 409)
        time.sleep(_POLL_SEC)
    raise AnswerLostError(f"a container was to be created twice, and none appeared within {APPEARS_WITHIN_SEC:g} s")


def remove_when_it_appears(engine: Engine, name: str) -> None:
    """Removes a container whose creation had no answer, looking out for it for `APPEARS_WITHIN_SEC`. Blocking.

    For all that time: both requests for it may still be on their way.
    """
    deadline = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < deadline:
        with contextlib.suppress(*engine_errors()):
            engine.api.remove_container(name, force=True, v=True)
        time.sleep(_POLL_SEC)


def _never_sent(error: BaseException) -> bool:
    """Whether no connection came about at all."""
    while (cause := error.__context__) is not None:
        if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
            return True
        error = cause
    return False
