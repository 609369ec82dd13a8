"""Leftovers of runs on a Docker engine: containers, networks, volumes, and images that need not be kept.

A container ends when the process that started it ends, because its stdin is closed (`container_lifetime`). Networks,
volumes and images remain. A container also remains if its creator died before the start, or if its first process does
not end when stdin is closed. All these resources have labels that name the owner.
The `reaper` of a dead process removes its leftovers. Each run also removes leftovers of dead processes when it starts.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.containers import ownership
from ares_exp.containers.docker.container_lifetime import why_it_stays
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
"""Label of volumes with directories for containers of several runs. The value is the volume's mount point."""
_logger = logging.getLogger(__name__)


def image_labels(tag: str, *, keep: bool) -> dict[str, str]:
    """Returns the labels of an image that we build. With `keep=False`, they name the process that owns the image.

    Containers and other images that are created from an image inherit its labels. So images have a separate label for
    the owner. An image counts as ours only if its label contains the image's own name.
    """
    return {_IMAGE: tag} | ({} if keep else {_BUILDER: json.dumps(owner_labels())})


def remove_stale(engine: Engine) -> int:
    """Removes leftovers of dead runs from the engine and this machine. Returns their number. Blocking; never raises."""
    try:
        return ownership.remove_stale([*find_short_lived(), *find(engine.api)])
    except engine_errors() as error:
        _logger.warning("Leftovers of dead runs on the engine cannot be listed: %s.", reason(error))
        return 0


def find(api: APIClient, *, cached_images: bool = False) -> Iterator[Leftover]:
    """Yields all resources of runs on the engine, including active runs, in order of removal. Blocking.

    With `cached_images`, images and volumes kept for the next run also count as stale.
    """
    ours = {"label": RUN}
    kill = functools.partial(api.remove_container, force=True, v=True)
    for found in api.containers(all=True, filters=ours):
        name = (found["Names"] or [""])[0].lstrip("/")  # a container being removed may have no name
        if name.startswith(NAME_PREFIX):
            yield _leftover("container", name, found, _remove(kill, found["Id"]))
    for found in api.networks(filters=ours):
        yield _leftover("network", found["Name"], found, _remove(api.remove_network, found["Id"]))
    for found in api.volumes(filters=ours)["Volumes"] or []:
        yield _leftover("volume", found["Name"], found, _remove(api.remove_volume, found["Name"]))
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
