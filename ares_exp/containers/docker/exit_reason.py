"""The reason of a container's end.

The engine forgets a container as soon as it has ended (`AutoRemove`), but keeps its event log for a while.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from ares_exp.containers.docker.container_lifetime import FirstProcess
from ares_exp.containers.docker.engine import INQUIRY_TIMEOUT_SEC, Engine, engine_errors, in_thread, reason

_TELLING = ("oom", "kill", "die", "destroy")
_BY_SIGNAL = 128
_POLL_SEC = 0.05
_NOTICED_WITHIN_SEC = 5.0
_DYING_SEC = 0.3
_OOM_BEFORE_DEATH_NS = 5_000_000_000  # an earlier one was of another process


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The reason of a container's end.

    Attributes:
        clause: To follow "The container ".
        is_outside: Whether nothing that ran in the container can have caused it.
    """

    clause: str
    is_outside: bool


class ExitWatch:
    """Asks for a container's exit reason as soon as it ends, as the engine soon forgets it."""

    def __init__(self, engine: Engine, container: str, first_process: FirstProcess) -> None:

        self._engine = engine
        self._container = container
        self._cause: ExitReason | None = None
        self._first_process_ended = False
        self._task = asyncio.create_task(self._watch(first_process))

    async def cause(self) -> ExitReason | None:
        """Returns why the container ended; `None` while it runs. Bounded."""
        dead = self._cause or await self._ask()
        if dead is None:  # the engine may notice an end later than we do
            await asyncio.wait({self._task}, timeout=_DYING_SEC)
        if dead is None and self._first_process_ended:  # on a busy machine, much later
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
    """Returns why a container ended; `None` while it runs. Blocking, bounded."""
    from requests.exceptions import Timeout

    try:
        answer = engine.ask(f"/containers/{container}/json")
        if answer.status_code not in (200, 404):
            return _out_of_reach(engine, f"answers {answer.status_code} ({answer.text.strip()})")
        if answer.status_code == 200 and answer.json()["State"]["Running"]:
            return None
        return _told_by(list(_events(engine, container, answer.headers["Date"])))
    except Timeout:
        return _out_of_reach(engine, f"hangs (no answer within {INQUIRY_TIMEOUT_SEC:g} s)")
    except engine_errors() as error:
        return _out_of_reach(engine, f"does not answer ({reason(error)})")


def _out_of_reach(engine: Engine, what: str) -> ExitReason:
    return ExitReason(f"is out of reach: the engine at {engine.host} {what}", is_outside=True)


def _events(engine: Engine, container: str, now: str) -> Iterator[dict[str, Any]]:
    """Yields the events of an ended container that the log still has, up to its removal.

    Args:
        engine: The engine.
        container: Its name.
        now: The engine's time, as in an answer's `Date`.
    """
    until = parsedate_to_datetime(now).timestamp() + 1
    parameters = {
        "since": "1",
        "until": f"{until:.0f}",  # else the answer would not end
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
    if death is None:
        return _inside("is gone: its first process ended, it was removed from outside, or the engine was restarted")
    exit_code = int(death["Actor"]["Attributes"]["exitCode"])
    signals = [event["Actor"]["Attributes"]["signal"] for event in events if event["Action"] == "kill"]
    if signals and signals[-1] == str(exit_code - _BY_SIGNAL):
        clause = f"was killed from outside by signal {signals[-1]} (`docker kill`, `docker rm -f` or the like)"
        return ExitReason(clause, is_outside=True)
    recent = death["timeNano"] - _OOM_BEFORE_DEATH_NS
    if exit_code == _BY_SIGNAL + 9 and any(e["Action"] == "oom" and e["timeNano"] > recent for e in events):
        return _inside("was killed for using more memory than its limit (memory_mb)")
    return _inside(f"ended with exit code {exit_code}")


def _inside(clause: str) -> ExitReason:
    """Returns a reason that a command in the container can have caused, or that cannot be told from one."""
    return ExitReason(clause, is_outside=False)
