"""The time steps of an episode so far, read from its journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ares_exp.agents.runtime.journal import CallEntry, DoneEntry, Journal, StepEntry, UnheardEntry
from ares_exp.containers.activity import Activity
from ares_exp.environment import PastStep, restart, transition
from ares_exp.llms.request import LLMRequest, edited
from ares_exp.llms.response import LLMResponse

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment


def past_steps(episode: CodeEnvironment) -> Sequence[PastStep]:
    """Returns all time steps of a running episode, the pending one last; empty when its journals do not tell.

    What an episode without a journal has played before it was handed over is known until its next step.
    """
    if len(episode.played) == episode.step_count + 1:
        return episode.played
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
    """The time steps in the journal of one agent.

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
