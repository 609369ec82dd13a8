"""What runs left on a Docker engine: containers, networks, volumes, and images that were not to be kept.

The dead-man's switch (`life`) removes what has started. Left are a container whose maker died before it started it, or
whose image runs something that does not end with its stdin; networks; images. All have labels that tell whose they are.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import Engine, engine_errors, reason
from ares_exp.containers.docker.image_lock import lock_directory
from ares_exp.containers.docker.life import NAME_PREFIX, why_it_stays
from ares_exp.containers.leftover import Leftover
from ares_exp.containers.owned_directory import find_short_lived
from ares_exp.containers.ownership import RUN, describe, is_dead, owner_labels

if TYPE_CHECKING:
    from docker import APIClient

SWEEP_SEC = 20.0
"""Bound on cleaning up at the start of a run. What is left then is for the next one."""

_IMAGE = "ares_exp.image"
_BUILDER = "ares_exp.image-builder"
_logger = logging.getLogger(__name__)


def image_labels(tag: str, *, keep: bool) -> dict[str, str]:
    """Labels of an image that we build; its owner is named only when it is to go with the run.

    Containers and images made from an image inherit its labels. Hence the owner has a label of his own, and an image
    is ours only under the name that it was built for.
    """
    return {_IMAGE: tag} | ({} if keep else {_BUILDER: json.dumps(owner_labels())})


def remove_stale(engine: Engine) -> None:
    """Removes what dead runs left on the engine, within `SWEEP_SEC`. Blocking; never raises."""
    deadline = time.monotonic() + SWEEP_SEC
    try:
        stale = [leftover for leftover in (*find_short_lived(), *find(engine.api)) if leftover.is_stale]
    except engine_errors() as error:
        _logger.warning("What dead runs may have left on the engine could not be listed: %s.", reason(error))
        return
    for count, leftover in enumerate(stale):
        if time.monotonic() > deadline:
            _logger.warning("%d things of dead runs are still on the engine: too many at once.", len(stale) - count)
            return
        _log(leftover, leftover.remove())


def _log(leftover: Leftover, problem: str) -> None:
    what = (leftover.kind, leftover.name, leftover.whose)
    if not problem:
        _logger.info("Removed the %s %s of %s, which is dead.", *what)
    elif leftover.kind == "image":
        _logger.info("The %s %s of %s, which is dead, stays: %s.", *what, problem)
    else:
        _logger.warning("The %s %s of %s, which is dead, could not be removed: %s.", *what, problem)


def find(api: APIClient, *, cached_images: bool = False) -> Iterator[Leftover]:
    """All that runs made on the engine, the living included, in the order in which it can be removed. Blocking.

    Args:
        api: The engine; one call for each kind.
        cached_images: Whether images that are kept for the next run count as stale too.

    Raises:
        docker.errors.DockerException, requests.exceptions.RequestException: The engine refused or is gone.
    """
    ours = {"label": RUN}
    for found in api.containers(all=True, filters=ours):
        name = (found["Names"] or [""])[0].lstrip("/")  # one that is being removed may have none any more
        if name.startswith(NAME_PREFIX):
            yield _leftover("container", name, found, _remove_container(api, found["Id"]))
    for found in api.networks(filters=ours):
        yield _leftover("network", found["Name"], found, _remove(api.remove_network, found["Id"]))
    for found in api.volumes(filters=ours)["Volumes"] or []:
        yield _leftover("volume", found["Name"], found, _remove(api.remove_volume, found["Name"]))
    for found in api.images(filters={"label": _IMAGE}):
        labels = found["Labels"]
        tag, builder = labels[_IMAGE], _builder(labels)
        if tag in (found["RepoTags"] or []) and (builder or cached_images):
            yield Leftover(
                kind="image",
                name=tag,
                whose=describe(builder) if builder else "no run: kept for the next",
                is_stale=is_dead(builder) if builder else True,
                created=_seconds(found["Created"]),
                remove=_remove(api.remove_image, tag),
            )


def find_locks() -> Iterator[Leftover]:
    """The files of this user's image locks on this machine. One that nobody holds is of a dead builder."""
    directory = lock_directory()
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
            return
        paths = sorted(directory.iterdir())
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError):
            yield Leftover(
                kind="build lock",
                name=str(path),
                whose="a builder of images",
                is_stale=_is_free(path),
                created=path.stat().st_mtime,
                remove=functools.partial(_remove_lock, path),
            )


def _remove_lock(path: Path) -> str:
    return "" if _is_free(path, remove=True) or not path.exists() else "a builder holds it"


def _is_free(path: Path, *, remove: bool = False) -> bool:
    """Whether nobody holds the lock; removes its file then, while nobody else can, if asked to."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove and os.fstat(descriptor).st_nlink:  # else the path is somebody else's new file by now
            path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _leftover(kind: str, name: str, found: Mapping[str, Any], remove: Callable[[], str]) -> Leftover:
    labels = found["Labels"]
    created = _seconds(found.get("Created") or found.get("CreatedAt"))
    return Leftover(kind, name, describe(labels), is_dead(labels), created, remove)


def _builder(labels: Mapping[str, str]) -> dict[str, str]:
    """The owner of an image; empty when it has none."""
    try:
        found = json.loads(labels.get(_BUILDER, "{}"))
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _seconds(created: object) -> float | None:
    """The engine gives seconds for some kinds, and a date for others."""
    if isinstance(created, int):
        return float(created)
    try:
        return datetime.datetime.fromisoformat(str(created)).timestamp()
    except (ValueError, OverflowError):
        return None


def _remove(call: Callable[[str], object], name: str) -> Callable[[], str]:
    return lambda: why_it_stays(lambda: call(name))


def _remove_container(api: APIClient, container: str) -> Callable[[], str]:
    return lambda: why_it_stays(lambda: api.remove_container(container, force=True, v=True))
