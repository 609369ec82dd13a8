"""Images of tasks: pulled if missing, or built once per content of the build context."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.images.dockerfile_instructions import ignored_patterns
from ares_exp.containers.images.image_build import build_image, check_buildable
from ares_exp.containers.images.shared_work import Demand, share, work_lock
from ares_exp.containers.user_cache import announce
from ares_exp.errors import ContainerStartError, UserError

if TYPE_CHECKING:
    from docker import APIClient

# Builds compete for disk and cores, so more concurrent builds do not finish earlier.
_slots = threading.BoundedSemaphore(4)
_PULL_PAUSES_SEC = (1.0, 2.0)


async def ensure_image(
    engine: Engine, *, name: str, docker_image: str | None, context_dir: Path | None, keep: bool = True
) -> str:
    """Ensures that the engine has the image of a task. Returns the name of the image.

    An image is pulled or built once for all waiting containers, in this process and in other processes of this user.
    When the last waiting caller is cancelled, a build with BuildKit is killed. A pull or a classic build runs in the
    engine: it continues for later callers and ends with this process. Raises `ContainerStartError` with the end of the
    output, or the reason, if the image cannot be pulled or built.

    Args:
        engine: The engine.
        name: Name of the task, for the tag of a built image.
        docker_image: Prebuilt image, pulled only if the engine has no image with this name.
        context_dir: Build context with a `Dockerfile`, used without a `docker_image`.
        keep: Whether a built image is kept for later runs. Otherwise, its labels name the owner.
    """
    make: Callable[[Demand], None]
    if docker_image is not None:
        image, make = docker_image, functools.partial(_pull, engine.api, docker_image)
    elif context_dir is not None:
        image = await asyncio.to_thread(image_tag, name, context_dir)
        make = functools.partial(_build, engine, image, context_dir, keep)
    else:
        raise ContainerStartError(f"Task {name} has neither a docker_image nor an environment/Dockerfile.")
    if await in_thread(lambda: inspect_image(engine.api, image), abandon=True) is None:
        await share(f"{engine.host} {image}", lambda demand: _make(engine, image, make, demand))
    return image


def inspect_image(api: APIClient, image: str) -> dict[str, Any] | None:
    """Returns the engine's description of an image, by name or id; `None` if the engine does not have it. Blocking."""
    from docker.errors import ImageNotFound

    try:
        found: dict[str, Any] = api.inspect_image(image)
    except ImageNotFound:
        return None
    return found


def _make(engine: Engine, image: str, make: Callable[[Demand], None], demand: Demand) -> None:
    try:
        with work_lock(f"{engine.host} {image}", demand), _slots:
            demand.pause(0)
            if inspect_image(engine.api, image) is None:  # another process may have created it
                make(demand)
    except engine_errors() as error:
        raise ContainerStartError(f"The image {image} could not be provided: {reason(error)}.") from error


def _pull(api: APIClient, image: str, demand: Demand) -> None:
    """Pulls an image in up to three attempts, because an unreachable registry may recover within a second."""
    from docker.errors import APIError
    from docker.utils import parse_repository_tag

    announce(f"Pulling the image {image}.")
    repository, tag = parse_repository_tag(image)  # the tag may be a digest
    for pause in (*_PULL_PAUSES_SEC, None):
        try:
            events = api.pull(repository, tag=tag or "latest", stream=True, decode=True)
            failures = [str(event["error"]) for event in events if event.get("error")]
        except APIError as error:
            failures = [reason(error)]
            if error.is_client_error():  # no such image, or no permission
                pause = None
        if not failures:
            return
        if pause is None:
            raise ContainerStartError(
                f"The image {image} is not on this machine and could not be pulled: {failures[0]}."
            )
        demand.pause(pause)


def _build(engine: Engine, tag: str, context_dir: Path, keep: bool, demand: Demand) -> None:
    try:
        check_buildable(context_dir / "Dockerfile", lambda: engine)
    except UserError as error:  # not checked before
        raise ContainerStartError(str(error)) from error
    build_image(engine, tag, context_dir, image_labels(tag, keep=keep), demand)


def image_tag(name: str, context_dir: Path) -> str:
    """Returns `ares-exp/<name>:<hash>`, with a hash of a build context's names, modes, links and bytes. Blocking.

    Files that the context's `.dockerignore` excludes are not hashed. (BuildKit's `Dockerfile.dockerignore` is not
    supported.)
    """
    from docker.utils.build import exclude_paths

    digest = hashlib.sha256(b"ares_exp image 2\n")
    for relative in sorted(exclude_paths(str(context_dir), ignored_patterns(context_dir) or [])):
        path = context_dir / relative
        mode = path.lstat().st_mode
        digest.update(f"{relative}\0{mode:o}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(mode):
            digest.update(os.fsencode(path.readlink()) + b"\0")
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "task"
    return f"ares-exp/{slug}:{digest.hexdigest()[:12]}"
