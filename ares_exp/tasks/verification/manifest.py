"""The paths of artifacts on the host, and `manifest.json`, which contains the status of each artifact."""

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
    """The entry of one artifact in `manifest.json`.

    Attributes:
        source: Path in the container.
        destination: Path on the host, relative to the directory of the stage: `artifacts/…`.
        type: Kind of the artifact. If the artifact is missing, the kind is guessed from its path.
        status: `ok`; `failed` if it was not collected, for example because it is missing; `skipped` if another artifact
            already uses its path on the host; `empty` for an empty `/logs/artifacts`.
        service: Name of the service, if the task sets it; otherwise `None`, which means the agent's container.
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
        """Creates the entry of an artifact. `place` is its path relative to `artifacts/`."""
        return cls(
            source=artifact.source,
            destination=f"artifacts/{place}" if place != "." else "artifacts",
            type=kind,
            status=status,
            service=artifact.service if "service" in artifact.model_fields_set else None,
            exclude=artifact.exclude if kind == "directory" else (),
        )


def write_manifest(folder: Path, entries: Sequence[ManifestEntry]) -> None:
    """Writes `manifest.json` for the artifacts in `folder`. Blocking."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(entry) for entry in entries], indent=2)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> list[ManifestEntry]:
    """Reads the entries of `manifest.json` in `folder`; empty if the file does not exist. Blocking."""
    if not (folder / MANIFEST).exists():
        return []
    return pydantic.TypeAdapter(list[ManifestEntry]).validate_json((folder / MANIFEST).read_bytes())


ARTIFACTS_DIR = "/logs/artifacts"
"""Directory in the container that is collected for every task, even if the task does not list it."""


def with_conventional(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Returns the artifacts of a task, preceded by `/logs/artifacts` unless they already contain it."""
    named = list(artifacts)
    return named if any(map(is_conventional, named)) else [Artifact(source=ARTIFACTS_DIR), *named]


def is_conventional(artifact: Artifact) -> bool:
    """Returns whether an artifact is `/logs/artifacts` in the agent's container."""
    return artifact.service == MAIN_SERVICE and artifact.source.rstrip("/") == ARTIFACTS_DIR


def place_of(artifact: Artifact) -> PurePosixPath:
    """Returns an artifact's path below `artifacts/` on the host: its `destination` or, by default, its `source`."""
    path = PurePosixPath(artifact.destination or artifact.source)
    return path.relative_to(path.anchor) if path.is_absolute() else path


class Places:
    """The paths on the host that are already used, so that no artifact overwrites another artifact or the manifest."""

    def __init__(self) -> None:
        self._taken: list[tuple[PurePosixPath, Artifact | None]] = [(PurePosixPath(MANIFEST), None)]

    def take(self, artifact: Artifact) -> Artifact | str | None:
        """Reserves the path of an artifact on the host, and returns `None` if the path is free.

        If another artifact has reserved this path, a path inside it or a directory above it, reserves nothing and
        returns that artifact. If the path conflicts with the manifest, returns `manifest.json`.
        """
        place, source = place_of(artifact), PurePosixPath(artifact.source)
        for taken, by in self._taken:
            is_again = by is not None and PurePosixPath(by.source) == source and covers(by, artifact)
            if (taken.is_relative_to(place) or place.is_relative_to(taken)) and not is_again:
                return by or MANIFEST
        self._taken.append((place, artifact))
        return None


def covers(first: Artifact, second: Artifact) -> bool:
    """Returns whether a copy of `first` already contains `second` at the right path, so that `second` can be skipped.

    For example, a copy of the directory `/out` contains `/out/log.txt`.
    """
    source, within = PurePosixPath(first.source), PurePosixPath(second.source)
    if first.service != second.service or not within.is_relative_to(source):
        return False
    if within == source:
        return place_of(first) == place_of(second) and first.exclude == second.exclude
    return not first.exclude and place_of(second) == place_of(first) / within.relative_to(source)
