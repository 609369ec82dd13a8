"""The facts of a snapshot's episode for which the document has no fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import pydantic

from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.past_stage import PastStage, read_stage
from ares_exp.errors import ConfigError, SnapshotMetadataError
from ares_exp.llms.request import MessageEdit
from ares_exp.records.validation import explain_validation

if TYPE_CHECKING:
    from ares_exp.containers.filesystem.stored_objects import ObjectStore
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot


T = TypeVar("T")
_NUMBER = pydantic.TypeAdapter(float)
_INTEGER = pydantic.TypeAdapter(int)
_NUMBERS = pydantic.TypeAdapter(dict[str, float])


class EpisodeFacts:
    """The `episode` table of a snapshot, checked where it is used."""

    def __init__(self, snapshot: EnvironmentSnapshot) -> None:
        self._where = f"{snapshot.snapshot_dir}: `episode`"
        self._data = snapshot.episode
        self._step_count = snapshot.step_count

    def number(self, name: str) -> float:
        """Returns a number. Raises `SnapshotMetadataError` when it is none; so do the others."""
        return self._checked(name, _NUMBER)

    def integer(self, name: str) -> int:
        """Returns an integer."""
        return self._checked(name, _INTEGER)

    def numbers(self, name: str) -> dict[str, float]:
        """Returns a table of numbers."""
        return self._checked(name, _NUMBERS)

    def _checked(self, name: str, kind: pydantic.TypeAdapter[T]) -> T:
        try:
            return kind.validate_python(self._data.get(name), strict=True)
        except pydantic.ValidationError as error:
            raise SnapshotMetadataError(f"{self._where}: {explain_validation(error, within=name)}.") from None

    def past_stages(self, objects: ObjectStore, names: Sequence[str]) -> list[PastStage]:
        """Reads the stages that are over, of a task with stages of these names. Blocking."""
        recorded = self._data.get("past_stages") or []
        if not isinstance(recorded, list) or len(recorded) >= len(names):
            raise SnapshotMetadataError(f"{self._where}: expected less than {len(names)} `past_stages`.")
        stages = [read_stage(one, objects, self._where) for one in recorded]
        if [stage.name for stage in stages] != list(names[: len(stages)]):
            raise SnapshotMetadataError(f"{self._where}: expected `past_stages` in the order of the task's.")
        counts = [0, *(stage.step_count for stage in stages), self._step_count]
        if counts != sorted(counts):
            raise SnapshotMetadataError(f"{self._where}: expected `step_count` to rise in `past_stages`, got {counts}.")
        return stages

    @property
    def unanswered(self) -> int:
        """Time steps for which the policy gave no answer in time."""
        unanswered = self.integer("unanswered") if "unanswered" in self._data else 0
        if not 0 <= unanswered <= self._step_count:
            raise SnapshotMetadataError(
                f"{self._where}: expected `unanswered` of {self._step_count}, got {unanswered}."
            )
        return unanswered

    @property
    def stage_seed(self) -> int:
        """Seed of what the agent draws that is running."""
        return self.integer("stage_seed") if "stage_seed" in self._data else self.integer("seed")

    @property
    def provide_solution(self) -> bool:
        """Whether the episode had the task's solution."""
        return self._data.get("provide_solution") is True

    def edits(self) -> tuple[MessageEdit, ...]:
        """Reads the edits of the conversation that the policy saw."""
        try:
            return tuple(MessageEdit.from_dict(one) for one in self._data.get("edits") or ())
        except (ValueError, AttributeError, TypeError) as error:
            raise SnapshotMetadataError(f"{self._where}: `edits`: {error}.") from None

    def limits(self) -> EpisodeLimits:
        """Reads the limits that were in force."""
        try:
            return pydantic.TypeAdapter(EpisodeLimits).validate_python(self._data.get("limits") or {})
        except (ValueError, ConfigError) as error:
            raise SnapshotMetadataError(f"{self._where}: `limits` make none: {error}.") from None
