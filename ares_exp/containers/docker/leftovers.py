"""Leftovers of runs on a Docker engine: containers, networks, volumes, and images that need not be kept.

A container ends with the process that started it, because its stdin is closed (`container_lifetime`). Networks, volumes
and images remain. A container also remains if its creator died before the start, or if its first process ignores the
end of stdin. All these resources have labels that name the owner, which is the process that created them. When a
process dies, its helper process (`reaper`) removes them. Each new run also removes leftovers of dead processes.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.containers import ownership
from ares_exp.containers.docker.container_lifetime import kill_container, why_it_stays
from ares_exp.containers.docker.engine import Engine, engine_errors, reason
from ares_exp.containers.ownership import (
    NAME_PREFIX,
    RUN,
    Leftover,
    created_sec,
    describe,
    find_short_lived,
    is_dead,
    owner_labels,
)

if TYPE_CHECKING:
    from docker import APIClient

_IMAGE = "ares_exp.image"
_BUILDER = "ares_exp.image-builder"
KEPT_VOLUME = "ares_exp.mount"
"""Label of volumes with mounted directories, which are kept for later runs. Its value is the mount point."""
_logger = logging.getLogger(__name__)


def image_labels(tag: str, *, keep: bool) -> dict[str, str]:
    """Returns the labels for an image that we build. If `keep` is false, they name this process as the owner.

    Containers and images inherit the labels of their base image. So the owner of an image has a different label than
    the owner of a container. The image's own name is also a label, by which an inherited label is recognised.
    """
    return {_IMAGE: tag} | ({} if keep else {_BUILDER: json.dumps(owner_labels())})


def remove_stale(engine: Engine) -> int:
    """Removes leftovers of dead runs from the engine and this machine. Returns their number. Blocking, never raises."""
    try:
        return ownership.remove_stale([*find_short_lived(), *find(engine.api)])
    except engine_errors() as error:
        _logger.warning("Leftovers of dead runs on the engine cannot be listed: %s.", reason(error))
        return 0


def find(api: APIClient, *, cached_images: bool = False) -> Iterator[Leftover]:
    """Yields the engine's resources of all runs, including active runs, in the order in which to remove them. Blocking.

    With `cached_images`, the images and volumes that are kept for later runs are also stale.
    """
    yield from find_labelled(api, RUN)
    for found in (api.volumes(filters={"label": KEPT_VOLUME})["Volumes"] or []) if cached_images else []:
        name, created = found["Name"], created_sec(found.get("CreatedAt"))
        remove = _remove(api.remove_volume, name)
        yield Leftover("volume", name, "no run (kept for the next run)", True, created, remove)
    for found in api.images(filters={"label": _IMAGE}):
        labels = found["Labels"]
        tag, builder = labels[_IMAGE], _builder(labels)
        if tag in (found["RepoTags"] or []) and (builder or cached_images):
            yield Leftover(
                kind="image",
                name=tag,
                whose=describe(builder) if builder else "no run (kept for the next run)",
                is_stale=is_dead(builder) if builder else True,
                created=created_sec(found["Created"]),
                remove=_remove(api.remove_image, tag),
                size=found["Size"],
            )


def find_labelled(api: APIClient, label: str) -> Iterator[Leftover]:
    """Yields the containers, networks and volumes of runs that have a label (`name` or `name=value`). Blocking."""
    ours = {"label": label}
    kill = functools.partial(kill_container, api)
    for found in api.containers(all=True, filters=ours):
        name = (found["Names"] or [""])[0].lstrip("/")  # a container being removed may have no name
        if name.startswith(NAME_PREFIX):
            yield _leftover("container", name, found, _remove(kill, found["Id"]))
    for found in api.networks(filters=ours):
        yield _leftover("network", found["Name"], found, _remove(api.remove_network, found["Id"]))
    for found in api.volumes(filters=ours)["Volumes"] or []:
        yield _leftover("volume", found["Name"], found, _remove(api.remove_volume, found["Name"]))


def _leftover(kind: str, name: str, found: Mapping[str, Any], remove: Callable[[], str]) -> Leftover:
    labels = found["Labels"]
    created = created_sec(found.get("Created") or found.get("CreatedAt"))
    return Leftover(kind, name, describe(labels), is_dead(labels), created, remove)


def _builder(labels: Mapping[str, str]) -> dict[str, str]:
    try:
        found = json.loads(labels.get(_BUILDER, "{}"))
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _remove(call: Callable[[str], object], name: str) -> Callable[[], str]:
    return lambda: why_it_stays(lambda: call(name))
