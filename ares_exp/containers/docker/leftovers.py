"""Leftovers of runs on a Docker engine: containers, networks, volumes, and images that need not be kept.

A container ends with the process that started it, because its stdin is closed (`container_lifetime`). Networks, volumes
and images remain. A container also remains if its creator died before the start, or if its first process ignores the
end of stdin. All these resources have labels that name the owner, which is the process that created them. When a
process dies, its helper process (`Reaper`) removes them. Each new run also removes leftovers of dead processes.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.containers import ownership
from ares_exp.containers.docker.container_lifetime import kill_container, why_it_stays
from ares_exp.containers.docker.docker_cli import passed_on
from ares_exp.containers.docker.engine import Engine, connect_blocking, engine_errors, reason
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
from ares_exp.errors import PreflightError

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


APPEARS_WITHIN_SEC = 3.0
"""Seconds in which resources may still appear after the process died, because the engine still handles its requests."""

_WAIT = 'read -r _ || exec "$@"'
_POLL_SEC = 0.2
_END_SEC = 10.0

_lock = threading.Lock()
_reapers: dict[tuple[int, str], Reaper] = {}


def watch_over_us(engine: Engine) -> None:
    """Starts the helper for an engine, unless it already runs. Call this before you create a resource. Blocking."""
    key = (os.getpid(), engine.host)
    with _lock:
        reaper = _reapers.get(key)
        if reaper is None or reaper.process.poll() is not None:
            _reapers[key] = Reaper(engine)


class Reaper:
    """A helper process that removes this process's resources from an engine after this process has died.

    It is needed for resources that remain when our connection closes, such as the services of a compose file and
    containers that were created but not started. The helper is a shell that waits on a pipe from this process. When
    this process dies, even by `kill -9`, the kernel closes the pipe. The shell then starts Python, which removes all
    resources whose labels name a dead owner. If the helper also dies, for example because the machine goes down, the
    next run cleans up.
    """

    def __init__(self, engine: Engine) -> None:
        env = {**passed_on(), "DOCKER_HOST": engine.host}
        env |= {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if name in os.environ}
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "sh", sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd="/",
            start_new_session=True,  # signals to our process group must not reach it
        )
        atexit.register(self.dismiss)

    def dismiss(self) -> None:
        """Ends the helper without removing anything, because this process ends normally. Idempotent."""
        stdin = self.process.stdin
        assert stdin is not None
        if os.getpid() != self._owner or stdin.closed:
            return
        try:
            stdin.write(b"\n")
            stdin.close()
        except OSError:
            pass  # it has been killed
        try:
            self.process.wait(_END_SEC)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> int:
    """Removes the resources of dead processes from the engine, until no more appear. The helper runs this function."""
    try:
        engine = connect_blocking()
    except PreflightError:
        return 1  # the engine is gone: the next run finds everything by its labels
    until = time.monotonic() + APPEARS_WITHIN_SEC
    while time.monotonic() < until:
        if remove_stale(engine):
            until = time.monotonic() + APPEARS_WITHIN_SEC
        time.sleep(_POLL_SEC)
    return 0


if __name__ == "__main__":
    sys.exit(main())
