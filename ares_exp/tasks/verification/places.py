"""The artifacts of a task, and the path of each on the host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from ares_exp.tasks.artifact import MAIN_SERVICE, Artifact
from ares_exp.tasks.verification.manifest import MANIFEST

ARTIFACTS_DIR = "/logs/artifacts"
"""Whatever is in here is an artifact of every task."""


def with_conventional(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Puts `/logs/artifacts` before the artifacts, unless it is among them."""
    named = list(artifacts)
    return named if any(map(is_conventional, named)) else [Artifact(source=ARTIFACTS_DIR), *named]


def is_conventional(artifact: Artifact) -> bool:
    """Whether it is the agent's `/logs/artifacts`."""
    return artifact.service == MAIN_SERVICE and artifact.source.rstrip("/") == ARTIFACTS_DIR


def place_of(artifact: Artifact) -> PurePosixPath:
    """Returns its path relative to the directory of artifacts: its destination, or its path in the container."""
    path = PurePosixPath(artifact.destination or artifact.source)
    return path.relative_to(path.anchor) if path.is_absolute() else path


class Places:
    """The places that are taken. First come, first served."""

    def __init__(self) -> None:
        self._taken: list[tuple[PurePosixPath, Artifact | None]] = [(PurePosixPath(MANIFEST), None)]

    def take(self, artifact: Artifact) -> Artifact | str | None:
        """Gives an artifact its place.

        Returns:
            `None`; or what has it already: another artifact, or the name of the manifest.
        """
        place = place_of(artifact)
        for taken, by in self._taken:
            if _overlap(taken, place) and (by is None or not _is_again(by, artifact)):
                return by or MANIFEST
        self._taken.append((place, artifact))
        return None


def covers(first: Artifact, second: Artifact) -> bool:
    """Whether `second` is `first` or a part of it, and has the same place as that part."""
    source, within = PurePosixPath(first.source), PurePosixPath(second.source)
    if first.service != second.service or not within.is_relative_to(source):
        return False
    if within == source:
        return place_of(first) == place_of(second) and first.exclude == second.exclude
    return not first.exclude and place_of(second) == place_of(first) / within.relative_to(source)


def _is_again(first: Artifact, second: Artifact) -> bool:
    """Whether `second` is all of `first` once more; a part of it would be copied twice."""
    return PurePosixPath(first.source) == PurePosixPath(second.source) and covers(first, second)


def _overlap(one: PurePosixPath, other: PurePosixPath) -> bool:
    return one.is_relative_to(other) or other.is_relative_to(one)
