"""Images of tasks, which are pulled if they are missing, or built once for equal contents of the build context.

docker-py cannot use BuildKit. So images are built with a `docker` command if one on this machine can use BuildKit,
otherwise with the engine's classic builder. A failed classic build leaves untagged images, which are the builder's
cache. They have no label, so the clean-up cannot distinguish them from other users' images. They remain until you run
`docker image prune`.

A pull or a build runs once in a thread (`share`), while several asyncio tasks wait for its result. A lock (`work_lock`)
prevents other processes of the same user from doing the same work at the same time.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import hashlib
import os
import re
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.docker.docker_cli import docker_clis, drives_buildkit, passed_on
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.docker.leftovers import image_labels
from ares_exp.containers.images.dockerfile_instructions import (
    find_syntax,
    instructions,
    names_not_ignored,
    read_text,
    split_flags,
)
from ares_exp.containers.ownership import locked
from ares_exp.containers.user_cache import announce
from ares_exp.errors import ContainerStartError, UnsupportedTaskError

if TYPE_CHECKING:
    from docker import APIClient

# Builds compete for disk and cores, so more concurrent builds do not finish earlier.
_slots = threading.BoundedSemaphore(4)
_PULL_PAUSES_SEC = (1.0, 2.0)


async def ensure_image(
    engine: Engine, *, name: str, docker_image: str | None, context_dir: Path | None, keep: bool = True
) -> str:
    """Ensures that the engine has the image of a task. Returns the name of the image.

    An image is pulled or built only once for all containers that wait for it, in this and other processes of this user.
    When the last waiting caller is cancelled, a build with BuildKit is killed. A pull or a classic build cannot be
    stopped: it continues until it is complete or this process ends. Raises `ContainerStartError` with the end of the
    output, or the reason, if the image cannot be pulled or built, and the errors of `check_buildable`.

    Args:
        engine: The engine.
        name: Name of the task, which becomes a part of a built image's name.
        docker_image: Prebuilt image, pulled only if the engine has no image with this name.
        context_dir: Build context with a `Dockerfile`, used without a `docker_image`.
        keep: Whether a built image is kept for later runs. If false, its labels name this process as the owner, so that
            it can be removed.
    """
    make: Callable[[ChildProcess], None]
    if docker_image is not None:
        image, make = docker_image, functools.partial(_pull, engine.api, docker_image)
    elif context_dir is not None:
        image = await asyncio.to_thread(image_tag, name, context_dir)
        make = functools.partial(_build, engine, image, context_dir, keep)
    else:
        raise ContainerStartError(f"Task {name} has neither a docker_image nor an environment/Dockerfile.")
    if await in_thread(lambda: inspect_image(engine.api, image), abandon=True) is None:
        await share(f"{engine.host} {image}", lambda child: _make(engine, image, make, child))
    return image


def inspect_image(api: APIClient, image: str) -> dict[str, Any] | None:
    """Returns the engine's description of an image, by name or id; `None` if the engine does not have it. Blocking."""
    from docker.errors import ImageNotFound

    try:
        found: dict[str, Any] = api.inspect_image(image)
    except ImageNotFound:
        return None
    return found


def _make(engine: Engine, image: str, make: Callable[[ChildProcess], None], child: ChildProcess) -> None:
    try:
        with work_lock(f"{engine.host} {image}", child), _slots:
            child.pause(0)
            if inspect_image(engine.api, image) is None:  # another process may have created it
                make(child)
    except engine_errors(ChildFailedError) as error:
        raise ContainerStartError(f"The image {image} could not be pulled or built: {reason(error)}.") from error


def _pull(api: APIClient, image: str, child: ChildProcess) -> None:
    """Pulls an image. Makes up to three attempts, because an unreachable registry may soon recover."""
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
        child.pause(pause)


def _build(engine: Engine, tag: str, context_dir: Path, keep: bool, child: ChildProcess) -> None:
    check_buildable(context_dir / "Dockerfile", lambda: engine)
    build_image(engine, tag, context_dir, image_labels(tag, keep=keep), child)


