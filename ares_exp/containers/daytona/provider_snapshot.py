"""Captures of a sandbox's files, which the service stores as a named snapshot.

To create a snapshot, the service pauses the sandbox's processes and stores its disk as an image. A new sandbox from
this image has all files. The snapshot belongs to the organization of the API key, in one region. Runs never delete it,
because runs that branch from it need it. The sandbox's state is `snapshotting` until the image is stored, which may
take minutes. Until then, the service does not stop or resize the sandbox, and takes no other snapshot of it. If storing
the image fails, the snapshot does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ares_exp.cancellation import finish
from ares_exp.containers.daytona.failures import plain
from ares_exp.containers.daytona.service import DaytonaService, state_of
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.ownership import machine_mark
from ares_exp.errors import (
    CaptureError,
    ContainerDiedError,
    ContainerError,
    ContainerNotFoundError,
    ContainerServiceUnavailableError,
    SnapshotMismatchError,
)

if TYPE_CHECKING:
    from daytona import AsyncSandbox

KEPT_PREFIX = "ares-exp-kept-"
"""Prefix of the names of our snapshots at the service."""

KEEP_SEC = 1800.0
"""Time limit for creating a snapshot, including its upload to the registry of the service."""

READY_SEC = 600.0
"""Time limit for reactivating a snapshot that the service has deactivated."""

_LOOK_SEC = 30.0
_EARLY_POLL_SEC, _POLL_SEC = 0.1, 2.0
_UNUSABLE = frozenset({"error", "build_failed", "removing"})
_PAGE = 100
_MAX_PAGES = 100
_BASE = "daytona:kept="
_KEPT_NAME = re.compile(rf"{KEPT_PREFIX}[a-z0-9-]{{1,100}}")
_logger = logging.getLogger(__name__)


def snapshot_to_start_from(changes: StoredChanges | None) -> str | None:
    """Returns the name of the service's snapshot that contains these changes, or `None` if `changes` is `None`.

    Raises `SnapshotMismatchError` if the changes were not captured by `keep_files`.
    """
    if changes is None:
        return None
    base = changes.delta.base
    if not base.startswith(_BASE):
        raise SnapshotMismatchError(
            f"The snapshot contains changes to the files of {base}. Daytona cannot create a sandbox from them, "
            "because another backend captured the snapshot. Restore the snapshot with that backend."
        )
    if not _KEPT_NAME.fullmatch(name := base.removeprefix(_BASE)):
        raise SnapshotMismatchError(f"Expected the name of a Daytona snapshot, got {base!r}.")
    return name


async def keep_files(service: DaytonaService, sandbox: AsyncSandbox) -> Delta:
    """Creates a snapshot of a running sandbox. After an error or a cancellation, removes the snapshot if possible.

    The returned delta has no entries, because the service stores the files. Its base contains the snapshot's name.
    Raises `CaptureError` if the service creates no snapshot, and `ContainerDiedError` if the sandbox is gone.
    """
    name = f"{_prefix_of_this_machine()}{time.strftime('%Y%m%d', time.gmtime())}-{secrets.token_hex(8)}"
    what = f"The snapshot {name} of the sandbox {sandbox.name}"
    is_kept = False
    try:
        async with asyncio.timeout(KEEP_SEC):
            await _ask(service, sandbox, name, what)
            await _wait_until_active(service, name, what)
        is_kept = True
    except TimeoutError as error:
        raise CaptureError(f"{what} was not ready within {KEEP_SEC:g} s.") from error
    except ContainerDiedError:
        raise
    except ContainerNotFoundError as error:
        raise CaptureError(f"{what} was not created, and the service gives no reason.") from error
    except ContainerError as error:
        raise CaptureError(str(error)) from error
    finally:
        if not is_kept:
            await finish(_discard(service, name))
    return Delta(
        f"{_BASE}{name}",
        {},
        (
            f"Daytona stores the files in its snapshot {name}. Only sandboxes of the same organization can use it, and "
            "only until a user deletes it.",
        ),
    )


async def make_ready(service: DaytonaService, name: str) -> None:
    """Activates a snapshot that `keep_files` created, if it is inactive: the service deactivates old snapshots.

    Raises `SnapshotMismatchError` if the snapshot no longer exists or cannot be used.
    """
    what = f"The snapshot {name}"
    try:
        async with asyncio.timeout(READY_SEC):
            if state_of(await _get(service, name, what)) == "inactive":
                await service.call(what, lambda client: client.snapshot.activate(name), repeatable=False)
            await _wait_until_active(service, name, what)
    except ContainerNotFoundError as error:
        raise SnapshotMismatchError(
            f"Daytona has no snapshot {name}, which should contain the files. A user has deleted it, or it belongs to "
            "another organisation than this key."
        ) from error
    except CaptureError as error:
        raise SnapshotMismatchError(str(error)) from error
    except TimeoutError as error:
        raise SnapshotMismatchError(f"{what} of Daytona was not ready within {READY_SEC:g} s.") from error


async def find_kept(service: DaytonaService) -> dict[str, float | None]:
    """Returns the snapshots that `keep_files` created on this machine: names and creation times in epoch seconds."""
    found: dict[str, float | None] = {}
    for page in range(1, _MAX_PAGES + 1):
        answer = await service.call(
            "The list of snapshots",
            lambda client, page=page: client.snapshot.list(page=page, limit=_PAGE),  # type: ignore[misc]
            timeout_sec=_LOOK_SEC,
        )
        for one in answer.items:
            if one.name.startswith(_prefix_of_this_machine()) and plain(one.name) == one.name:
                found[one.name] = one.created_at.timestamp() if isinstance(one.created_at, datetime) else None
        if page >= answer.total_pages:
            break
    return found


async def delete_kept(service: DaytonaService, name: str) -> None:
    """Deletes a snapshot. Does nothing if the snapshot does not exist."""
    with contextlib.suppress(ContainerNotFoundError):
        await service.call(f"The snapshot {name}", lambda client: client.snapshot.delete(name), timeout_sec=_LOOK_SEC)


async def _ask(service: DaytonaService, sandbox: AsyncSandbox, name: str, what: str) -> None:
    try:
        await service.call(
            what, lambda _: sandbox.create_snapshot(name, timeout=0), timeout_sec=KEEP_SEC, repeatable=False
        )
    except ContainerServiceUnavailableError:  # the response was lost: the snapshot may still appear with this name
        state = "snapshotting"
        while state == "snapshotting":
            found = await service.call(what, lambda client: client.get(sandbox.id), timeout_sec=_LOOK_SEC)
            state = state_of(found)
            await asyncio.sleep(_POLL_SEC if state == "snapshotting" else 0)


async def _wait_until_active(service: DaytonaService, name: str, what: str) -> None:
    """Waits until a snapshot can be used. The caller sets the timeout. Raises `CaptureError` if it is unusable."""
    pause = _EARLY_POLL_SEC
    while (state := state_of(found := await _get(service, name, what))) != "active":
        if state in _UNUSABLE:
            reason = plain(found.error_reason or "the service gives no reason").rstrip(".")
            raise CaptureError(f"{what} is in state {state}: {reason}.")
        await asyncio.sleep(pause)
        pause = min(2 * pause, _POLL_SEC)


async def _get(service: DaytonaService, name: str, what: str) -> Any:
    return await service.call(what, lambda client: client.snapshot.get(name), timeout_sec=_LOOK_SEC)


async def _discard(service: DaytonaService, name: str) -> None:
    try:
        await delete_kept(service, name)
    except ContainerError as error:
        _logger.warning("The incomplete snapshot %s could not be deleted, and may remain at Daytona. %s", name, error)


def _prefix_of_this_machine() -> str:
    return f"{KEPT_PREFIX}{machine_mark()}-"
