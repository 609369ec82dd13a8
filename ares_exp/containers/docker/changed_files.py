"""The changed files of one container: those it starts with, and captures."""

from __future__ import annotations

import logging

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.base_image import find_base, name_of
from ares_exp.containers.docker.capture import Capture, CaptureWay
from ares_exp.containers.docker.derived_image import DerivedImage, ThinLoadRefused, borrow
from ares_exp.containers.docker.engine import Engine, engine_errors, reason
from ares_exp.containers.docker.restore import put_back
from ares_exp.errors import CaptureError, ContainerDiedError
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.objects import ObjectStore

_logger = logging.getLogger(__name__)


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
