"""The start of an episode by its recorded answers: replayed up to a step, in a fresh container.

It takes the place of a snapshot where the agent cannot go on from one: a program in the container, say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ares_exp.environment import PastStep, TimeStep
from ares_exp.errors import DivergenceError, SnapshotMismatchError
from ares_exp.llms.message_edit import MessageEdit
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.resume.answer_log import Exchange
from ares_exp.tasks.task import Task
from ares_exp.terminal.terminal import count_of
from ares_exp.trajectories.normalisers import with_own
from ares_exp.trajectories.recorded_lanes import RecordedLanes
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.request_diff import Match, RequestComparison

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment

logger = logging.getLogger(__name__)


class EpisodeStart(Protocol):
    """Where an episode goes on instead of beginning: a snapshot (`Continuation`), or `PlayedAgain`."""

    def prepare(self, episode: CodeEnvironment, tasks: Sequence[Task]) -> None:
        """Gives an environment its task and the recorded state of the episode; starts nothing.

        Args:
            episode: The environment.
            tasks: Its tasks.

        Raises:
            SnapshotMismatchError: It does not fit.
        """
        ...

    async def go_on(self, episode: CodeEnvironment) -> TimeStep[LLMRequest]:
        """Starts it, and returns the pending time step. It is to be released when this raises."""
        ...


class PlayedAgain:
    """An episode that is played from its beginning with recorded answers, each to the next request of its lane."""

    def __init__(
        self,
        task_name: str,
        exchanges: Sequence[Exchange],
        step: int,
        *,
        seed: int,
        lineage: Mapping[str, Any],
        edits: Sequence[MessageEdit] = (),
        report: Callable[[str], None],
    ) -> None:
        """Keeps the arguments.

        Args:
            task_name: The task that was played.
            exchanges: What was asked and answered, those of later steps too: conversations side by side come in
                another order each time.
            step: How many answers are given.
            seed: The recorded seed.
            lineage: The origin, for its trajectory.
            edits: Of the conversation that the policy sees: those that it was recorded with, and new ones.
            report: Receives a message for the user where it asks something else than recorded.
        """
        self._task_name = task_name
        self._exchanges = exchanges
        self._step = step
        self._seed = seed
        self._lineage = lineage
        self._edits = tuple(edits)
        self._report = report

    def __getstate__(self) -> dict[str, Any]:
        """Returns what crosses to another process, whose log takes the messages."""
        return {**self.__dict__, "_report": logger.warning}

    def prepare(self, episode: CodeEnvironment, tasks: Sequence[Task]) -> None:
        """Gives an environment its task; starts nothing.

        Raises:
            SnapshotMismatchError: The task is missing.
        """
        task = next((task for task in tasks if task.name == self._task_name), None)
        if task is None:
            raise SnapshotMismatchError(f"Expected the task {self._task_name!r:.100}, which was recorded.")
        episode.current_task, episode.seed = task, self._seed
        episode.lineage, episode.edits = self._lineage, self._edits

    async def go_on(self, episode: CodeEnvironment) -> TimeStep[LLMRequest]:
        """Plays it up to the step; returns the pending time step.

        Raises:
            DivergenceError: It ends before, or asks more than was recorded.
            AgentError, ContainerError: As the class says.
        """
        normalisers = with_own(episode.setup.code_agent_factory.normalisers)
        comparison, left = RequestComparison(normalisers), RecordedLanes(self._exchanges)
        differing: list[int] = []
        began = time.perf_counter()
        time_step = await episode.begin()
        played = [_past_step(episode, time_step, None, began)]
        for step in range(self._step + 1):
            assert time_step.observation is not None
            asked = serialize_llm_request(time_step.observation)
            exchange = left.next_of(asked, lambda old, new: _is_same(RequestComparison(normalisers), old, new))
            is_shown_as_it_was = all(edit.step != step for edit in self._edits)
            if exchange is not None and is_shown_as_it_was and not _is_same(comparison, exchange.request, asked):
                differing.append(step)
            if step == self._step:
                break
            if exchange is None or exchange.answer is None:
                raise self._diverged(step, "it asks more than was recorded of that conversation")
            left.use(asked)
            began = time.perf_counter()
            time_step = await episode.apply(exchange.answer)
            if time_step.last():
                raise self._diverged(step + 1, "it ended")
            played.append(_past_step(episode, time_step, exchange.answer, began))
        episode.played = tuple(played)
        if differing:
            self._report(
                f"Played again up to step {self._step}, the episode differs from the recorded one in "
                f"{count_of(len(differing), 'request')}, from step {differing[0]} on. It goes on from what it is now."
            )
        return time_step

    def _diverged(self, step: int, why: str) -> DivergenceError:
        return DivergenceError(
            f"Played again with the recorded answers, the episode did not come to step {self._step}: at step {step} "
            f"{why}.",
            step=step,
            why=why,
        )


def _is_same(comparison: RequestComparison, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    return comparison.compare(0, recorded, asked).match in (Match.EXACT, Match.NORMALISED)


def _past_step(
    episode: CodeEnvironment, time_step: TimeStep[LLMRequest], action: LLMResponse | None, began: float
) -> PastStep:
    return PastStep(
        time_step=time_step,
        action=action,
        timestamp=time.time(),
        policy_sec=None if action is None else 0.0,
        environment_sec=time.perf_counter() - began,
        activity=episode.seen.take(),
    )
