"""Readiness of the services of a compose project, as reported by the engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.compose.project_file import MAIN
from ares_exp.containers.docker.compose.removal import containers_of
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread
from ares_exp.errors import ContainerStartError

if TYPE_CHECKING:
    from docker import APIClient

SERVICE = "com.docker.compose.service"
"""The label with the name of a container's service."""

_POLL_SEC = 0.1
_LAST_LINES = 20
_LAST_BYTES = 4096


async def wait_until_ready(engine: Engine, project: str) -> None:
    """Waits until `is_ready`. The caller bounds it.

    Raises:
        ContainerStartError: As `is_ready`.
    """
    while not await is_ready(engine, project):  # noqa: ASYNC110 (polls the engine)
        await asyncio.sleep(_POLL_SEC)


async def not_ready_yet(engine: Engine, project: str) -> list[str]:
    """Returns the services that do not run, or fail their health check."""
    try:
        found = await in_thread(lambda: _states(engine.api, project), lane="removals")
    except engine_errors():  # called after another failure
        return []
    return sorted(str(one["Config"]["Labels"].get(SERVICE)) for one in found if not _runs(one))


async def is_ready(engine: Engine, project: str) -> bool:
    """Returns whether each service runs and passes its health check. Services beside `main` may have ended well, too.

    Raises:
        ContainerStartError: One has failed or is unhealthy; with its name, and the end of its output.
    """
    found = await in_thread(lambda: _states(engine.api, project), abandon=True)
    for one in found:
        if why := _failure(one):
            printed = await in_thread(functools.partial(_log, engine.api, one["Id"]), abandon=True)
            name = one["Config"]["Labels"].get(SERVICE)
            raise ContainerStartError(f"Service {name} {why}." + (f" It last printed:\n{printed}" if printed else ""))
    return bool(found) and all(_runs(one) for one in found)


def _states(api: APIClient, project: str) -> list[Mapping[str, Any]]:
    return [api.inspect_container(one["Id"]) for one in containers_of(api, project)]


def _runs(one: Mapping[str, Any]) -> bool:
    state = one["State"]
    if state["Status"] == "exited":
        return True  # with code 0, else `_failure` reports it
    return state["Status"] == "running" and _health(state) in ("", "none", "healthy")


def _health(state: Mapping[str, Any]) -> str:
    return str((state.get("Health") or {}).get("Status", ""))


def _failure(one: Mapping[str, Any]) -> str:
    """Returns why a service has failed, as a clause; empty when it is, or may become, ready."""
    state, is_main = one["State"], one["Config"]["Labels"].get(SERVICE) == MAIN
    if state["Status"] in ("exited", "dead") and (state["ExitCode"] != 0 or is_main):
        return f"ended with exit code {state['ExitCode']}"
    if state["Status"] == "created" and state.get("Error"):
        return f"could not be started: {state['Error']}"
    if _health(state) == "unhealthy":
        checks = state["Health"].get("Log") or [{}]
        return f"is not healthy; its health check last said: {str(checks[-1].get('Output', '')).strip()[-500:]!r}"
    return ""


def _log(api: APIClient, container: str) -> str:
    try:
        return str(api.logs(container, tail=_LAST_LINES)[-_LAST_BYTES:].decode("utf-8", "replace")).strip()
    except engine_errors():  # a log driver without storage
        return ""
