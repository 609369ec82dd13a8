"""What a snapshot tells of its episode, as far as there are no fields for it in the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pydantic

from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.message_edit import MessageEdit
from ares_exp.errors import ConfigError, SnapshotMetadataError

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot


class EpisodeFacts:
    """The `episode` table of a snapshot, checked where it is used."""

    def __init__(self, snapshot: EnvironmentSnapshot) -> None:
        """Reads nothing yet."""
        self._where = f"{snapshot.snapshot_dir}: `episode`"
        self._data = snapshot.episode

    def number(self, name: str) -> float:
        """A number. Raises `SnapshotMetadataError` when it is none; so do the others."""
        value = self._data.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SnapshotMetadataError(f"{self._where}: expected `{name}` to be a number, got {value!r:.60}.")
        return float(value)

    def integer(self, name: str) -> int:
        """An integer."""
        value = self._data.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SnapshotMetadataError(f"{self._where}: expected `{name}` to be an integer, got {value!r:.60}.")
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """A table of numbers."""
        value = self._data.get(name)
        if not isinstance(value, Mapping) or not all(isinstance(one, int | float) for one in value.values()):
            raise SnapshotMetadataError(f"{self._where}: expected `{name}` to be a table of numbers.")
        return {str(key): float(one) for key, one in value.items()}

    @property
    def provide_solution(self) -> bool:
        """Whether the episode had the task's solution."""
        return self._data.get("provide_solution") is True

    def edits(self) -> tuple[MessageEdit, ...]:
        """What the policy was shown otherwise than the agent wrote it."""
        try:
            return tuple(MessageEdit.from_dict(one) for one in self._data.get("edits") or ())
        except (ValueError, AttributeError, TypeError) as error:
            raise SnapshotMetadataError(f"{self._where}: `edits`: {error}.") from None

    def limits(self) -> EpisodeLimits:
        """The limits that were in force."""
        try:
            return pydantic.TypeAdapter(EpisodeLimits).validate_python(self._data.get("limits") or {})
        except (ValueError, ConfigError) as error:
            raise SnapshotMetadataError(f"{self._where}: `limits` make none: {error}.") from None
