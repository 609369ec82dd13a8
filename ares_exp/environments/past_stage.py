"""A stage of an episode that is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pydantic

from ares_exp.environments.episode_limits import LimitName
from ares_exp.filesystem.objects import ObjectStore
from ares_exp.journal.encoding import JournalEncoder, decode_journal
from ares_exp.journal.journal import Journal
from ares_exp.results import StageResult
from ares_exp.tasks.task import Verdict


@dataclass(frozen=True, slots=True)
class PastStage:
    """What is known of a stage that is over.

    Attributes:
        name: Of the stage.
        verdict: What its verifier said; `None`: it was not run.
        truncated_by: The limit that ended its agent, if one did.
        step_count: Answers of the policy that were applied, up to its end.
        journal: What its agent did; `None` for an agent that is not deterministic.
        encoder: Of the journal.
    """

    name: str
    verdict: Verdict | None
    truncated_by: LimitName | None
    step_count: int
    journal: Journal | None
    encoder: JournalEncoder = field(default_factory=JournalEncoder)

    def result(self, *, began_at: int) -> StageResult:
        """As it is recorded; `began_at`: the answers before it."""
        return StageResult(
            name=self.name,
            reward=self.verdict.reward if self.verdict is not None else None,
            rewards=dict(self.verdict.rewards) if self.verdict is not None else {},
            truncated_by=self.truncated_by,
            num_steps=self.step_count - began_at,
        )


@dataclass(frozen=True, slots=True)
class _Recorded:
    """How a snapshot has it: the journal as digests of its lines."""

    name: str
    verdict: Verdict | None
    truncated_by: LimitName | None
    step_count: int
    started_at: float | None
    seed: int | None
    journal: list[str]


def recorded_stage(past: PastStage, objects: ObjectStore) -> dict[str, Any]:
    """JSON-ready form; its journal goes to `objects`. Blocking."""
    journal = past.journal
    return asdict(
        _Recorded(
            name=past.name,
            verdict=past.verdict,
            truncated_by=past.truncated_by,
            step_count=past.step_count,
            started_at=journal.started_at if journal is not None else None,
            seed=journal.seed if journal is not None else None,
            journal=list(objects.put_lines(past.encoder.update(journal) if journal is not None else [])),
        )
    )


def read_stage(data: Mapping[str, Any], objects: ObjectStore, where: str) -> PastStage:
    """What `recorded_stage` gave. Blocking.

    Raises:
        ValueError: It is none; a `SnapshotError` where its journal is none.
    """
    recorded = pydantic.TypeAdapter(_Recorded).validate_python(data)
    journal = None
    if recorded.started_at is not None and recorded.seed is not None:
        lines = objects.get_lines(recorded.journal)
        journal = decode_journal(lines, started_at=recorded.started_at, seed=recorded.seed, where=where)
    return PastStage(
        name=recorded.name,
        verdict=recorded.verdict,
        truncated_by=recorded.truncated_by,
        step_count=recorded.step_count,
        journal=journal,
    )
