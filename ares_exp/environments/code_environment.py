"""The code environment, which combines a task, a container and a code agent behind `reset`, `step` and `close`.

A single class contains the whole life cycle of an episode, because `close` must release the episode at every point.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ares_exp.agents.code_agent import CodeAgentFactory, as_agent_factory
from ares_exp.agents.runtime.journal import Journal, JournalEncoder, StepEntry
from ares_exp.cancellation import finish
from ares_exp.containers.activity import Activity, BackgroundRequest
from ares_exp.containers.container import (
    Container,
    ContainerFactory,
    ContainerSpec,
    SnapshottableContainer,
    as_container_factory,
)
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.environment import (
    MAIN_CONVERSATION,
    EnvironmentBase,
    EpisodeReport,
    LimitName,
    OneCallAtATime,
    PastStep,
    PendingRequest,
    TimeStep,
    check_action,
    no_episode,
    restart,
    termination,
    transition,
    truncation,
)
from ares_exp.environments.agent_host import AgentHost, AgentState, TimeIsUpError
from ares_exp.environments.episode_limits import EpisodeLimits, PhaseClock
from ares_exp.environments.past_stage import PastStage, past_steps, results_of, verdict_of
from ares_exp.environments.scoring.episode_scoring import Scoring, collect_on_abort
from ares_exp.environments.source import EpisodeParts, choose_task
from ares_exp.errors import (
    AgentExitError,
    ConfigError,
    EpisodeStateError,
    RepeatedFormatError,
    SnapshotTimingError,
    SnapshotUnsupportedError,
)
from ares_exp.llms.request import LLMClient, LLMRequest, MessageEdit, edited
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EpisodeUsage
from ares_exp.tasks.task_contract import AgentContext, Stage, Task, Verdict

if TYPE_CHECKING:
    from ares_exp.environments.restoring import EpisodeStart
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot


class CodeEnvironment(EnvironmentBase):
    """Runs tasks. Each LLM request of the code agent is an observation, and each LLM response is an action.

    `reset` starts a container, sets up the task, and runs the agent until its first LLM request. `step` passes the
    response to the agent and waits for the next request. When the agent returns or a limit is reached, the agent's
    commands are killed. The verifier then scores the state of the container, and the container is removed. While the
    episode waits for an action, you can export it, restore it in another environment, or fork it.

    Attributes:
        setup: Factories, limits and other settings from which the episode is made.
        time_step, current_task, activity: See `EnvironmentBase`.
        truncated_by, limit_note, container_image, lineage, edits: See `EpisodeReport`.
        seed: Seed of the random values of the agent.
        usage: Steps, tokens and cost of the episode, including the steps before a snapshot.
        verdict: Combined result of the verifiers; `None` until they have run.
        past_stages: The finished stages.
        ran: If the episode started with a replay of recorded responses, the replayed time steps. The last one is the
            pending step.
        clock: The current phase, and the seconds in each phase.
        seen: The agent's activity in the container since the last time step.
        container: The running container; `None` before and after the episode.
        host: The agent host; `None` before and after the episode.
        encoder: Encoder that converts the agent's journal to the lines of a snapshot.
        on_release: Function that is awaited once, after the agent and the container were released.
    """

    time_step: TimeStep[LLMRequest] | None = None
    current_task: Task | None = None
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
        background_client: LLMClient | None = None,
    ) -> None:
        """Creates the environment, without starting anything.

        Args:
            tasks: Tasks from which `reset()` chooses at random.
            container_factory: Factory of the containers.
            code_agent_factory: Factory of the agents.
            limits: Limits that truncate an episode; by default only the task's own time limits.
            seed: Seed for choosing tasks, and for the agent's random values.
            provide_solution: See `EpisodeParts`. The commands of a solution have no individual time limits.
            output_dir: Directory for the verifier's files, or `None`.
            start_from: Recorded episode that the first `reset()` continues, instead of starting a new one.
            background_client: See `EpisodeParts`.

        Raises:
            ConfigError: `tasks` is empty.
        """
        if not tasks:
            raise ConfigError("Expected at least one task for the environment, got none.")
        self._tasks = list(tasks)
        self._setup = self.setup = EpisodeParts(
            container_factory=as_container_factory(container_factory),
            code_agent_factory=as_agent_factory(code_agent_factory),
            limits=limits or EpisodeLimits(),
            seed=seed,
            provide_solution=provide_solution,
            output_dir=output_dir,
            background_client=background_client,
        )
        self._random = random.Random(seed)
        self._env_seed = seed
        self._episodes = 0
        self._start_from = start_from
        self._holds_container = False
        self._calls = OneCallAtATime()
        self._requests_changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clear()

    def _clear(self) -> None:
        """Clears the state of the last episode."""
        self.setup = self._setup
        self.time_step = self.current_task = self.activity = None
        self.seed = 0
        self.usage = EpisodeUsage()
        self.truncated_by: LimitName | None = None
        self.limit_note: str | None = None
        self.verdict: Verdict | None = None
        self.past_stages: list[PastStage] = []
        self.ran: tuple[PastStep, ...] = ()
        self.clock = PhaseClock()
        self.seen = Activity()
        self.lineage: Mapping[str, Any] = {}
        self.edits: tuple[MessageEdit, ...] = ()
        self.container: Container | None = None
        self.container_image: str | None = None
        self.host: AgentHost | None = None
        self.encoder = JournalEncoder()
        self.on_release: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._hosts: list[AgentHost] = []
        self._solution_env: Mapping[str, str] = {}
        self._scoring: Scoring | None = None
        self._stepped_at = 0.0
        self._is_released = False

    @classmethod
    def for_episode(cls, task: Task, parts: EpisodeParts) -> Self:
        """Makes the environment of one episode of a run from its parts."""
        return cls(
            [task],
            container_factory=parts.container_factory,
            code_agent_factory=parts.code_agent_factory,
            limits=parts.limits,
            seed=parts.seed,
            provide_solution=parts.provide_solution,
            output_dir=parts.output_dir,
            start_from=parts.start_from,
            background_client=parts.background_client,
        )

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[LLMRequest]:
        """Starts an episode; see `EnvironmentBase.reset`.

        Returns:
            The FIRST step. If the environment continues a recorded episode, the step from which the episode continues.

        Raises:
            AgentError, ContainerError, SnapshotError: The episode could not start. Nothing is left running.
            ConfigError: `options` names a task that does not exist, or contains an unknown key.
        """
        with self._calls.during("reset()"):
            self._loop = asyncio.get_running_loop()
            self._requests_changed = asyncio.Event()
            self.time_step = None
            await self._release()
            self._clear()
            if seed is not None:
                self._env_seed, self._episodes = seed, 0
                self._random.seed(seed)
            start_from, self._start_from = self._start_from, None
            try:
                if start_from is not None:
                    start_from.prepare(self, self._tasks)
                    self.time_step = await start_from.go_on(self)
                else:
                    self.current_task = choose_task(self._tasks, options or {}, self._random)
                    self._episodes += 1
                    digest = hashlib.sha256(f"{self._env_seed}/{self._episodes}".encode()).digest()
                    self.seed = int.from_bytes(digest[:8], "big")
                    self.time_step = await self.start()
            except BaseException:
                await self._release()
                raise
            finally:
                self.activity = self.seen.take()
            return self.time_step

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        """Passes `action` to the agent and waits for its next request.

        The action `None` means that the policy did not respond in time; see `MinimalEnvironment.step`.

        Returns:
            MID step with the next request. LAST step if the agent has ended (termination) or a limit was reached
            (truncation). If the agent ends in the same step that reaches a limit, the episode terminates.

        Raises:
            EpisodeStateError: `step` was called before `reset()`, after LAST, or during another call.
            AgentError, ContainerError, VerifierError: The agent, the container or the verifier failed. Nothing is left
                running.
            TypeError: `action` is neither an `LLMResponse` nor `None`; the episode continues.
        """
        check_action(action, may_be_none=True)
        return await self._go_on("step()", lambda: self.apply(action))

    async def truncate(self, limit: LimitName) -> TimeStep[LLMRequest]:
        """Ends an episode that waits for an action; see `EnvironmentBase.truncate`."""

        async def end() -> TimeStep[LLMRequest]:
            self.truncated_by = limit
            last = await self._end_stage(ends_episode=True)
            assert last is not None
            return last

        return await self._go_on("truncate()", end)

    async def _go_on(
        self, what: str, act: Callable[[], Coroutine[Any, Any, TimeStep[LLMRequest]]]
    ) -> TimeStep[LLMRequest]:
        """Calls `act`, which returns the episode's next time step. If `act` fails, releases the episode.

        `what` is the name of the public method for error messages, such as `step()`.
        """
        with self._calls.during(what):
            if self._loop is not asyncio.get_running_loop():
                self._check_loop(what)
            if self.host is None:
                raise no_episode(ended=self.current_task is not None)
            try:
                self.time_step = await act()
            except BaseException:
                self.time_step = None
                await self._release()
                raise
            finally:
                self.activity = self.seen.take()
            return self.time_step

    async def export_state(
        self, output_dir: str | Path, *, snapshot_id: str | None = None, sync: bool = False
    ) -> EnvironmentSnapshot:
        """Saves a snapshot of an episode that waits for an action; see `EnvironmentBase.export_state`.

        With `sync=True`, the snapshot also survives a power cut after this call. Without it, the snapshot still
        survives `kill -9` of this process.

        Raises:
            SnapshotTimingError: The environment is not waiting for an action.
            SnapshotUnsupportedError: The agent or the container cannot be captured.
            CaptureError: The container's files could not be read.
            SnapshotError: `output_dir` cannot be written, or already contains a snapshot with this id.
            ContainerError: The container no longer exists.
        """
        from ares_exp.environments.exporting import export_episode

        with self._waiting_for_an_action("export_state()") as time_step:
            return await export_episode(self, time_step, Path(output_dir), snapshot_id, sync=sync)

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
        """Makes an environment that continues an episode from a snapshot.

        The container starts with the files in the snapshot, and the agent gets the recorded results of its calls. No
        LLM call and no command is repeated. Afterwards, `time_step` is the recorded step, so the next call is `step()`.

        Args:
            snapshot: The snapshot, its directory, or its snapshot.json.
            container_factory: Factory of the container; by default a factory with the recorded type and options.
                Required if the recorded factory allowed a network.
            code_agent_factory: Factory of the agent; by default the recorded factory. Required if no option of the
                group `agent` creates this factory.
            task: The task; by default read from its recorded path, where it must be unchanged. Required if the episode
                ran the task's solution (`policy=oracle`).
            limits: Limits that truncate episodes; by default the recorded limits.
            output_dir: Directory for the verifier's files, or `None`.
            start: Whether the episode is restored in this call. If not, the first `reset()` restores the episode and
                returns the pending time step. Use `False` for an environment in a wrapper that calls `reset()` itself.

        Raises:
            SnapshotError: The snapshot cannot be read or does not match the arguments, or the agent did not reach the
                recorded point. Nothing is left running.
            ContainerError: The container could not be started.
        """
        from ares_exp.environments.restoring import Continuation, read_snapshot, recorded_setup

        found = await read_snapshot(snapshot)
        setup = recorded_setup(
            found, container_factory, code_agent_factory, limits, output_dir, is_task_given=task is not None
        )
        continuation = Continuation(found, task=task)
        await asyncio.to_thread(lambda: continuation.task)
        environment = cls.for_episode(continuation.task, replace(setup, start_from=continuation))
        if start:
            await environment.reset()
        return environment

    async def fork(self, n: int, *, diversify: bool = False) -> list[Self]:
        """Makes independent environments that continue from the current step; see `EnvironmentBase.fork`.

        Raises:
            ConfigError: `n` is less than 1.
            SnapshotError, ContainerError: A fork failed (see `export_state` and `load_from_state`). No fork is left
                running.
        """
        from ares_exp.environments.exporting import fork_episode

        if n < 1:
            raise ConfigError(f"Expected fork() to make at least 1 environment, got {n}.")
        with self._waiting_for_an_action("fork()") as time_step:
            return await fork_episode(self, time_step, n, diversify=diversify)

    @property
    def past_steps(self) -> Sequence[PastStep]:
        """The time steps of the running episode, including steps before a snapshot. The pending step is last.

        Empty for an agent that is not deterministic, except directly after a replay of recorded responses.
        """
        return past_steps(self) if self.current_task is not None else ()

    @property
    def step_count(self) -> int:
        """Number of `step()` calls in the episode."""
        return self.usage.step_count

    def report(self) -> EpisodeReport:
        """Returns facts about the episode; see `EpisodeReport`."""
        task, verdict = self.current_task, self.verdict
        facts = [host.agent_facts for host in self._hosts if host.agent_facts is not None]
        return EpisodeReport(
            task_name=task.name if task is not None else None,
            agent=self._setup.code_agent_factory.name,
            format_errors=sum(host.format_errors for host in self._hosts),
            agent_facts=sum(facts[1:], start=facts[0]) if facts else None,
            truncated_by=self.truncated_by,
            limit_note=self.limit_note,
            rewards=dict(verdict.rewards) if verdict is not None else {},
            note=verdict.note if verdict is not None else None,
            stages=results_of(task, self.past_stages) if task is not None else (),
            phase=self.clock.phase,
            phase_sec=dict(self.clock.seconds),
            has_container=self.container is not None,
            container_image=self.container_image,
            lineage=self.lineage,
            edits=self.edits,
        )

    def pending_requests(self) -> tuple[PendingRequest, ...]:
        """Returns all LLM requests that wait for a response, the observation first.

        The other requests follow in the order in which the agent sent them. There is more than one request only if the
        agent sends requests concurrently.
        """
        requests = []
        for call in self.host.pending if self.host is not None and self.time_step is not None else ():
            request = edited(call.arguments, self.edits, self.step_count)
            name = MAIN_CONVERSATION if request.origin is None else request.origin.conversation
            requests.append(PendingRequest(call.call_id, name, request))
        return tuple(requests)

    async def changed_requests(self, known: Sequence[PendingRequest]) -> tuple[PendingRequest, ...]:
        """Waits until the pending LLM requests differ from `known`, and returns them; see `pending_requests`."""
        while True:
            self._requests_changed.clear()
            pending = self.pending_requests()
            if [call.call_id for call in pending] != [call.call_id for call in known]:
                return pending
            await self._requests_changed.wait()

    def hold_container(self) -> None:
        """Keeps the container after an episode reaches LAST, until `release_container()`, `reset()` or `close()`."""
        self._holds_container = True

    @property
    def held_container(self) -> Container | None:
        """The container of an episode that reached LAST, if it is kept; otherwise `None`."""
        return self.container if self.time_step is not None and self.time_step.last() else None

    async def release_container(self) -> None:
        """Removes the container that `hold_container` has kept. Idempotent."""
        if self.held_container is not None:
            await self._release()

    @property
    def num_stages(self) -> int:
        """Number of finished stages; 0 for a single-stage task."""
        task = self.current_task
        return len(self.past_stages) if task is not None and len(task.stages) > 1 else 0

    def keeps(self, limits: object) -> bool:
        """Returns whether this environment itself enforces `limits`, so that no wrapper has to."""
        return limits == self._setup.limits

    def check_start(self) -> None:
        """Raises `SnapshotError` if the task or agent differs from the episode that `reset` will continue. Blocking."""
        if self._start_from is not None:
            self._start_from.prepare(self, self._tasks)

    @property
    def time_left_sec(self) -> float | None:
        """Seconds until the agent's time limit; `None` if no limit is set or no episode is running."""
        return self.host.time_left_sec if self.host is not None else None

    def grant_time(self, seconds: float) -> None:
        """Extends the agent's time limit; see `EnvironmentBase.grant_time`."""
        self._stepped_at += seconds
        if self.host is not None:
            self.host.grant_time(seconds)

    async def close(self) -> None:
        """Cancels the agent and removes the container. Idempotent. A LAST `time_step` stays available."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        await self._release()

    def _check_loop(self, what: str) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise EpisodeStateError(
                f"{what} was called on a different event loop than reset(). Call both on the same loop. "
                "With a GymWrapper, use `gym.loop_thread.run(…)`."
            )

    @contextmanager
    def _waiting_for_an_action(self, what: str) -> Iterator[TimeStep[LLMRequest]]:
        """Yields the pending time step. While the block runs, a concurrent `step()` or similar call is rejected.

        Raises `SnapshotTimingError` if no time step is pending. `what` is the calling method for messages (`fork()`).
        """
        time_step, busy = self.time_step, self._calls.in_progress
        if busy or self.host is None or time_step is None or time_step.last():
            state = "it has not been reset" if self.current_task is None else "its episode has ended"
            state = f"{busy} is running" if busy else state
            raise SnapshotTimingError(
                f"{what} can be called only while the environment waits for an action, but {state}."
            )
        with self._calls.during(what):
            self._check_loop(what)
            yield time_step

    # The life of an episode. The public members below are for `exporting.py`, `past_stage.py` and `restoring.py`.

    @property
    def task(self) -> Task:
        """Task of the running episode."""
        assert self.current_task is not None
        return self.current_task

    async def start(self) -> TimeStep[LLMRequest]:
        """Starts a new episode: starts the container and the agent, waits for the first request, and returns FIRST.

        Raises:
            AgentError, ContainerError: The agent or the container failed. The caller must release the episode.
        """
        started = time.perf_counter()
        container = await self._start_container()
        with self.clock.during("start"), self.seen.timed():
            await self.task.set_up(container)
        await self._start_stage(container)
        time_step = restart(self.pending_request())
        self._note_step(time_step, None, started)
        return time_step

    @property
    def stage(self) -> Stage:
        """The running stage; after the episode, the last stage."""
        return self.task.stages[min(len(self.past_stages), len(self.task.stages) - 1)]

    async def _start_stage(self, container: Container) -> None:
        """Prepares the container for the current stage, and runs a new agent until its first request."""
        self._refuse_if_released()
        self._scoring, stage = None, self.stage
        with self.clock.during("start"), self.seen.timed():
            await stage.start(container)
            self._refuse_if_released()
            if self.setup.provide_solution:
                self._solution_env = await stage.upload_solution(container)
            await container.set_network(stage.agent_network)  # until the end of the stage
        self._refuse_if_released()
        is_journaled = self.setup.code_agent_factory.deterministic
        number = len(self.past_stages)
        seed = zlib.crc32(f"{self.seed}/{number}".encode()) if number else self.seed
        journal = Journal(time.time(), seed) if is_journaled else None
        host = self.host = self._make_host(container, journal)
        with self.clock.during("agent"), self._unless_released():
            host.start(
                self.setup.code_agent_factory,
                stage.instruction,
                timeout_sec=self.setup.limits.time.agent(stage),
                context=self._context(number),
            )
            await host.first_request()

    def _context(self, stage: int) -> AgentContext:
        """Returns the parts of the task that the agent of a stage gets in addition to the instruction.

        `stage` is the number of the stage, from 0. Only the agent of stage 0 gets the task's initial conversation.
        """
        context = AgentContext() if self.setup.provide_solution else self.task.context
        return replace(context, messages=()) if stage else context

    async def restore(
        self, changes: StoredChanges, journal: Journal | None, *, elapsed_sec: float, state: AgentState | None
    ) -> None:
        """Starts the container with the files in `changes`, and restores the agent.

        The agent is replayed from `journal` or, if `journal` is `None`, restored from `state`. `elapsed_sec` is the
        part of the agent's time limit that is already used. After an exception, the caller must release the episode.
        """
        if self.setup.provide_solution:
            self._solution_env = self.stage.solution_env()
        container = await self._start_container(changes)
        with self.clock.during("start"):
            await container.set_network(self.stage.agent_network)
        if not isinstance(container, SnapshottableContainer):
            raise SnapshotUnsupportedError(
                f"A container of {self.setup.container_factory.name!r} cannot be started with files from a snapshot."
            )
        await self._rerun_finished_stages(container)
        host = self.host = self._make_host(container, journal)
        host.restore(
            self.setup.code_agent_factory,
            self.stage.instruction,
            timeout_sec=self.setup.limits.time.agent(self.stage),
            context=self._context(len(self.past_stages)),
            elapsed_sec=elapsed_sec,
            state=state,
        )
        if host.observed is None:
            with self._unless_released():
                await host.first_request()
        self._stepped_at = time.perf_counter()

    async def _rerun_finished_stages(self, container: Container) -> None:
        """Replays the agents of finished stages to get the LLM requests, which a snapshot stores only as digests."""
        for number, (stage, past) in enumerate(zip(self.task.stages, self.past_stages, strict=False)):
            if past.journal is None or not any(past.journal.steps()):
                continue
            host = self._make_host(container, past.journal)
            try:
                host.rerun_finished_stage(
                    self.setup.code_agent_factory, stage.instruction, context=self._context(number)
                )
            finally:
                await host.cancel()

    async def apply(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        """Does the work of `step`. After an exception, the caller must release the episode."""
        started = time.perf_counter()
        policy_sec = started - self._stepped_at
        host, container, is_over = self.host, self.container, True
        assert host is not None
        assert container is not None
        with self.clock.during("agent"):
            self.usage.add(action)
            try:
                host.respond(action)
                with self._unless_released():
                    request = await host.next_request()
                if request is not None:
                    self.truncated_by = self.setup.limits.reached(self.usage)
                is_over = request is None or self.truncated_by is not None
            except TimeIsUpError:
                self.truncated_by = "time"
            except RepeatedFormatError:
                self.truncated_by = "format_errors"
            except AgentExitError as error:
                self.truncated_by, self.limit_note = "agent_exit", str(error)
        if is_over:
            last = await self._end_stage()
            if last is not None:
                return last
            await self._start_stage(container)
        time_step = transition(self.pending_request())
        self._note_step(time_step, policy_sec, started)
        return time_step

    async def _release(self) -> None:
        """Cancels the agent and removes all containers of the episode, even if the caller is cancelled.

        If the stage was not scored, saves its artifacts and the agent's files first.
        """
        self._is_released = True
        host, self.host = self.host, None
        container, self.container = self.container, None
        on_release, self.on_release = self.on_release, None
        try:
            if self._scoring is None and host is not None and container is not None and self.setup.output_dir:
                await collect_on_abort(
                    self.stage, host, container, self.setup.output_dir, agent_files_dir=self._agent_files_dir
                )
        finally:
            try:
                if host is not None or container is not None:
                    await finish(_tear_down(host, container, self._scoring))
            finally:
                if on_release is not None:
                    await finish(on_release())

    @property
    def container_spec(self) -> ContainerSpec:
        """Specification of the task's container, with the time limits of the episode."""
        return self.setup.limits.time.container_spec(self.task)

    @property
    def _agent_files_dir(self) -> str | None:
        return None if self.setup.provide_solution else self.setup.code_agent_factory.files_dir

    async def _start_container(self, changes: StoredChanges | None = None) -> Container:
        self._refuse_if_released()
        mounts = () if self.setup.provide_solution else self.setup.code_agent_factory.mounts
        spec = replace(self.container_spec, mounts=mounts, changes=changes)
        container = self.container = self.setup.container_factory(spec)
        with self.clock.during("start"), self.seen.timed():
            try:
                await container.start()
                self.container_image = container.image
            finally:
                if self._is_released:
                    await finish(container.stop())
            self._refuse_if_released()
        return container

    def _refuse_if_released(self) -> None:
        """Raises `EpisodeStateError` if `close()` was called while another call was running."""
        if self._is_released:
            raise EpisodeStateError("The environment was closed while its episode was running.")

    def _make_host(self, container: Container, journal: Journal | None) -> AgentHost:
        host = AgentHost(
            container,
            journal,
            user=self.stage.agent_user,
            shell=self.stage.agent_shell,
            env=self._solution_env,
            limit_commands=not self.setup.provide_solution,
            activity=self.seen,
            on_requests=self._requests_changed.set,
            background_client=self._respond_in_background if self.setup.background_client is not None else None,
        )
        self._hosts.append(host)
        return host

    async def _respond_in_background(self, request: LLMRequest) -> LLMResponse:
        assert self.setup.background_client is not None
        response = await self.setup.background_client(request)
        self.usage.pay(response)
        self.seen.background_requests.append(BackgroundRequest(request, response))
        return response

    @contextmanager
    def _unless_released(self) -> Iterator[None]:
        """Raises `EpisodeStateError` after the block if the environment was closed, even if the block failed."""
        try:
            yield
        except Exception:
            self._refuse_if_released()
            raise
        if self._is_released:  # checked here too, because a call would cost time at every step
            self._refuse_if_released()

    def pending_request(self) -> LLMRequest:
        """Returns the pending request after applying `edits`, as the policy sees it."""
        if self._is_released:  # as in `_unless_released`
            self._refuse_if_released()
        assert self.host is not None
        assert self.host.observed is not None
        request = self.host.observed.arguments
        return edited(request, self.edits, self.step_count) if self.edits else request

    def _note_step(self, time_step: TimeStep[Any], policy_sec: float | None, started: float) -> None:
        """Appends the time step to the journal, so that a restored episode also knows its earlier steps."""
        host = self.host
        assert host is not None
        assert host.observed is not None
        self._stepped_at = time.perf_counter()
        if host.runtime.journal is not None:
            host.runtime.journal.entries.append(
                StepEntry(
                    host.observed.call_id,
                    timestamp=time.time(),
                    reward=time_step.reward,
                    policy_sec=policy_sec,
                    environment_sec=self._stepped_at - started,
                    container_sec=self.seen.container_sec,
                    commands=tuple(self.seen.commands),
                )
            )

    async def _end_stage(self, *, ends_episode: bool = False) -> TimeStep[LLMRequest] | None:
        """Kills the agent's processes and scores the stage. Returns LAST, or `None` if another stage follows."""
        limits, host, container = self.setup.limits, self.host, self.container
        assert host is not None
        assert container is not None
        await host.cancel()
        await container.set_network(self.container_spec.network)
        self._refuse_if_released()
        stage, limit = self.stage, self.truncated_by
        is_last = stage is self.task.stages[-1]
        if limit not in (None, "time"):  # a time limit ends only the stage, other limits end the episode
            ends_episode = True
        verify = limit is None or limits.verify_on_truncation
        is_unused = (is_last or ends_episode) and not self._holds_container
        verdict = await self._score(container, verify=verify, is_last=is_unused)
        self.past_stages.append(
            PastStage(
                name=stage.name,
                verdict=verdict,
                truncated_by=limit,
                step_count=self.step_count,
                journal=host.runtime.journal,
                encoder=self.encoder,
            )
        )
        self.encoder = JournalEncoder()
        if not is_last and not ends_episode and verdict is not None and stage.goes_on(verdict):
            self.truncated_by = self.setup.limits.reached(self.usage)
            if self.truncated_by is None:
                return None
        if self._holds_container:
            self.host = None  # the agent was cancelled above
        else:
            await self._release()
        self.verdict = verdict_of(self.task, self.past_stages, self.truncated_by)
        reward = self.verdict.reward if self.verdict is not None else None
        if self.truncated_by is not None:
            return truncation(reward)
        assert reward is not None
        return termination(reward)

    async def _score(self, container: Container, *, verify: bool, is_last: bool) -> Verdict | None:
        time_limits = self.setup.limits.time
        with self.clock.during("verify"), self.seen.timed():
            self._scoring = Scoring(
                self.stage,
                container_factory=self.setup.container_factory,
                agents_spec=self.container_spec,
                verifier_spec=time_limits.verifier_spec(self.task, self.stage),
                timeout_sec=time_limits.verifier(self.stage),
                output_dir=self.setup.output_dir,
                agent_files_dir=self._agent_files_dir,
            )
            return await self._scoring.run(container, verify=verify, is_last=is_last)


async def _tear_down(host: AgentHost | None, container: Container | None, scoring: Scoring | None) -> None:
    try:
        if scoring is not None:
            await scoring.release()
        if host is not None:
            await host.cancel()
    finally:
        if container is not None:
            await container.stop()
