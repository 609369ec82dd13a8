"""Images of tasks: pulled when missing, or built once per content of the build context."""

from __future__ import annotations

import asyncio
import collections
import functools
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.engine import engine_errors, reason
from ares_exp.errors import ContainerStartError

if TYPE_CHECKING:
    from docker import APIClient

_LAST_LINES = 20
# Builds compete for the same disk and cores: more of them at once finish no earlier.
_slots = threading.BoundedSemaphore(4)


async def ensure_image(api: APIClient, *, name: str, docker_image: str | None, context_dir: Path | None) -> str:
    """The image of a task, there when this returns.

    An image is fetched or built once however many containers wait for it. When the wait is cancelled the engine's work
    goes on for whoever comes next; a process that ends takes it along.

    Args:
        api: The engine.
        name: The task's name, for the tag of a built image.
        docker_image: A prebuilt image; pulled only if the engine has none of this name.
        context_dir: Build context with a `Dockerfile`; used when there is no `docker_image`.

    Returns:
        The name to create containers from.

    Raises:
        ContainerStartError: With the failing instruction and the end of its output, or why the pull failed.
    """
    if docker_image is not None:
        tag, make = docker_image, functools.partial(_pull, api, docker_image)
    elif context_dir is not None:
        tag = await asyncio.to_thread(image_tag, name, context_dir)
        make = functools.partial(_build, api, tag, context_dir)
    else:
        raise ContainerStartError(f"Task {name} has neither a docker_image nor an environment/Dockerfile.")
    await asyncio.wrap_future(_once(f"{os.getpid()} {tag}", lambda: _unless_there(api, tag, make)))
    return tag


def image_tag(name: str, context_dir: Path) -> str:
    """`ares-exp/<name>:<hash>` for the content of a build context: names, modes, links and bytes. Blocking."""
    digest = hashlib.sha256(b"ares_exp image 1\n")
    for path in sorted(context_dir.rglob("*")):
        mode = path.lstat().st_mode
        digest.update(f"{path.relative_to(context_dir)}\0{mode:o}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(mode):
            digest.update(os.fsencode(path.readlink()))
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "task"
    return f"ares-exp/{slug}:{digest.hexdigest()[:12]}"


_lock = threading.Lock()
_under_way: dict[str, Future[None]] = {}


def _once(key: str, work: Callable[[], None]) -> Future[None]:
    """Runs `work` in a thread unless the same is under way already. The thread never keeps the process alive."""
    with _lock:
        if key in _under_way:
            return _under_way[key]
        future = _under_way[key] = Future[None]()
        future.set_running_or_notify_cancel()  # from now on a waiter that is cancelled does not cancel the others

    def run() -> None:
        try:
            with _slots:
                work()
        except BaseException as error:
            _end(key)
            future.set_exception(error)
        else:
            _end(key)
            future.set_result(None)

    threading.Thread(target=run, name=f"image {key}", daemon=True).start()
    return future


def _end(key: str) -> None:
    with _lock:
        del _under_way[key]


def _unless_there(api: APIClient, tag: str, make: Callable[[], None]) -> None:
    from docker.errors import ImageNotFound

    try:
        try:
            api.inspect_image(tag)
        except ImageNotFound:
            make()
    except engine_errors() as error:
        raise ContainerStartError(f"Cannot get the image {tag}: {reason(error)}.") from error


def _pull(api: APIClient, image: str) -> None:
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(image)
    failure = ""
    for event in api.pull(repository, tag=tag or "latest", stream=True, decode=True):
        failure = failure or event.get("error", "")
    if failure:
        raise ContainerStartError(f"The image {image} is not on this machine and could not be pulled: {failure}.")


def _build(api: APIClient, tag: str, context_dir: Path) -> None:
    events = api.build(
        path=str(context_dir), tag=tag, rm=True, forcerm=True, decode=True, timeout=None, labels={"ares_exp.image": tag}
    )
    instruction, failure, last = "", "", collections.deque[str](maxlen=_LAST_LINES)
    for line, error in _lines(events):  # to its end: an answer dropped in the middle leaks its socket
        failure = failure or error
        if re.match(r"Step \d+/\d+ : ", line):
            instruction = line.partition(" : ")[2]
            last.clear()
        elif line.strip() and not line.startswith((" --->", "Removing intermediate container")):
            last.append(line)
    if failure:
        output = "\n".join(last) or "(no output)"
        raise ContainerStartError(
            f"The image of {context_dir} could not be built: {failure.strip().rstrip('.')}.\n"
            f"Failing instruction: {instruction or '(none)'}\nLast lines of its output:\n{output}"
        )


def _lines(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(line of output, error) of a build, one of them empty."""
    for event in events:
        if "error" in event:
            yield "", str(event["error"])
        for line in str(event.get("stream", "")).splitlines():
            yield line, ""
