"""Removal of a compose project from the engine."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.container_lifetime import remove, why_it_stays
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason

if TYPE_CHECKING:
    from docker import APIClient

PROJECT = "com.docker.compose.project"
"""The label with the name of the project, on everything in it."""

APPEARS_WITHIN_SEC = 2.0
"""Time after the compose program's death in which the engine may still execute its requests."""

_POLL_SEC = 0.1


def containers_of(api: APIClient, project: str) -> list[dict[str, Any]]:
    """Lists a project's containers, stopped ones included. Blocking."""
    found: list[dict[str, Any]] = api.containers(all=True, filters={"label": f"{PROJECT}={project}"})
    return found


async def remove_project(engine: Engine, project: str, *, may_grow: bool = False) -> str:
    """Kills and removes a project's containers, then its networks and volumes. Missing ones are no error.

    Args:
        engine: The engine.
        project: The project's name.
        may_grow: Whether the compose program was killed, so that more may appear for a while.

    Returns:
        Why something of it remains; `""` when all is gone.
    """
    until = time.monotonic() + APPEARS_WITHIN_SEC
    while True:
        try:
            problems, count = await _remove_once(engine, project)
        except engine_errors() as error:
            return reason(error)
        if not may_grow or time.monotonic() > until:
            return "; ".join(problems)
        if count:
            until = time.monotonic() + APPEARS_WITHIN_SEC
        await asyncio.sleep(_POLL_SEC)


async def _remove_once(engine: Engine, project: str) -> tuple[list[str], int]:
    api, ours = engine.api, {"label": f"{PROJECT}={project}"}
    containers = await in_thread(lambda: containers_of(api, project), lane="removals")
    removals = [functools.partial(remove, engine, one["Id"]) for one in containers]
    await asyncio.gather(*(in_thread(removal, lane="removals") for removal in removals))
    networks = await in_thread(lambda: api.networks(filters=ours), lane="removals")
    volumes = await in_thread(lambda: api.volumes(filters=ours)["Volumes"] or [], lane="removals")
    calls = [functools.partial(api.remove_network, one["Id"]) for one in networks]
    calls += [functools.partial(api.remove_volume, one["Name"]) for one in volumes]
    stays = await asyncio.gather(*(in_thread(functools.partial(why_it_stays, call), lane="removals") for call in calls))
    return [why for why in stays if why], len(containers) + len(calls)
