"""The delivery of artifacts into a verifier's own container, to their paths in the agent's."""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from pathlib import Path

from ares_exp.containers.container import Container
from ares_exp.tasks.verification.manifest import ManifestEntry, read_manifest
from ares_exp.tasks.verification.root_commands import as_root


async def deliver_artifacts(container: Container, folder: Path) -> None:
    """Uploads what `folder` has of artifacts to the paths that they came from.

    What came out of a container has no setuid bits, no special files and no links that lead out of an artifact any
    more: `Container.download` sees to it.

    Args:
        container: The verifier's own.
        folder: Artifacts and their manifest.

    Raises:
        ContainerError: The container failed.
    """
    for entry in await asyncio.to_thread(read_manifest, folder):  # none: the collection took too long
        if entry.status in ("ok", "empty"):
            await _deliver(container, entry, entry.host_path(folder))


async def _deliver(container: Container, entry: ManifestEntry, path: Path) -> None:
    """Puts an artifact in place: a directory, or that of a file, is made writable; the former is emptied first.

    What the verifier's image has at that path is in the way where the agent has made something of another kind of it.
    """
    source = shlex.quote(entry.source)
    if entry.type == "directory":
        made = f"mkdir -p -- {source} && chmod 777 {source} && find {source} -mindepth 1 -delete"
        await as_root(container, f"[ -d {source} ] || rm -f -- {source}; {made}", cwd=None)
    else:
        parent = shlex.quote(posixpath.dirname(entry.source) or ".")
        made = f"mkdir -p -- {parent} && chmod 777 {parent}"
        await as_root(container, f"{made} && if [ -d {source} ]; then rm -rf -- {source}; fi", cwd=None)
    await container.upload(path, entry.source)
