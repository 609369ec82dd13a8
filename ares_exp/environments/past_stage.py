"""The history of an episode: its finished stages, and the time steps recorded in its journals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pydantic

from ares_exp.agents.runtime.journal import CallEntry, DoneEntry, Journal, JournalEncoder, UnheardEntry, decode_journal
from ares_exp.containers.activity import Activity
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.environment import LimitName, PastStep, restart, transition
from ares_exp.errors import SnapshotMetadataError
from ares_exp.llms.request import LLMRequest, edited
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import StageResult
from ares_exp.tasks.task_contract import Task, Verdict

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment


NOT_REACHED = Verdict(0.0, {"reward": 0.0})
"""Verdict with reward 0 for a stage that did not run, because a limit ended the episode before it."""


@dataclass(frozen=True, slots=True)
class PastStage:
    """A finished stage of an episode. Each stage of a task has its own instruction and tests, and starts a new agent.

    Attributes:
        name: Name of the stage.
        verdict: Result of the stage's verifier; `None` if the verifier did not run.
        truncated_by: Limit that ended the stage's agent; `None` if no limit did.
        step_count: Number of time steps from the start of the episode to the end of the stage.
        journal: Journal of the stage's agent; `None` for an agent that is not deterministic.
        encoder: Encoder that converts the journal to the lines of a snapshot.
    """

    name: str
    verdict: Verdict | None
    truncated_by: LimitName | None
    step_count: int
    journal: Journal | None
    encoder: JournalEncoder = field(default_factory=JournalEncoder)


def results_of(task: Task, past_stages: Sequence[PastStage]) -> tuple[StageResult, ...]:
    """Returns the results of the finished stages; empty for a single-stage task."""
    if len(task.stages) == 1:
        return ()
    ends = [0, *(past.step_count for past in past_stages)]
    return tuple(
        StageResult(
            name=past.name,
            reward=past.verdict.reward if past.verdict is not None else None,
            rewards=dict(past.verdict.rewards) if past.verdict is not None else {},
            truncated_by=past.truncated_by,
            num_steps=past.step_count - started_at,
        )
        for past, started_at in zip(past_stages, ends, strict=False)
    )


def verdict_of(task: Task, past_stages: Sequence[PastStage], truncated_by: LimitName | None) -> Verdict | None:
    """Computes the verdict on a whole episode from its stages; `None` if the verifier of a stage did not run."""
    verdicts = [past.verdict for past in past_stages if past.verdict is not None]
    if len(verdicts) < len(past_stages):
        return None
    if truncated_by not in (None, "time"):  # otherwise, an agent could spend all steps on easy stages and skip the rest
        verdicts += [NOT_REACHED] * (len(task.stages) - len(past_stages))
    return task.reward(verdicts)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A finished stage as a snapshot contains it. `journal` contains the digests of the journal's lines."""

    name: str
    verdict: Verdict | None
    truncated_by: LimitName | None
    step_count: int
    started_at: float | None
    seed: int | None
    journal: list[str]


def recorded_stage(past: PastStage, objects: ObjectStore) -> dict[str, Any]:
    """Converts a stage to a dict that can be written as JSON, and stores its journal in `objects`. Blocking."""
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
    """Converts a result of `recorded_stage` to a stage. Raises `SnapshotMetadataError` if it is invalid. Blocking."""
    try:
        recorded = pydantic.TypeAdapter(_Recorded).validate_json(json.dumps(data), strict=True)
    except pydantic.ValidationError as error:
        raise SnapshotMetadataError(f"{where}: `past_stages`: {error.errors()[0]['msg']}.") from None
    journal = None
    if recorded.journal:
        if recorded.started_at is None or recorded.seed is None:
            raise SnapshotMetadataError(f"{where}: a journal in `past_stages` needs `started_at` and `seed`.")
        lines = objects.get_lines(recorded.journal)
        journal = decode_journal(lines, started_at=recorded.started_at, seed=recorded.seed, where=where)
    return PastStage(
        name=recorded.name,
        verdict=recorded.verdict,
        truncated_by=recorded.truncated_by,
        step_count=recorded.step_count,
        journal=journal,
    )


def past_steps(episode: CodeEnvironment) -> Sequence[PastStep]:
    """Returns all time steps of a running episode, ending with the pending step.

    Directly after a replay of recorded responses, these are the replayed steps (`ran`). Otherwise, the steps are read
    from the journals of the agents. The result is empty if a journal is missing, or lacks requests because the agent
    was restored from its state.
    """
    if len(episode.ran) == episode.step_count + 1:
        return episode.ran
    journals = [past.journal for past in episode.past_stages]
    if episode.host is not None:
        journals.append(episode.host.runtime.journal)
    steps: list[PastStep] = []
    response: LLMResponse | None = None
    for journal in journals:
        if journal is None:
            return ()
        requests, responses = _calls_of(journal)
        for entry in journal.steps():
            request = requests.get(entry.call_id)
            if not isinstance(request, LLMRequest):
                return ()  # the agent was restored from its state instead of being replayed
            request = edited(request, episode.edits, len(steps))
            steps.append(
                PastStep(
                    time_step=restart(request) if not steps else transition(request, entry.reward or 0.0),
                    action=response,
                    timestamp=entry.timestamp,
                    policy_sec=entry.policy_sec,
                    environment_sec=entry.environment_sec,
                    activity=Activity(entry.container_sec, list(entry.commands)),
                )
            )
            response = responses.get(entry.call_id)
    return steps


def _calls_of(journal: Journal) -> tuple[dict[int, Any], dict[int, LLMResponse]]:
    """Returns the requests and the responses of an agent's LLM calls, by call id."""
    requests: dict[int, Any] = {}
    responses: dict[int, LLMResponse] = {}
    for entry in journal.entries:
        if isinstance(entry, CallEntry) and entry.kind == "llm":
            requests[entry.call_id] = entry.arguments
        elif isinstance(entry, DoneEntry) and isinstance(entry.value, LLMResponse):
            responses[entry.call_id] = entry.value
        elif isinstance(entry, UnheardEntry):
            responses[entry.call_id] = entry.response
    return requests, responses
