"""Creates containers, a bounded number at once. None leaks if the engine's reply is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Mapping
from typing import Any

from ares_exp.containers.docker.engine import Engine, EngineError, engine_errors, reason

APPEARS_WITHIN_SEC = 5.0
"""Bound on a container's appearance after the engine's answer to its creation got lost."""

_POLL_SEC = 0.05


class AnswerLostError(EngineError):
    """The engine's answer to a creation got lost: the container may exist or may still appear."""


_semaphores = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


def starts(engine: Engine) -> asyncio.Semaphore:
    """Returns the semaphore of this event loop for creating and starting containers: more at once are not faster."""
    return _semaphores.setdefault(
        asyncio.get_running_loop(), asyncio.Semaphore(engine.capabilities.simultaneous_starts)
    )


def create(engine: Engine, name: str, config: Mapping[str, Any]) -> None:
    """Creates the container with the unique `name`. Blocking.

    If the answer gets lost, the request is repeated: the engine then answers that the name is taken, by our container.

    Args:
        engine: The engine.
        name: A globally unique name.
        config: The body of the request; its `Labels` identify the owner.

    Raises:
        AnswerLostError: The container may exist, or may still appear.
        EngineError, docker.errors.DockerException, requests.exceptions.RequestException: It does not exist.
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
    """Waits for the container of a taken name, and checks that it is ours. Blocking.

    Raises:
        AnswerLostError: It does not appear.
        EngineError: It has another owner.
    """
    deadline = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < deadline:
        with contextlib.suppress(*engine_errors()):
            answer = engine.ask(f"/containers/{name}/json")
            if answer.status_code == 200:
                if labels.items() <= answer.json()["Config"]["Labels"].items():  # an image adds labels
                    return
                raise EngineError(f"the name {name} belongs to a container of another owner", 409)
        time.sleep(_POLL_SEC)
    raise AnswerLostError(
        f"two requests to create a container had no answer, and none appeared within {APPEARS_WITHIN_SEC:g} s"
    )


def remove_when_it_appears(engine: Engine, name: str) -> None:
    """Removes a container whose creation had no answer, polling for it for `APPEARS_WITHIN_SEC`. Blocking.

    It polls for all that time, as both requests may still be in transit.
    """
    deadline = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < deadline:
        with contextlib.suppress(*engine_errors()):
            engine.api.remove_container(name, force=True, v=True)
        time.sleep(_POLL_SEC)


def _never_sent(error: BaseException) -> bool:
    """Returns whether no connection could be made at all."""
    while (cause := error.__context__) is not None:
        if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
            return True
        error = cause
    return False
