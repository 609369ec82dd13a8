"""Creation and removal of sandboxes. Even if a response is lost, no sandbox is created twice or forgotten.

If a response is lost, this module looks for the sandbox by its unique name, which the service accepts only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
from typing import TYPE_CHECKING

from ares_exp.backoff import backoff_sec
from ares_exp.cancellation import cancel_all, finish
from ares_exp.containers.container import bounded_start
from ares_exp.containers.daytona import failures
from ares_exp.containers.daytona.service import DaytonaService, has_ended, state_of
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerNotFoundError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
    ContainerStartError,
)

if TYPE_CHECKING:
    from daytona import (
        AsyncDaytona,
        AsyncSandbox,
        CreateSandboxFromImageParams,
        CreateSandboxFromSnapshotParams,
    )

APPEARS_WITHIN_SEC = 5.0
"""Seconds to wait until a sandbox appears, after the response to its creation was lost."""

REMOVAL_SEC = 60.0
"""Time limit for removing a sandbox, with retries during its creation. If it expires, only the TTL removes it."""

_TRIES = 6  # attempts at a creation, while failed attempts leave no sandbox
_LOOK_SEC = 15.0
_PAUSE_SEC = 0.3
_LATE_START_SEC = 60.0
_rng = random.Random()
_logger = logging.getLogger(__name__)


async def create_sandbox(
    service: DaytonaService,
    params: CreateSandboxFromSnapshotParams | CreateSandboxFromImageParams,
    *,
    name: str,
    timeout_sec: float,
) -> AsyncSandbox:
    """Creates a sandbox and waits until it is running. Its TTL (time to live) starts at that moment.

    After an error or cancellation, the sandbox is removed. The removal may take `REMOVAL_SEC` longer than
    `timeout_sec`.

    Raises:
        EnvironmentStartTimeoutError: The creation took longer than `timeout_sec`.
        ContainerStartError: The image cannot be built, or the sandbox does not start.
        ContainerServiceError: The service rejected the request. The error's class identifies the cause.
    """
    params = params.model_copy(update={"name": name})
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    remedy = "The first start with a large image takes longer. To double the limit, set `timeouts.build_multiplier=2`."
    async with bounded_start(f"The sandbox {name}", timeout_sec, stop=lambda: _undo(service, name), remedy=remedy):
        sandbox = await _create_or_adopt(service, params, name, timeout_sec)
        ttl_min = params.ttl_minutes or 0
        if ttl_min and loop.time() - asked_at > _LATE_START_SEC:  # includes the build of its image
            await service.call(f"The sandbox {name}", lambda _: sandbox.set_ttl(ttl_min))
    if service.creating.pop(name, None) is None:  # its removal was requested in the meantime
        await finish(_delete(service, sandbox))
        raise ContainerDiedError(f"The sandbox {name} was removed while it was being created.")
    return sandbox


async def delete_sandbox(service: DaytonaService, name: str) -> None:
    """Removes a sandbox, even if it is still being created. Does nothing if the sandbox does not exist."""
    loop = asyncio.get_running_loop()
    creation = service.creating.pop(name, None)
    deadline = loop.time() + APPEARS_WITHIN_SEC
    try:
        for tries in itertools.count(1):
            sandbox = await _find(service, name)
            if sandbox is not None:
                await _delete(service, sandbox)
                return
            if creation is None or not _may_appear(creation) or loop.time() > deadline:
                return
            pause = backoff_sec(tries, base_sec=_PAUSE_SEC, max_sec=2.0, rng=_rng)
            await (asyncio.sleep(pause) if creation.done() else asyncio.wait({creation}, timeout=pause))
    finally:
        if creation is not None:
            await cancel_all(creation)


async def _create_or_adopt(
    service: DaytonaService,
    params: CreateSandboxFromSnapshotParams | CreateSandboxFromImageParams,
    name: str,
    timeout_sec: float,
) -> AsyncSandbox:
    """Creates a sandbox, and returns it when it is running. If the response is lost, finds the sandbox by its name.

    The caller must limit the total time, because `timeout_sec` limits only the retries of one request.
    """
    what = f"The sandbox {name}"

    async def create(client: AsyncDaytona) -> AsyncSandbox:
        # A separate task, because the service may still act on an abandoned request. Its response is then needed.
        creation = service.creating[name] = asyncio.ensure_future(client.create(params, timeout=0))
        creation.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieves the exception
        await asyncio.wait({creation})
        if creation.cancelled():
            raise ContainerDiedError(f"The sandbox {name} was removed while it was being created.")
        return creation.result()

    for tries in itertools.count(1):
        try:
            return await service.call(what, create, timeout_sec=timeout_sec, repeatable=False)
        except ContainerError as error:
            sandbox = await _find(service, name)
            if sandbox is not None:
                return await _wait_until_started(service, sandbox)
            is_conflict = isinstance(error, ContainerServiceError) and error.status == 409  # with a deleted sandbox
            if tries == _TRIES or not (is_conflict or isinstance(error, ContainerServiceUnavailableError)):
                raise
            await asyncio.sleep(backoff_sec(tries, base_sec=_PAUSE_SEC, max_sec=10.0, rng=_rng))
    raise AssertionError("unreachable")


async def _wait_until_started(service: DaytonaService, sandbox: AsyncSandbox) -> AsyncSandbox:
    """Waits until an existing sandbox is running, after the response to its creation was lost."""
    what = f"The sandbox {sandbox.name}"
    try:
        if not has_ended(sandbox):
            await service.call(what, lambda _: sandbox.wait_for_sandbox_start(timeout=0), timeout_sec=math.inf)
            return sandbox
    except ContainerServiceError:
        if not has_ended(sandbox):
            raise
    state = state_of(sandbox)
    reason = failures.plain(sandbox.error_reason or "the service gives no reason").rstrip(".")
    problem = "its image could not be built" if state == "build_failed" else f"it is in state {state}"
    raise ContainerStartError(f"{what} did not start, because {problem}: {reason}.")


async def _undo(service: DaytonaService, name: str) -> None:
    """Removes the sandbox after a failed creation. Only logs errors, so that the creation's own error is raised."""
    if name not in service.creating:
        return  # nothing was requested
    try:
        async with asyncio.timeout(REMOVAL_SEC):
            await delete_sandbox(service, name)
    except (ContainerError, TimeoutError) as error:
        reason = str(error) or f"it did not end within {REMOVAL_SEC:g} s"
        _logger.warning("The sandbox %s could not be removed, and may remain until its TTL ends. %s", name, reason)


async def _find(service: DaytonaService, name: str) -> AsyncSandbox | None:
    try:
        return await service.call(f"The sandbox {name}", lambda client: client.get(name), timeout_sec=_LOOK_SEC)
    except (ContainerDiedError, ContainerNotFoundError):
        return None


async def _delete(service: DaytonaService, sandbox: AsyncSandbox) -> None:
    with contextlib.suppress(ContainerDiedError, ContainerNotFoundError):  # another removal was faster
        await service.call(
            f"The sandbox {sandbox.name}", lambda _: sandbox.delete(timeout=_LOOK_SEC), timeout_sec=REMOVAL_SEC
        )


def _may_appear(creation: asyncio.Task[AsyncSandbox]) -> bool:
    if not creation.done() or creation.cancelled():
        return True
    error = creation.exception()
    return error is not None and not failures.was_refused(error)
