"""The paths of artifacts on the host, and the manifest, which contains their status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import pydantic

from ares_exp.tasks.task_toml import MAIN_SERVICE, Artifact

MANIFEST = "manifest.json"

ArtifactKind = Literal["file", "directory"]
ArtifactStatus = Literal["ok", "failed", "empty", "skipped"]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The status of one artifact.

    Attributes:
        source: Path in the container.
        destination: Path on the host: `artifacts/…`.
        type: Kind of the artifact; the expected kind if the artifact is missing.
        status: `skipped` if another artifact has the same path on the host; `empty` for an empty `/logs/artifacts`.
        service: Service that the task sets; `None` for the agent's container.
        exclude: Patterns of the files that were left out of a directory.
    """

    source: str
    destination: str
    type: ArtifactKind
    status: ArtifactStatus
    service: str | None
    exclude: tuple[str, ...] | None

    @classmethod
    def of(cls, artifact: Artifact, place: str, kind: ArtifactKind, status: ArtifactStatus) -> ManifestEntry:
        """Creates the entry of an artifact. `place` is its path in the directory of artifacts."""
        return cls(
            source=artifact.source,
            destination=f"artifacts/{place}" if place != "." else "artifacts",
            type=kind,
            status=status,
            service=artifact.service if "service" in artifact.model_fields_set else None,
            exclude=artifact.exclude if kind == "directory" else (),
        )


def write_manifest(folder: Path, entries: Sequence[ManifestEntry]) -> None:
    """Writes the manifest of the artifacts in `folder`. Blocking."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(entry) for entry in entries], indent=2)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> list[ManifestEntry]:
    """Reads the manifest of the artifacts in `folder`; empty if the manifest does not exist. Blocking."""
    if not (folder / MANIFEST).exists():
        return []
    return pydantic.TypeAdapter(list[ManifestEntry]).validate_json((folder / MANIFEST).read_bytes())


ARTIFACTS_DIR = "/logs/artifacts"
"""Directory in the container, which is an artifact of every task."""


def with_conventional(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Returns the artifacts with `/logs/artifacts` as the first artifact, unless they already contain it."""
    named = list(artifacts)
    return named if any(map(is_conventional, named)) else [Artifact(source=ARTIFACTS_DIR), *named]


def is_conventional(artifact: Artifact) -> bool:
    """Returns whether an artifact is `/logs/artifacts` in the agent's container."""
    return artifact.service == MAIN_SERVICE and artifact.source.rstrip("/") == ARTIFACTS_DIR


def place_of(artifact: Artifact) -> PurePosixPath:
    """Returns the path of an artifact in the directory of artifacts: its `destination`, or by default its `source`."""
    path = PurePosixPath(artifact.destination or artifact.source)
    return path.relative_to(path.anchor) if path.is_absolute() else path


class Places:
    """The paths on the host that artifacts use. Each path belongs to the first artifact that reserved it."""

    def __init__(self) -> None:
        self._taken: list[tuple[PurePosixPath, Artifact | None]] = [(PurePosixPath(MANIFEST), None)]

    def take(self, artifact: Artifact) -> Artifact | str | None:
        """Reserves the path of an artifact on the host, and returns `None`.

        If the path overlaps with a reserved path, reserves nothing. Returns the artifact that uses the reserved path,
        or the name of the manifest.
        """
        place, source = place_of(artifact), PurePosixPath(artifact.source)
        for taken, by in self._taken:
            is_again = by is not None and PurePosixPath(by.source) == source and covers(by, artifact)
            if (taken.is_relative_to(place) or place.is_relative_to(taken)) and not is_again:
                return by or MANIFEST
        self._taken.append((place, artifact))
        return None


def covers(first: Artifact, second: Artifact) -> bool:
    """Returns whether a copy of `first` also contains `second`, at the path of `second` on the host."""
    source, within = PurePosixPath(first.source), PurePosixPath(second.source)
    if first.service != second.service or not within.is_relative_to(source):
        return False
    if within == source:
        return place_of(first) == place_of(second) and first.exclude == second.exclude
    return not first.exclude and place_of(second) == place_of(first) / within.relative_to(source)
