"""Images of tasks: pulled when missing, or built once per content of the build context."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.containers.docker.build_context import image_tag
from ares_exp.containers.docker.buildkit import build_with_buildkit, find_buildkit
from ares_exp.containers.docker.classic_build import build_classic
from ares_exp.containers.docker.dockerfile_check import check_dockerfile
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.image_lock import image_lock
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.docker.shared_work import Demand, share
from ares_exp.errors import ContainerStartError, UserError

if TYPE_CHECKING:
    from docker import APIClient

# Builds compete for the same disk and cores: more of them at once finish no earlier.
_slots = threading.BoundedSemaphore(4)
_PULL_PAUSES_SEC = (1.0, 2.0)


async def ensure_image(
    engine: Engine, *, name: str, docker_image: str | None, context_dir: Path | None, keep: bool = True
) -> str:
    """The image of a task, there when this returns.

    An image is fetched or built once however many containers wait for it, in this process and in others of this user.
    When the last waiter is cancelled, a build with BuildKit is ended; a pull and a build with the classic builder,
    which the engine does, go on for whoever comes next and end with this process.

    Args:
        engine: The engine.
        name: The task's name, for the tag of a built image.
        docker_image: A prebuilt image; pulled only if the engine has none of this name.
        context_dir: Build context with a `Dockerfile`; used when there is no `docker_image`.
        keep: Whether a built image is to outlive this process; otherwise its labels tell whose it was.

    Returns:
        The name to create containers from.

    Raises:
        ContainerStartError: With the failing instruction and the end of its output, or why the pull failed.
    """
    make: Callable[[Demand], None]
    if docker_image is not None:
        image, make = docker_image, functools.partial(_pull, engine.api, docker_image)
    elif context_dir is not None:
        image = await asyncio.to_thread(image_tag, name, context_dir)
        make = functools.partial(_build, engine, image, context_dir, keep)
    else:
        raise ContainerStartError(f"Task {name} has neither a docker_image nor an environment/Dockerfile.")
    if not await in_thread(lambda: is_there(engine.api, image), abandon=True):
        await share(f"{engine.host} {image}", lambda demand: _make(engine, image, make, demand))
    return image


def is_there(api: APIClient, image: str) -> bool:
    """Whether the engine has an image of this name. Blocking."""
    from docker.errors import ImageNotFound

    try:
        api.inspect_image(image)
    except ImageNotFound:
        return False
    return True


def _make(engine: Engine, image: str, make: Callable[[Demand], None], demand: Demand) -> None:
    try:
        with image_lock(f"{engine.host} {image}", demand), _slots:
            demand.pause(0)
            if not is_there(engine.api, image):  # another process may have been faster
                make(demand)
    except engine_errors() as error:
        raise ContainerStartError(f"Cannot get the image {image}: {reason(error)}.") from error


def _pull(api: APIClient, image: str, demand: Demand) -> None:
    """Pulls, three times if need be: a registry that cannot be reached now may be in a second."""
    from docker.errors import APIError

    for pause in (*_PULL_PAUSES_SEC, None):
        try:
            failure = _pull_once(api, image)
        except APIError as error:
            failure = reason(error)
            if error.is_client_error():  # no such image, or none that we may have
                pause = None
        if not failure:
            return
        if pause is None:
            raise ContainerStartError(f"The image {image} is not on this machine and could not be pulled: {failure}.")
        demand.pause(pause)


def _pull_once(api: APIClient, image: str) -> str:
    """What failed after the engine had found the image; empty when nothing did."""
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(image)  # the tag may be a digest
    failure = ""
    for event in api.pull(repository, tag=tag or "latest", stream=True, decode=True):
        failure = failure or str(event.get("error", ""))
    return failure


def _build(engine: Engine, tag: str, context_dir: Path, keep: bool, demand: Demand) -> None:
    labels = image_labels(tag, keep=keep)
    try:
        needs = check_dockerfile(context_dir / "Dockerfile")
        way = find_buildkit(engine, context_dir / "Dockerfile", needs) if needs.features else None
    except UserError as error:  # not checked before
        raise ContainerStartError(str(error)) from error
    if way is not None:
        build_with_buildkit(engine, way, tag, context_dir, labels, demand)
    else:
        build_classic(engine.api, tag, context_dir, labels)
