"""The end of a compose project: everything that the engine has of it."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.life import remove, why_it_stays

if TYPE_CHECKING:
    from docker import APIClient

PROJECT = "com.docker.compose.project"
"""The label that has the name of the project on everything of it."""

APPEARS_WITHIN_SEC = 2.0
"""How long after the compose program was killed the engine may still make what that had asked for."""

_POLL_SEC = 0.1


def containers_of(api: APIClient, project: str) -> list[dict[str, Any]]:
    """What the engine lists of a project's containers, those that do not run included. Blocking."""
    found: list[dict[str, Any]] = api.containers(all=True, filters={"label": f"{PROJECT}={project}"})
    return found


async def remove_project(engine: Engine, project: str, *, may_grow: bool = False) -> str:
    """Kills and removes a project's containers, then its networks and volumes. What is gone already is fine.

    Args:
        engine: The engine.
        project: The project's name.
        may_grow: Whether the compose program was killed, so that more of it may appear for a while.

    Returns:
        What stays, and why; `""` when all is gone.
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