def image_tag(name: str, context_dir: Path) -> str:
    """Returns an image name `ares-exp/<name>:<hash>`. Equal build contexts have equal hashes. Blocking.

    The hash covers names, modes, links and bytes of files, except for files that the context's `.dockerignore`
    excludes. (BuildKit's `Dockerfile.dockerignore` is not supported.)
    """
    digest = hashlib.sha256(b"ares_exp image 2\n")
    for relative in sorted(names_not_ignored(context_dir)):
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


_AUTOMATIC = re.compile(r"(?:TARGET|BUILD)(?:PLATFORM|OS|ARCH|VARIANT)")
_LAST_LINES = 30
_MAX_LINE_CHARS = 500
_NOISE = re.compile(r"\x1b\[[0-9;]*m|^#\d+ (?:\d+\.\d+ )?")
"""Pattern for text that is removed from build output: colour codes, and BuildKit's step numbers in front of lines."""


def check_buildable(dockerfile: Path, connect: Callable[[], Engine]) -> None:
    """Rejects a Dockerfile that needs BuildKit if no `docker` command on PATH can use the engine's BuildKit. Blocking.

    `connect` returns the engine. It is called only if the file needs BuildKit. Raises `UnsupportedTaskError` with the
    line, the feature and a suggested fix, `TaskError` if the file cannot be read, and `PreflightError` if no engine
    responds.
    """
    found = find_buildkit_feature(read_text(dockerfile))
    if found is None or find_buildkit(engine := connect()) is not None:
        return
    clis = ", ".join(map(str, docker_clis())) or "there is no docker command"
    raise UnsupportedTaskError(
        f"{dockerfile}:{found[0]}: {found[1]} needs BuildKit, and no docker command on PATH can use it with the engine "
        f"at {engine.host} ({clis}). Install docker-buildx, or build the image yourself and set docker_image "
        "in the [environment] table of task.toml to its name."
    )


def find_buildkit(engine: Engine) -> Path | None:
    """Returns the first `docker` command on PATH that can use the engine's BuildKit, or `None`. Blocking."""
    return None if engine.capabilities.is_podman else next(filter(drives_buildkit, docker_clis()), None)


def find_buildkit_feature(text: str) -> tuple[int, str] | None:
    """Returns the line and the name of the first feature of a Dockerfile that needs BuildKit; `None` if there is none.

    The classic builder supports no flags of RUN, and only `--from` and `--chown` of COPY and ADD.
    """
    if (syntax := find_syntax(text)).is_foreign:
        return syntax.line, f"the frontend {syntax.frontend}"
    for name, value, line, documents in instructions(text):
        flags = split_flags(value)[0] if name in ("RUN", "COPY", "ADD") else ()
        if unknown := next((flag for flag, _ in flags if flag not in ("from", "chown")), None):
            return line, f"{name} --{unknown}"
        if documents:
            return line, "a here-document"
        # An ARG with a default also works without BuildKit.
        words = value.split() if name == "ARG" else re.findall(r"\$\{?(\w+)", value) if name == "FROM" else ()
        if automatic := next(filter(_AUTOMATIC.fullmatch, words), None):
            return line, f"the value of {automatic}"
    return None


def build_image(engine: Engine, tag: str, context_dir: Path, labels: Mapping[str, str], child: ChildProcess) -> None:
    """Builds the image of the Dockerfile in `context_dir`. Blocking.

    When `child` is stopped, kills a build with BuildKit and raises `ChildFailedError`. A classic build cannot be
    stopped. Raises `ContainerStartError` with the end of the output if the build fails.
    """
    cli = find_buildkit(engine)
    if cli is not None:
        failure, output = _build_with_buildkit(cli, engine.host, tag, context_dir, labels, child)
    else:
        failure, output = _build_classic(engine, tag, context_dir, labels)
    if failure:
        last = output[-_LAST_LINES:]
        if any("dockerfile parse error" in line for line in last):
            failure += ". If the Dockerfile needs a newer syntax than the engine's, start it with the line "
            failure += "`# syntax=docker/dockerfile:1`"
        raise ContainerStartError(
            f"The image of {context_dir} could not be built: {_plain([failure]).rstrip('.')}.\n"
            f"Last lines of the output:\n{_plain(last) or '(no output)'}"
        )


