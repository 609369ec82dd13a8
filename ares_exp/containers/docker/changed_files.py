"""The changed files of one container: those it starts with, and captures."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.capture import Capture, CaptureWay
from ares_exp.containers.docker.container_lifetime import why_it_stays
from ares_exp.containers.docker.engine import Engine, engine_errors, in_thread, reason
from ares_exp.containers.filesystem.delta import Delta, Entry, StoredChanges
from ares_exp.containers.filesystem.layer import write_layer
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.images.derived_image import DerivedImage, ThinLoadRefused, borrow
from ares_exp.containers.images.image import ensure_image, inspect_image
from ares_exp.containers.images.program import run_program
from ares_exp.errors import CaptureError, ContainerDiedError, ContainerStartError, RestoreError, SnapshotMismatchError

_logger = logging.getLogger(__name__)
_REMEDY = (
    "Bring the image back (`docker save` where it still is, `docker load` here), or start the task anew. A run that "
    "takes snapshots needs container.keep_image=true, and its images left on the engine."
)
_REMOVE = ["xargs", "-0", "rm", "-rf", "--"]
_LIKE_A_WHITEOUT = "/.wh."
_TOUCHED_BY_THE_ENGINE = "/etc"  # it creates hosts, hostname and others there


class ChangedFiles:
    """The changed files of one container, from before its creation until after its removal."""

    def __init__(self, spec: ContainerSpec, container: str, way: CaptureWay, *, keep_image: bool) -> None:
        """Starts nothing yet.

        Args:
            spec: Its `changes` are those it starts with, if any.
            container: Its name.
            way: The way to capture; see `capture`.
            keep_image: Whether an image built from the task's Dockerfile is kept.
        """
        self._spec = spec
        self._container = container
        self._way: CaptureWay = way
        self._keep_image = keep_image
        self._derived: DerivedImage | None = None
        self._capture: Capture | None = None

    async def image(self, engine: Engine) -> tuple[str, str]:
        """Returns the image for a container that starts with changes: with the changes in it if the engine can load it.

        Called again when the engine has had no such image: others may remove what no container uses.

        Returns:
            The image to create the container from, and the name of the image that the changes are relative to.

        Raises:
            SnapshotMismatchError: The image that they are relative to cannot be found or made.
            SnapshotMetadataError: An object of the changes is missing or damaged.
        """
        changes = self._spec.changes
        assert changes is not None
        base = await find_base(engine, self._spec, keep=self._keep_image)
        if self._derived is not None:
            gone, self._derived = self._derived, None
            gone.has_vanished()
            await gone.give_back()
        try:
            self._derived = await borrow(engine, base, changes)
        except ThinLoadRefused as error:
            _logger.info("The files of %s are written one by one: %s.", self._spec.name, error)
        return self._derived.name if self._derived is not None else str(base["Id"]), name_of(base, self._spec)

    async def has_started(self, engine: Engine) -> None:
        """Writes the changes that are not in the image into the container, and prepares captures.

        Raises:
            RestoreError: The files could not be written.
            SnapshotMetadataError: An object of the changes is missing or damaged.
        """
        changes, is_derived = self._spec.changes, self._derived is not None
        if changes is not None:
            await put_back(engine, self._container, changes, is_derived=is_derived)
        self._capture = Capture(engine, self._container, self._way, changes if is_derived else None)

    async def capture(self, objects: ObjectStore) -> Delta:
        if self._capture is None:
            raise ContainerDiedError("The container has not been started.")
        try:
            return await self._capture.run(objects)
        except engine_errors() as error:
            raise CaptureError(f"The files of {self._spec.name} could not be captured: {reason(error)}.") from error

    async def close(self) -> None:
        """Removes what it made on the engine; called after the container's removal. Idempotent."""
        if self._derived is not None:
            await self._derived.give_back()
        if self._capture is not None:
            await self._capture.close()


