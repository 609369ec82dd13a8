"""The code environment: a task, a container and a code agent behind `reset`, `step` and `close`."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ares_exp.agents.code_agent import CodeAgentFactory, as_agent_factory
from ares_exp.containers.activity import Activity
from ares_exp.containers.container import Container, ContainerFactory, as_container_factory
from ares_exp.environment import (
    MAIN_LANE,
    EnvironmentBase,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    PastStep,
    PendingRequest,
    TimeStep,
    check_action,
    no_episode,
)
from ares_exp.environments.episode import Episode
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.episode_setup import EpisodeSetup
from ares_exp.environments.past_stage import results_of
from ares_exp.environments.task_choice import choose_task
from ares_exp.errors import ConfigError, EpisodeStateError, SnapshotTimingError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.task import Task, Verdict

if TYPE_CHECKING:
    from ares_exp.environments.playing_again import EpisodeStart
    from ares_exp.environments.restoring import Continuation
    from ares_exp.environments.source import EpisodeParts
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot


class CodeEnvironment(EnvironmentBase):
    """Plays tasks: each LLM request of the code agent is an observation, each LLM response an action.

    An episode starts a container, sets the task up, and lets the agent run to its first LLM request. A step hands the
    agent its response and waits for the next request. When the agent returns, or a limit cuts it short, the agent's
    commands are killed, the verifier scores the container, and the container is removed. Whenever it waits for an
    action the episode can be exported, restored elsewhere, and forked.
    """

    time_step: TimeStep[LLMRequest] | None = None
    activity: Activity | None = None

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        container_factory: ContainerFactory,
        code_agent_factory: CodeAgentFactory,
        limits: EpisodeLimits | None = None,
        seed: int = 0,
        provide_solution: bool = False,
        output_dir: Path | None = None,
        start_from: EpisodeStart | None = None,
        side_calls: LLMClient | None = None,
    ) -> None:
        """Touches nothing yet.

        Args:
            tasks: What `reset()` chooses from, by a generator seeded with `seed`.
            container_factory: Makes the container of an episode.
            code_agent_factory: Makes the agent of an episode.
            limits: When an episode is truncated; by default only by the task's own time limits.
            seed: Same seed, same tasks in the same order, and the same randomness for the agent.
            provide_solution: Puts the task's solution into the container and lifts the agent's limits on single
                commands: for the oracle.
            output_dir: Where the verifier's own files are kept, or `None`.
            start_from: What the first `reset()` goes on with, instead of starting an episode.
            side_calls: As of `EpisodeParts`.
        """
        if not tasks:
            raise ConfigError("Expected at least one task for the environment, got none.")
        self._tasks = list(tasks)
        self._setup = EpisodeSetup(
            as_container_factory(container_factory),
            as_agent_factory(code_agent_factory),
            limits or EpisodeLimits(),
            provide_solution,
            output_dir,
            side_calls,
        )
        self._random = random.Random(seed)
        self._seed = seed
        self._episodes = 0
        self._start_from = start_from
        self._episode: Episode | None = None
        self._holds_container = self._is_ordered = False
        self._calls = OneCallAtATime()
        self._requests_changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def for_episode(cls, task: Task, parts: EpisodeParts) -> Self:
        """The environment of one episode of a run."""
        return cls(
            [task],
            container_factory=parts.container_factory,
            code_agent_factory=parts.code_agent_factory,
            limits=parts.limits,
            seed=parts.seed,
            provide_solution=parts.provide_solution,
            output_dir=parts.output_dir,
            start_from=parts.start_from,
            side_calls=parts.side_calls,
        )

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[LLMRequest]:
        """Starts an episode; one under way is abandoned.

        Args:
            seed: Reseeds the choice of tasks.
            options: `{"task": name_or_index}` picks the task.

        Returns:
            FIRST; of an episode that goes on from a snapshot, the step at which that was taken.

        Raises:
            AgentError, ContainerError, SnapshotError: As the class says; nothing is left running.
            ConfigError: No such task.
        """
        with self._calls.during("reset()"):
            self._loop = asyncio.get_running_loop()
            self._requests_changed = asyncio.Event()
            self.time_step = None
            await self._release()
            if seed is not None:
                self._seed, self._episodes = seed, 0
                self._random.seed(seed)
            start_from, self._start_from = self._start_from, None
            try:
                if start_from is not None:
                    episode = self._taken(start_from.episode(self._setup, self._tasks))
                    self.time_step = await start_from.go_on(episode)
                else:
                    task = choose_task(self._tasks, options or {}, self._random)
                    episode = self._taken(Episode(self._setup, task, seed=self._next_agent_seed()))
                    self.time_step = await episode.begin()
            except BaseException:
                await self._release()
                raise
            finally:
                self._take_activity()
            return self.time_step

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        """Hands `action` to the agent and waits for its next request.

        `None` says that there was no answer before `time_left_sec` had passed: the episode is truncated.

        Returns:
            MID with the next request; LAST when the agent has returned (termination) or a limit was reached
            (truncation). Finishing on the very step that also reaches a limit is termination.

        Raises:
            EpisodeStateError: Before `reset()`, after LAST, or while another call is under way.
            AgentError, ContainerError, VerifierError: As the class says; nothing is left running.
            TypeError: `action` is something else than an `LLMResponse`; the episode goes on.
        """
        check_action(action)
        with self._calls.during("step()"):
            return await self._go_on("step()", lambda episode: episode.step(action))

    async def truncate(self, limit: LimitName) -> TimeStep[LLMRequest]:
        """Ends the episode, which waits for an action, because `limit` was reached.

        Returns:
            LAST with discount 1.0, and the verifier's reward if `verify_on_truncation` says so.

        Raises:
            EpisodeStateError, ContainerError, VerifierError: As `step`.
        """
        with self._calls.during("truncate()"):
            return await self._go_on("truncate()", lambda episode: episode.truncate(limit))

    async def _go_on(
        self, what: str, act: Callable[[Episode], Coroutine[Any, Any, TimeStep[LLMRequest]]]
    ) -> TimeStep[LLMRequest]:
        """Takes the episode under way to its next time step; it is released when that fails."""
        self._check_loop(what)
        if self._episode is None or self._episode.host is None:
            raise no_episode(ended=self._episode is not None)
        try:
            self.time_step = await act(self._episode)
        except BaseException:
            self.time_step = None
            await self._release()
            raise
        finally:
            self._take_activity()
        return self.time_step

    async def export_state(
        self, output_dir: str | Path, *, snapshot_id: str | None = None, sync: bool = False
    ) -> EnvironmentSnapshot:
        """Writes the episode, as it waits for an action, to a snapshot store. It goes on as if nothing had been.

        Args:
            output_dir: The store: a directory, made when missing. Snapshots in it share what they have in common.
            snapshot_id: Name of the snapshot, usable as a file name; made up by default.
            sync: Whether it must survive a power cut when this returns. It survives `kill -9` in any case.

        Returns:
            What was written to `output_dir/snapshot_id/snapshot.json`.

        Raises:
            SnapshotTimingError: The environment does not wait for an action.
            SnapshotUnsupportedError: The agent or the container cannot be captured.
            CaptureError: The container's files could not be read.
            SnapshotError: The store cannot be written, or has that name already.
            ContainerError: The container is gone.
        """
        from ares_exp.environments.exporting import export_episode

        with self._waiting_for_an_action("export_state()") as (episode, time_step):
            return await export_episode(episode, time_step, Path(output_dir), snapshot_id, sync=sync)

    @classmethod
    async def load_from_state(
        cls,
        snapshot: EnvironmentSnapshot | str | Path,
        *,
        container_factory: ContainerFactory | None = None,
        code_agent_factory: CodeAgentFactory | None = None,
        task: Task | None = None,
        limits: EpisodeLimits | None = None,
        output_dir: Path | None = None,
        start: bool = True,
    ) -> Self:
        """An environment that goes on where the snapshot was taken: `time_step` is pending, the next call is `step()`.

        No LLM call and no command is repeated: the container starts with the files that it had, and the agent is run
        against its journal.

        Args:
            snapshot: The snapshot, its directory, or its snapshot.json.
            container_factory: Makes the container; by default one of the recorded type and options. To be given where
                the recorded one opened a network.
            code_agent_factory: Makes the agent; by default one of the recorded kind, for the agents of this package.
            task: The task; by default read from where it was, which must not have changed. To be given where the
                episode had the task's solution.
            limits: When episodes are truncated; by default as recorded.
            output_dir: Where the verifier's own files are kept, or `None`.
            start: Whether it is restored now. If not, its first `reset()` does that, on the event loop where it is
                called, and returns the pending time step: for wrappers, whose users begin with `reset()`.

        Raises:
            SnapshotError: It cannot be read, does not fit, or the agent did not come to the same point; nothing is
                left running.
            ContainerError: The container could not be started.
        """
        from ares_exp.environments.recorded_setup import recorded_setup
        from ares_exp.environments.restoring import Continuation, read_snapshot

        found = await read_snapshot(snapshot)
        setup = recorded_setup(
            found, container_factory, code_agent_factory, limits, output_dir, is_task_given=task is not None
        )
        continuation = Continuation(found, task=task)
        await asyncio.to_thread(lambda: continuation.task)
        environment = cls._going_on(setup, continuation)
        if start:
            await environment.reset()
        return environment

    async def fork(self, n: int, *, diversify: bool = False) -> list[Self]:
        """Environments that each go on from here, by themselves and at the same time; this one does, too.

        Args:
            n: How many.
            diversify: Whether the agent of each draws other random values from here on. What the policy draws is its
                own affair.

        Raises:
            ConfigError: `n` is less than 1.
            SnapshotError, ContainerError: As `export_state` and `load_from_state`; none is left running.
        """
        from ares_exp.environments.forking import fork_episode

        if n < 1:
            raise ConfigError(f"Expected fork() to make at least 1 environment, got {n}.")
        with self._waiting_for_an_action("fork()") as (episode, time_step):
            return await fork_episode(episode, time_step, n, self._going_on, diversify=diversify)

    @classmethod
    def _going_on(cls, setup: EpisodeSetup, continuation: Continuation) -> Self:
        """An environment whose first `reset()` goes on with an episode."""
        return cls(
            [continuation.task],
            container_factory=setup.container_factory,
            code_agent_factory=setup.code_agent_factory,
            limits=setup.limits,
            provide_solution=setup.provide_solution,
            output_dir=setup.output_dir,
            start_from=continuation,
            side_calls=setup.side_calls,
        )

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The time steps of the running episode, the pending one last, those before a snapshot included.

        Empty for an agent that is not deterministic, but right after its recorded answers were given again.
        """
        from ares_exp.environments.past_steps import past_steps

        return past_steps(self._episode) if self._episode is not None else ()

    @property
    def step_count(self) -> int:
        """Time steps of the episode since FIRST: `step()` was called as often."""
        return self._episode.usage.step_count if self._episode is not None else 0

    @property
    def current_task(self) -> Task | None:
        """The task of the episode."""
        return self._episode.task if self._episode is not None else None

    @property
    def truncated_by(self) -> LimitName | None:
        """The limit that cut the episode short."""
        return self._episode.truncated_by if self._episode is not None else None

    @property
    def verdict(self) -> Verdict | None:
        """What the verifier said of the episode."""
        return self._episode.verdict if self._episode is not None else None

    @property
    def lineage(self) -> Mapping[str, Any]:
        """Where the episode was branched off; empty for one that was begun."""
        return self._episode.lineage if self._episode is not None else {}

    def report(self) -> EpisodeReport:
        """Facts about the episode; see `EpisodeReport`."""
        episode = self._episode
        agent = self._setup.code_agent_factory.name
        if episode is None:
            return EpisodeReport(agent=agent)
        return EpisodeReport(
            task_name=episode.task.name,
            agent=agent,
            format_errors=episode.format_errors,
            agent_facts=episode.agent_facts,
            truncated_by=episode.truncated_by,
            limit_note=episode.limit_note,
            rewards=dict(episode.verdict.rewards) if episode.verdict is not None else {},
            note=episode.verdict.note if episode.verdict is not None else None,
            stages=results_of(episode.task, episode.past_stages),
            phase=episode.clock.phase,
            phase_sec=dict(episode.clock.seconds),
            has_container=episode.container is not None,
            container_image=episode.container_image,
            lineage=episode.lineage,
            edits=episode.edits,
        )

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """The LLM calls that the agent awaits: the observation, then the others in the order in which it made them."""
        if self._episode is None or self._episode.host is None or self.time_step is None:
            return ()
        return tuple(
            PendingRequest(call_id, MAIN_LANE if request.origin is None else request.origin.lane, request)
            for call_id, request in self._episode.pending_requests()
        )

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until the agent awaits other LLM calls than `known`, and returns them; see `pending_requests`."""
        while True:
            self._requests_changed.clear()
            pending = self.pending_requests()
            if [call.call_id for call in pending] != [call.call_id for call in known]:
                return pending
            await self._requests_changed.wait()

    def hold_container(self) -> None:
        """Has the container of each episode kept at LAST, until `release_container()`, `reset()` or `close()`."""
        self._holds_container = True

    @property
    def held_container(self) -> Container | None:
        """The container of the episode that reached LAST, if it is kept."""
        is_over = self.time_step is not None and self.time_step.last()
        return self._episode.container if self._episode is not None and is_over else None

    async def release_container(self) -> None:
        """Removes the kept container. Idempotent."""
        if self.held_container is not None:
            await self._release()

    @property
    def num_stages(self) -> int:
        """Number of finished stages; 0 for a single-stage task."""
        episode = self._episode
        return len(episode.past_stages) if episode is not None and len(episode.task.stages) > 1 else 0

    def keeps(self, limits: object) -> bool:
        """Whether they are the limits that it was made with."""
        return limits == self._setup.limits

    def end_early(self) -> None:
        """Ends the episode, scored as it is, after the running step or at the next `step(None)`."""
        self._is_ordered = True
        if self._episode is not None:
            self._episode.is_ordered = True

    def check_start(self) -> None:
        """Whether the task and the agent are those of the snapshot that the first `reset()` goes on with. Blocking.

        Raises:
            SnapshotError: They are not.
        """
        if self._start_from is not None:
            self._start_from.episode(self._setup, self._tasks)

    @property
    def time_left_sec(self) -> float | None:
        """Seconds that the agent's time limit leaves; `None` without a limit, or with no episode under way."""
        host = self._episode.host if self._episode is not None else None
        return host.time_left_sec if host is not None else None

    def grant_time(self, seconds: float) -> None:
        """Moves the agent's time limit by what was spent on something else than the episode, such as a snapshot."""
        if self._episode is not None:
            self._episode.grant_time(seconds)

    async def close(self) -> None:
        """Cancels the agent and removes the container. Idempotent. A LAST `time_step` stays readable."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        await self._release()

    def _taken(self, episode: Episode) -> Episode:
        """Makes an episode the one that is played."""
        self._episode = episode
        episode.on_requests = self._requests_changed.set
        episode.holds_container, episode.is_ordered = self._holds_container, self._is_ordered
        return episode

    async def _release(self) -> None:
        if self._episode is not None:
            await self._episode.release()

    def _take_activity(self) -> None:
        if self._episode is not None:
            self.activity = self._episode.activity.take()

    def _next_agent_seed(self) -> int:
        self._episodes += 1
        digest = hashlib.sha256(f"{self._seed}/{self._episodes}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    def _check_loop(self, what: str) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise EpisodeStateError(
                f"{what} on another event loop than the one that reset the environment, where its agent runs: call it "
                "there. Behind a GymWrapper that is `gym.loop_thread.run(…)`."
            )

    @contextmanager
    def _waiting_for_an_action(self, what: str) -> Iterator[tuple[Episode, TimeStep[LLMRequest]]]:
        """The episode and its pending time step, with every other call refused meanwhile."""
        episode, time_step, busy = self._episode, self.time_step, self._calls.under_way
        if busy or episode is None or episode.host is None or time_step is None or time_step.last():
            state = (
                f"{busy} is under way"
                if busy
                else "it has not been reset"
                if episode is None
                else "its episode has ended"
            )
            raise SnapshotTimingError(f"{what} needs an environment that waits for an action, but {state}.")
        with self._calls.during(what):
            self._check_loop(what)
            yield episode, time_step
