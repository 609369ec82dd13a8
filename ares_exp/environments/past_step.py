"""The time steps of an episode so far, out of its journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.environments.activity import Activity
from ares_exp.environments.episode import Episode
from ares_exp.environments.message_edit import edited
from ares_exp.environments.time_step import TimeStep, restart, transition
from ares_exp.journal.journal import CallEntry, DoneEntry, Journal, StepEntry, UnheardEntry
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse


@dataclass(frozen=True, slots=True)
class PastStep:
    """One time step, and what led to it.

    Attributes:
        time_step: As it was returned.
        action: The answer to the one before; `None` on FIRST.
        timestamp: Epoch seconds.
        policy_sec: Seconds until that answer; `None` on FIRST.
        environment_sec: Seconds that the environment took.
        activity: What the agent did in the container.
    """

    time_step: TimeStep[Any]
    action: LLMResponse | None
    timestamp: float
    policy_sec: float | None
    environment_sec: float
    activity: Activity


def past_steps(episode: Episode) -> Sequence[PastStep]:
    """All time steps of a running episode, the pending one last; none where its journals do not tell."""
    journals = [past.journal for past in episode.past_stages]
    if episode.host is not None:
        journals.append(episode.host.runtime.journal)
    steps: list[PastStep] = []
    answer: LLMResponse | None = None
    for journal in journals:
        told = _StepsOfOneAgent(journal) if journal is not None else None
        if told is None or told.is_incomplete:
            return ()  # the agent was given its state instead of being run again
        for entry, request in told.requests:
            request = edited(request, episode.edits, len(steps))
            steps.append(_past_step(entry, request, answer, is_first=not steps))
            answer = told.answers.get(entry.call_id)
    return steps


class _StepsOfOneAgent:
    """What a journal tells of time steps.

    Attributes:
        requests: The time steps with their requests, in order.
        answers: What LLM calls were answered.
        is_incomplete: Whether a request is not known.
    """

    def __init__(self, journal: Journal) -> None:
        self.requests: list[tuple[StepEntry, LLMRequest]] = []
        self.answers: dict[int, LLMResponse] = {}
        self.is_incomplete = False
        asked: dict[int, Any] = {}
        for entry in journal.entries:
            if isinstance(entry, CallEntry):
                if entry.kind == "llm":
                    asked[entry.call_id] = entry.arguments
            elif isinstance(entry, DoneEntry):
                if isinstance(entry.value, LLMResponse):
                    self.answers[entry.call_id] = entry.value
            elif isinstance(entry, UnheardEntry):
                self.answers[entry.call_id] = entry.answer
            elif isinstance(entry, StepEntry):
                request = asked.get(entry.call_id)
                if isinstance(request, LLMRequest):
                    self.requests.append((entry, request))
                else:
                    self.is_incomplete = True


def _past_step(entry: StepEntry, request: LLMRequest, action: LLMResponse | None, *, is_first: bool) -> PastStep:
    return PastStep(
        time_step=restart(request) if is_first else transition(request, entry.reward or 0.0),
        action=action,
        timestamp=entry.timestamp,
        policy_sec=entry.policy_sec,
        environment_sec=entry.environment_sec,
        activity=Activity(entry.container_sec, list(entry.commands)),
    )