async def find_base(engine: Engine, spec: ContainerSpec, *, keep: bool) -> dict[str, Any]:
    """Inspects the image that `spec.changes` are relative to.

    A missing image is pulled or built like any image of a task, and has to have the same id.

    Args:
        engine: The engine.
        spec: With `changes`.
        keep: Whether an image built for this is kept.

    Raises:
        SnapshotMismatchError: It cannot be found or made; with both ids if another one was.
    """
    assert spec.changes is not None
    base = spec.changes.delta.base
    if not base.startswith("sha256:"):
        raise SnapshotMismatchError(
            f"Expected the changed files of {spec.name} to be relative to a Docker image (sha256:…), got {base}. "
            "Restore them on the backend that they were captured on."
        )
    found = await in_thread(lambda: inspect_image(engine.api, base), abandon=True)
    if found is not None:
        return found
    what = f"The changed files of {spec.name} are relative to the image {base}, which the engine does not have"
    try:
        image = await ensure_image(
            engine, name=spec.name, docker_image=spec.docker_image, context_dir=spec.context_dir, keep=keep
        )
    except ContainerStartError as error:
        raise SnapshotMismatchError(f"{what}. Its task's image cannot replace it: {error} {_REMEDY}") from error
    found = await in_thread(lambda: inspect_image(engine.api, image), abandon=True)
    if found is not None and found["Id"] == base:
        return found
    if spec.docker_image is None and not keep:
        await in_thread(lambda: why_it_stays(lambda: engine.api.remove_image(image)), pool="removals")
    other = found["Id"] if found is not None else "gone"
    raise SnapshotMismatchError(f"{what}. Its task's image {image} is now {other}. {_REMEDY}")


def name_of(image: dict[str, Any], spec: ContainerSpec) -> str:
    """Returns a readable name of an image: the task's if it still refers to it, else another, else the id."""
    names: list[str] = image.get("RepoTags") or [image["Id"]]
    return spec.docker_image if spec.docker_image in names else names[0]


async def put_back(engine: Engine, container: str, changes: StoredChanges, *, is_derived: bool) -> None:
    """Applies `changes` to the files of a running container.

    Args:
        engine: The engine.
        container: The container's name.
        changes: Relative to its image.
        is_derived: Whether the image has them already, except files whose names mean deletions in a layer. Hard links
            are written anyway: what is written to one name of a file in a layer is not seen under the others.

    Raises:
        RestoreError: With the reason.
        SnapshotMetadataError: An object is missing or damaged.
    """
    entries = changes.delta.entries
    if is_derived:
        entries = _not_in_the_image(entries)
    elif gone := [path for path, entry in entries.items() if entry.kind == "whiteout" or entry.opaque]:
        await _remove(engine, container, gone)
    files = {path: replace(entry, opaque=False) for path, entry in entries.items() if entry.kind != "whiteout"}
    if files:
        plain = StoredChanges(Delta(changes.delta.base, files), changes.objects)
        await in_thread(lambda: _put(engine, container, plain), pool="transfers")


def _not_in_the_image(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries that a layer cannot hold, and their directories, whose times change with the writing."""
    found = {path for path, entry in entries.items() if _LIKE_A_WHITEOUT in path or entry.link is not None}
    found |= {path[:end] for path in found for end in range(1, len(path)) if path[end] == "/"}
    found.add(_TOUCHED_BY_THE_ENGINE)
    return {path: entry for path, entry in entries.items() if path in found}


async def _remove(engine: Engine, container: str, paths: list[str]) -> None:
    names = b"".join(os.fsencode(f".{path}\0") for path in paths)
    try:
        output, exit_code = await run_program(engine, container, _REMOVE, names, lambda file: file.read(1000))
    except engine_errors() as error:
        raise RestoreError(f"Deleted files cannot be removed in {container}: {reason(error)}.") from error
    if exit_code:
        raise RestoreError(
            f"Deleted files cannot be removed in {container}: `{' '.join(_REMOVE)}` ended there with exit code "
            f"{exit_code}. {output.decode('utf-8', 'replace').strip()}".rstrip()
        )


def _put(engine: Engine, container: str, changes: StoredChanges) -> None:
    with tempfile.TemporaryFile(prefix="ares_exp-changes-") as file:
        write_layer(changes, file, plain=True)
        file.seek(0)
        try:
            engine.api.put_archive(container, "/", file)
        except engine_errors() as error:
            raise RestoreError(f"The files could not be written to {container}: {reason(error)}.") from error
