"""The lifetime of a Docker container: how it is created, why it ends, and how it is removed.

The number of concurrent starts is limited. If the engine's response to a creation is lost, the container is still found
and removed. A container ends together with the process that started it. The engine removes it as soon as it has ended
(`AutoRemove`), so the reason for the end is read from the engine's event log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import (
    INQUIRY_TIMEOUT_SEC,
    Engine,
    EngineError,
    EngineStream,
    engine_errors,
    in_thread,
    reason,
)

if TYPE_CHECKING:
    from docker import APIClient

FIRST_COMMAND = ["sh", "-c", "while read -r _; do jobs; done"]
"""Command of a container's first process. It ends when our connection to its stdin closes, even after `kill -9`.

As process 1, it ignores signals from processes in the container (`kill -9 -1`, `pkill sh`). It also reaps orphaned
processes: each line on stdin runs `jobs`, which makes the shell reap them. This needs no fork, which could fail.
"""

REMOVAL_SEC = 12.0
"""Time limit for the removal of a container, which takes milliseconds, or seconds under load."""

_REAP_EVERY_SEC = 1.0
_KEPT_BYTES = 4096
_logger = logging.getLogger(__name__)
_TELLING = ("start", "oom", "kill", "die", "destroy")
_BY_SIGNAL = 128
_POLL_SEC = 0.05
_NOTICED_WITHIN_SEC = 5.0
_DYING_SEC = 0.3
_OOM_BEFORE_DEATH_NS = 5_000_000_000  # an earlier event belongs to another process


class FirstProcess:
    """A connection to a container's first process: the open stdin, and the last part of the output."""

    def __init__(self, stream: EngineStream) -> None:
        self._stream = stream
        self._output = b""
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def attach(cls, engine: Engine, container: str) -> FirstProcess:
        """Attaches to a container that has been created but not yet started, so that no output is missed."""
        connection = await engine.hijack(f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1", {})
        return cls(EngineStream(*connection, with_stderr=True))

    async def _listen(self) -> None:
        reaper = asyncio.create_task(self._reap())
        try:
            while data := await self._stream.read():
                self._output = (self._output + data)[-_KEPT_BYTES:]
        except OSError:
            pass  # like the end of the stream: the engine closed the connection
        finally:
            reaper.cancel()

    async def _reap(self) -> None:
        """Sends a line every second. The first process then reaps zombies, which other processes may wait for."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(_REAP_EVERY_SEC)
                await self._stream.write(b"\n")

    async def ended(self) -> None:
        await asyncio.wait({self._listener})

    def last_output(self) -> str:
        """Returns a sentence with the last output of the process, for an error message; `""` if it printed nothing."""
        text = self._output.decode("utf-8", "replace").strip()
        return f" Its first process (the image's ENTRYPOINT, if it has one) last printed:\n{text}" if text else ""

    def close(self) -> None:
        """Closes stdin, which ends a running container."""
        self._listener.cancel()
        self._stream.close()


def remove(engine: Engine, container: str, image: str | None = None) -> None:
    """Kills and removes a container, then `image` unless it is in use. Ignores missing resources. Blocking."""
    if problem := why_it_stays(lambda: kill_container(engine.api, container)):
        _logger.warning("The container %s could not be removed: %s.", container, problem)
    elif image is not None and (problem := why_it_stays(lambda: engine.api.remove_image(image))):
        _logger.info("The image %s was not removed: %s.", image, problem)


def kill_container(api: APIClient, container: str) -> None:
    """Kills and removes a container, with a time limit. Blocking.

    After the limit, a hanging engine may still remove it.
    """
    path = f"{api.base_url}/v{api.api_version}/containers/{container}"
    answer = api.delete(path, params={"force": "1", "v": "1"}, timeout=REMOVAL_SEC)
    if not answer.ok:
        raise EngineError(answer.text.strip(), answer.status_code)


def why_it_stays(removal: Callable[[], object]) -> str:
    """Calls `removal`. Returns why it failed, or `""` if the resource is gone or already being removed. Blocking."""
    try:
        removal()
    except engine_errors() as error:
        status = error.status if isinstance(error, EngineError) else getattr(error, "status_code", 0)
        if status != 404 and not (status == 409 and "already in progress" in str(error)):
            return reason(error)
    return ""


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The reason why a container ended, as a clause that follows "The container ".

    `is_outside` is true if the container's own processes certainly did not cause the end. `exit_code` is set if the
    first process ended by itself.
    """

    clause: str
    is_outside: bool
    exit_code: int | None = None


class ExitWatch:
    """Finds out why a container ended. It asks as soon as the container ends, because the engine soon forgets it."""

    def __init__(self, engine: Engine, container: str, first_process: FirstProcess) -> None:
        self._engine = engine
        self._container = container
        self._cause: ExitReason | None = None
        self._first_process_ended = False
        self._task = asyncio.create_task(self._watch(first_process))

    async def cause(self) -> ExitReason | None:
        """Returns the reason why the container ended; `None` while it is running. Waits for a limited time."""
        dead = self._cause or await self._ask()
        if dead is None:  # the engine may notice the end later than this process
            await asyncio.wait({self._task}, timeout=_DYING_SEC)
        if dead is None and self._first_process_ended:  # on a busy machine, the engine may notice much later
            await asyncio.wait({self._task}, timeout=_NOTICED_WITHIN_SEC)
        return dead or self._cause

    def close(self) -> None:
        self._task.cancel()

    async def _watch(self, first_process: FirstProcess) -> None:
        await first_process.ended()
        self._first_process_ended = True
        deadline = time.monotonic() + _NOTICED_WITHIN_SEC
        while (dead := await self._ask()) is None and time.monotonic() < deadline:  # noqa: ASYNC110 (polls the engine)
            await asyncio.sleep(_POLL_SEC)
        self._cause = dead

    async def _ask(self) -> ExitReason | None:
        return await in_thread(lambda: exit_reason(self._engine, self._container), abandon=True)


def exit_reason(engine: Engine, container: str) -> ExitReason | None:
    """Asks the engine why the container ended. Returns `None` while it is running. Blocks for a limited time."""
    from requests.exceptions import Timeout

    try:
        answer = engine.ask(f"/containers/{container}/json")
        if answer.status_code not in (200, 404):
            return out_of_reach(engine, f"answers {answer.status_code} ({answer.text.strip()})")
        if answer.status_code == 200 and answer.json()["State"]["Running"]:
            return None
        return _told_by(list(_events(engine, container, answer.headers["Date"])))
    except Timeout:
        return out_of_reach(engine, f"hangs (no response within {INQUIRY_TIMEOUT_SEC:g} s)")
    except engine_errors() as error:
        return out_of_reach(engine, f"does not respond ({reason(error)})")


def out_of_reach(engine: Engine, what: str) -> ExitReason:
    """Returns the exit reason for a failure of the engine. `what` is a predicate, such as "does not respond"."""
    return ExitReason(f"cannot be reached: the engine at {engine.host} {what}", is_outside=True)


def _events(engine: Engine, container: str, now: str) -> Iterator[dict[str, Any]]:
    """Yields the engine's events of an ended container, up to its removal or `now` (a response's `Date` header)."""
    until = parsedate_to_datetime(now).timestamp() + 1
    parameters = {
        "since": "1",
        "until": f"{until:.0f}",  # otherwise the response would not end
        "filters": json.dumps({"container": [container], "event": list(_TELLING)}),
    }
    with engine.ask("/events", parameters, stream=True) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = json.loads(line)
            yield event
            if event["Action"] == "destroy":
                return


def _told_by(events: list[dict[str, Any]]) -> ExitReason:
    death = next((event for event in events if event["Action"] == "die"), None)
    if death is None and not events:  # an engine forgets its log when it ends, and a death is the last event
        return ExitReason("is gone: its engine was restarted", is_outside=True)
    if death is None:
        return ExitReason("is gone: its first process ended, or it was removed from outside", is_outside=False)
    exit_code = int(death["Actor"]["Attributes"]["exitCode"])
    signals = [event["Actor"]["Attributes"]["signal"] for event in events if event["Action"] == "kill"]
    if signals and signals[-1] == str(exit_code - _BY_SIGNAL):
        clause = f"was killed from outside by signal {signals[-1]} (for example, by `docker kill` or `docker rm -f`)"
        return ExitReason(clause, is_outside=True)
    recent = death["timeNano"] - _OOM_BEFORE_DEATH_NS
    if exit_code == _BY_SIGNAL + 9 and any(e["Action"] == "oom" and e["timeNano"] > recent for e in events):
        return ExitReason("was killed for using more memory than its limit (memory_mb)", is_outside=False)
    return ExitReason(f"ended with exit code {exit_code}", is_outside=False, exit_code=exit_code)


APPEARS_WITHIN_SEC = 5.0
"""Seconds in which a container may appear after the engine's response to its creation was lost."""


_semaphores = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


def starts(engine: Engine) -> asyncio.Semaphore:
    """Returns the semaphore that limits concurrent starts of containers in this event loop."""
    return _semaphores.setdefault(
        asyncio.get_running_loop(), asyncio.Semaphore(engine.capabilities.simultaneous_starts)
    )


def create(engine: Engine, name: str, config: Mapping[str, Any]) -> None:
    """Creates a container with a unique `name`. Blocking.

    If the response is lost, sends the request again. If the engine then reports that the name is taken, the first
    request has succeeded. If it remains unknown whether the container exists, removes it and raises `EngineError`.
    """
    from docker.errors import APIError
    from requests.exceptions import RequestException

    lost: Exception | None = None
    for _ in range(2):
        try:
            engine.api.create_container_from_config(config, name)
            return
        except APIError as error:
            if lost is None or error.status_code != 409:
                raise
            if _appears(engine, name):
                return
        except (RequestException, OSError) as error:
            if lost is None and _never_sent(error):
                raise
            lost = error
    assert lost is not None
    _remove_when_it_appears(engine, name)
    raise EngineError(f"the engine's response to the creation of the container was lost ({reason(lost)})") from lost


def _appears(engine: Engine, name: str) -> bool:
    """Waits until a container exists, for at most `APPEARS_WITHIN_SEC`. Returns whether it exists."""
    deadline = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < deadline:
        with contextlib.suppress(*engine_errors()):
            if engine.ask(f"/containers/{name}/json").status_code == 200:
                return True
        time.sleep(_POLL_SEC)
    return False


def _remove_when_it_appears(engine: Engine, name: str) -> None:
    deadline = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < deadline:
        with contextlib.suppress(*engine_errors()):
            engine.api.remove_container(name, force=True, v=True)
        time.sleep(_POLL_SEC)


def _never_sent(error: BaseException) -> bool:
    while (cause := error.__context__) is not None:
        if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
            return True
        error = cause
    return False
