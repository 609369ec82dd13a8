"""Installing a build: fetched part by part, checked, and kept in the store."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ares_exp.agents.toolbox.fetching import fetch_tarball, fetch_wheels
from ares_exp.agents.toolbox.package import Build, NpmTarball
from ares_exp.agents.toolbox.package_store import AgentStore, Installed
from ares_exp.cancellation import finish
from ares_exp.errors import ToolboxError
from ares_exp.records.terminal_text import format_size

_WAIT_SEC = 3600.0
"""Bound on waiting for another process that installs the same build."""

_logger = logging.getLogger(__name__)


def install(
    build: Build,
    *,
    say: Callable[[str], None],
    store: AgentStore | None = None,
    stop: threading.Event | None = None,
) -> Installed:
    """Returns a build, fetched if it is not there. Blocking, for minutes.

    Args:
        build: The build.
        say: Takes a sentence before something is fetched.
        store: Where it is kept; by default in the user's cache.
        stop: When it is set, the installation ends.

    Raises:
        ToolboxError: It cannot be installed; with the remedy.
    """
    store, stop = store or AgentStore(), stop or threading.Event()

    def make(target: Path) -> None:
        size = format_size(build.size)
        say(f"Fetching {build.name} {build.version} ({size}, {build.variant}), once, to {store.folder}.")
        _make(build, target, stop)

    return store.keep(build, make, stop=stop, timeout_sec=_WAIT_SEC)


async def ensure(builds: Sequence[Build]) -> list[Installed]:
    """Installs builds for this process, those that are not there, and says so on stderr; they stay while it lives.

    Raises:
        ToolboxError: One cannot be installed; with the command to try again.
    """
    stop, store = threading.Event(), AgentStore()

    def install_all() -> list[Installed]:
        for build in builds:
            install(build, say=_tell, store=store, stop=stop)
        return [found for build in builds if (found := store.use(build)) is not None]

    work = asyncio.ensure_future(asyncio.to_thread(install_all))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await finish(asyncio.wait({work}))
        raise
    except ToolboxError as error:
        names = " ".join(dict.fromkeys(build.name for build in builds))
        raise ToolboxError(f"{error}\nTo try that alone: `ares-exp agents install {names}`.") from error


def _make(build: Build, target: Path, stop: threading.Event) -> None:
    """Fetches every part of a build into `target`."""
    scratch = target.with_name("scratch")
    scratch.mkdir()
    for part in build.parts:
        if isinstance(part, NpmTarball):
            fetch_tarball(part, target, scratch, stop=stop)
        else:
            fetch_wheels(part, build, target / part.into, scratch, stop=stop)
    shutil.rmtree(scratch)


def _tell(sentence: str) -> None:
    _logger.info("%s", sentence)
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
