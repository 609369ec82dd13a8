"""The start of an episode by its recorded responses: they are given again up to a step.

It takes the place of a snapshot of that step, if there is none or the agent cannot continue from one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ares_exp.environment import PastStep, TimeStep
from ares_exp.errors import DivergenceError, SnapshotMismatchError
from ares_exp.llms.request import LLMRequest, MessageEdit
from ares_exp.llms.response import LLMResponse
from ares_exp.records.terminal_text import count_of
from ares_exp.tasks.task_contract import Task
from ares_exp.trajectories.recorded_responses import Exchange, RecordedResponses
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.request_diff import with_own

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment

logger = logging.getLogger(__name__)


class EpisodeStart(Protocol):
    """Where an episode goes on instead of start: a snapshot (`Continuation`), or `PlayedAgain`."""

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
    """An episode that gets recorded responses up to a step, from its start or from a snapshot."""

    def __init__(
        self,
        task_name: str,
        exchanges: Sequence[Exchange],
        step: int,
        *,
        seed: int,
        lineage: Mapping[str, Any],
        edits: Sequence[MessageEdit] = (),
        snapshot: EpisodeStart | None = None,
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
            edits: Edits of the conversation that the policy sees, recorded and new ones. A snapshot knows its own.
            snapshot: A snapshot of an earlier step to continue from; by default the episode starts from its start.
            report: Receives a message for the user if requests differ from the recorded ones.
        """
        self._task_name = task_name
        self._exchanges = exchanges
        self._step = step
        self._seed = seed
        self._lineage = lineage
        self._edits = tuple(edits)
        self._snapshot = snapshot
        self._report = report

    def __getstate__(self) -> dict[str, Any]:
        """Returns what crosses to another process, whose log takes the messages."""
        return {**self.__dict__, "_report": logger.warning}

    def prepare(self, episode: CodeEnvironment, tasks: Sequence[Task]) -> None:
        """Gives an environment its task; starts nothing.

        Raises:
            SnapshotMismatchError: The task is missing, or the snapshot does not fit.
        """
        if self._snapshot is not None:
            self._snapshot.prepare(episode, tasks)
            return
        task = next((task for task in tasks if task.name == self._task_name), None)
        if task is None:
            raise SnapshotMismatchError(f"Expected the task {self._task_name!r:.100}, which was recorded.")
        episode.current_task, episode.seed = task, self._seed
        episode.lineage, episode.edits = self._lineage, self._edits

    async def go_on(self, episode: CodeEnvironment) -> TimeStep[LLMRequest]:
        """Gives the responses up to the step; returns the pending time step.

        Raises:
            DivergenceError: It ends before that step, or requests more than was recorded.
            AgentError, ContainerError, SnapshotError: As the class says.
        """
        started = time.perf_counter()
        time_step = await (episode.start() if self._snapshot is None else self._snapshot.go_on(episode))
        first = episode.usage.step_count
        recorded = RecordedResponses(
            self._exchanges, used=first, normalisers=with_own(episode.setup.code_agent_factory.normalisers)
        )
        played = [_past_step(episode, time_step, None, started)]
        differing: list[int] = []
        for step in range(first, self._step + 1):
            assert time_step.observation is not None
            asked = serialize_llm_request(time_step.observation)
            exchange = recorded.next_for(asked)
            is_shown_as_it_was = all(edit.step != step for edit in self._edits)
            if exchange is not None and is_shown_as_it_was and not recorded.compare(exchange, asked, step).is_same:
                differing.append(step)
            if step == self._step:
                break
            if exchange is None or exchange.is_pending:
                raise self._diverged(step, "it asks more than was recorded of that conversation")
            recorded.use(asked)
            started = time.perf_counter()
            time_step = await episode.apply(exchange.answer)
            if time_step.last():
                raise self._diverged(step + 1, "it ended")
            played.append(_past_step(episode, time_step, exchange.answer, started))
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


def _past_step(
    episode: CodeEnvironment, time_step: TimeStep[LLMRequest], action: LLMResponse | None, started: float
) -> PastStep:
    return PastStep(
        time_step=time_step,
        action=action,
        timestamp=time.time(),
        policy_sec=None if action is None else 0.0,
        environment_sec=time.perf_counter() - started,
        activity=episode.seen.take(),
    )
