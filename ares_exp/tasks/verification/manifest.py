"""`artifacts/manifest.json`: the status of each artifact of a task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pydantic

from ares_exp.tasks.artifact import Artifact

MANIFEST = "manifest.json"

ArtifactKind = Literal["file", "directory"]
ArtifactStatus = Literal["ok", "failed", "empty", "skipped"]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The status of one artifact.

    Attributes:
        source: Its path in the container.
        destination: Its path on the host: `artifacts/…`.
        type: What it is, or would be.
        status: `skipped`: another one has its place; `empty`: `/logs/artifacts` with nothing in it.
        service: Where it is from, as the task says; `None`: the agent's container.
        exclude: Patterns of what was left out of a directory.
    """

    source: str
    destination: str
    type: ArtifactKind
    status: ArtifactStatus
    service: str | None
    exclude: tuple[str, ...] | None

    @classmethod
    def of(cls, artifact: Artifact, place: str, kind: ArtifactKind, status: ArtifactStatus) -> ManifestEntry:
        """Makes the entry of an artifact whose place among the artifacts is `place`."""
        return cls(
            source=artifact.source,
            destination=f"artifacts/{place}" if place != "." else "artifacts",
            type=kind,
            status=status,
            service=artifact.service if "service" in artifact.model_fields_set else None,
            exclude=artifact.exclude if kind == "directory" else (),
        )

    def host_path(self, folder: Path) -> Path:
        """Returns its path, when `folder` has the artifacts."""
        return folder / self.destination.removeprefix("artifacts").lstrip("/")


def write_manifest(folder: Path, entries: Sequence[ManifestEntry]) -> None:
    """Writes the manifest of the artifacts in `folder`. Blocking."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(entry) for entry in entries], indent=2)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> list[ManifestEntry]:
    """Reads the manifest that `write_manifest` wrote; empty when there is none. Blocking.

    Raises:
        OSError, ValueError: It cannot be read, or is broken.
    """
    if not (folder / MANIFEST).exists():
        return []
    return pydantic.TypeAdapter(list[ManifestEntry]).validate_json((folder / MANIFEST).read_bytes())