def _plain(lines: Iterable[str]) -> str:
    shown = (_NOISE.sub("", line).strip() for line in lines)
    text = "\n".join(line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}…" for line in shown if line)
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _build_with_buildkit(
    cli: Path, host: str, tag: str, context_dir: Path, labels: Mapping[str, str], child: ChildProcess
) -> tuple[str, list[str]]:
    """Runs `docker build`. Returns the reason of a failure, otherwise `""`, and the lines of the output."""
    options = [f"--tag={tag}", *(f"--label={name}={value}" for name, value in labels.items())]
    ended = child.run(
        [str(cli), "build", "--progress=plain", *options, str(context_dir.resolve())],
        env={**passed_on(), "DOCKER_HOST": host, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"},
    )
    lines = [*ended.output.decode("utf-8", "replace").splitlines(), *ended.errors]
    return f"{cli} ended with exit code {ended.exit_code}" if ended.exit_code else "", lines


def _build_classic(engine: Engine, tag: str, context_dir: Path, labels: Mapping[str, str]) -> tuple[str, list[str]]:
    failure, last = "", collections.deque[str](maxlen=_LAST_LINES)
    events = engine.api.build(
        path=str(context_dir), tag=tag, rm=True, forcerm=True, decode=True, timeout=None, labels=dict(labels)
    )
    for event in events:  # read to its end: a partly read response leaks its socket
        failure = failure or str(event.get("error", ""))
        lines = str(event.get("stream", "")).splitlines()
        last.extend(line for line in lines if not line.startswith((" --->", "Removing intermediate container")))
    return failure, list(last)


_LOOK_EVERY_SEC = 0.05


@dataclass(slots=True, eq=False)
class _Shared:
    future: Future[None] = field(default_factory=Future)
    child: ChildProcess = field(default_factory=ChildProcess)
    waiters: int = 0


_lock = threading.Lock()
_in_progress: dict[str, _Shared] = {}


async def share(key: str, work: Callable[[ChildProcess], None]) -> None:
    """Runs `work` in a thread and waits for it. If work with the same key already runs in this process, only waits.

    Callers may run on different event loops. `work` must run its programs with the given `ChildProcess`, which is
    stopped when the last caller is cancelled.
    """
    key = f"{os.getpid()} {key}"
    with _lock:
        shared = _in_progress.get(key)
        if shared is None:
            shared = _in_progress[key] = _Shared()
            shared.future.set_running_or_notify_cancel()  # a cancelled waiter does not cancel the others
            threading.Thread(target=_run, args=(key, shared, work), name=f"work {key}", daemon=True).start()
        shared.waiters += 1
    try:
        await asyncio.wrap_future(shared.future)
    finally:
        with _lock:
            shared.waiters -= 1
            abandoned = shared.waiters == 0
            if abandoned:
                _forget(key, shared)
        if abandoned:
            shared.child.stop()


def _run(key: str, shared: _Shared, work: Callable[[ChildProcess], None]) -> None:
    failure: BaseException | None = None
    try:
        work(shared.child)
    except BaseException as error:
        failure = error
    with _lock:
        _forget(key, shared)
    if failure is not None:
        shared.future.set_exception(failure)
    else:
        shared.future.set_result(None)


def _forget(key: str, shared: _Shared) -> None:
    if _in_progress.get(key) is shared:
        del _in_progress[key]


@contextlib.contextmanager
def work_lock(name: str, child: ChildProcess) -> Iterator[None]:
    """Holds the lock `name` in the `with` block, so that one process of this user does the work at a time. Blocking.

    The kernel releases the lock if its holder dies. Raises `ChildFailedError` if `child` is stopped before the lock is
    free, and `ContainerStartError` if the lock file cannot be used.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir()) / f"ares_exp-lock-{os.geteuid()}-{digest}"
    with contextlib.ExitStack() as stack:
        is_ours = False
        while not is_ours:
            try:
                descriptor = stack.enter_context(locked(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
                is_ours = os.fstat(descriptor).st_nlink > 0  # otherwise, the previous holder has removed this file
            except BlockingIOError:
                child.pause(_LOOK_EVERY_SEC)
            except OSError as error:
                raise ContainerStartError(f"The lock file {path} cannot be used: {error}. Remove it.") from error
        stack.callback(path.unlink, missing_ok=True)  # under the lock: no other process locks this file
        yield
