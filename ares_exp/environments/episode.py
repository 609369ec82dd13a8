"""One episode of a code environment: its container, its agent, and what it used so far.

All of an episode's life is in this one class, although it is long: whatever happens, it may be closed meanwhile.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.containers.activity import Activity, Aside
from ares_exp.containers.container import Container, ContainerSpec, Mount, SnapshottableContainer
from ares_exp.containers.network_policy import PUBLIC
from ares_exp.environment import LimitName, PastStep, TimeStep, restart, termination, transition, truncation
from ares_exp.environments.agent_host import AgentHost, TimeIsUpError
from ares_exp.environments.collect_on_abort import collect_on_abort
from ares_exp.environments.episode_setup import EpisodeSetup
from ares_exp.environments.hosted_agent import AgentState
from ares_exp.environments.past_stage import PastStage, verdict_of
from ares_exp.environments.phase_clock import PhaseClock
from ares_exp.environments.scoring import Scoring
from ares_exp.errors import (
    AgentExitError,
    EpisodeStateError,
    RepeatedFormatError,
    SnapshotUnsupportedError,
)
from ares_exp.filesystem.delta import StoredChanges
from ares_exp.journal.encoding import JournalEncoder
from ares_exp.journal.journal import Journal, StepEntry
from ares_exp.llms.message_edit import MessageEdit, edited
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.episode_usage import EpisodeUsage
from ares_exp.records.results import AgentFacts
from ares_exp.tasks.agent_context import AgentContext
from ares_exp.tasks.task import Stage, Task, Verdict


class Episode:
    """One playing of a task. Begun or restored once, stepped to its LAST, released.

    Attributes:
        setup: What its environment gave it.
        task: What is played.
        seed: Seed of what the agent draws.
        usage: What its steps came to.
        truncated_by: The limit that cut it short.
        limit_note: More about that limit, if there is more.
        verdict: What the verifiers said, taken together.
        past_stages: Stages that are over, of a task with several.
        played: Its time steps up to the pending one that it was handed over at, where recorded answers were given
            again before.
        clock: What it is busy with.
        activity: What the agent did in the container since the last time step.
        lineage: Where it was branched off: the ids of the root and the parent episode, the step; empty if it was not.
        on_release: Is awaited when the episode has been released.
        on_requests: Is called when its agent may have several LLM calls without an answer, or fewer of them. Set it
            before `begin` or `restore`.
        edits: What of the conversation the policy is shown otherwise than the agent wrote it.
        container: The running container; `None` before and after.
        holds_container: Whether its container is kept at LAST, until `release`.
        is_ordered: Whether somebody ordered that it ends.
        host: The running agent; `None` before and after.
        encoder: Of its journal.
    """

    def __init__(self, setup: EpisodeSetup, task: Task, *, seed: int) -> None:
        """Starts nothing."""
        self.setup = setup
        self.task = task
        self.seed = seed
        self.usage = EpisodeUsage()
        self.truncated_by: LimitName | None = None
        self.limit_note: str | None = None
        self.verdict: Verdict | None = None
        self.past_stages: list[PastStage] = []
        self.played: tuple[PastStep, ...] = ()
        self.clock = PhaseClock()
        self.activity = Activity()
        self.lineage: Mapping[str, Any] = {}
        self.edits: tuple[MessageEdit, ...] = ()
        self.container: Container | None = None
        self.holds_container = False
        self.is_ordered = False
        self.container_image: str | None = None
        self.host: AgentHost | None = None
        self._hosts: list[AgentHost] = []
        self.encoder = JournalEncoder()
        self._solution_env: Mapping[str, str] = {}
        self._network_between = PUBLIC
        self._scoring: Scoring | None = None
        self._stepped_at = 0.0
        self._is_released = False
        self.on_release: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.on_requests: Callable[[], None] = lambda: None

    async def begin(self) -> TimeStep[LLMRequest]:
        """Starts container and agent, up to the agent's first request; returns the FIRST step.

        Raises:
            AgentError, ContainerError: As the class says. Not released then.
        """
        began = time.perf_counter()
        host = await self._begin_agent(await self._set_up_container())
        time_step = restart(self._shown(host))
        self._note_step(time_step, None, began)
        return time_step

    @property
    def stage(self) -> Stage:
        """The stage under way, or the last one."""
        return self.task.stages[min(len(self.past_stages), len(self.task.stages) - 1)]

    async def _set_up_container(self) -> Container:
        """Starts a container and sets it up for the first stage."""
        container = await self._start_container()
        with self.clock.during("start"), self.activity.timed():
            await self.task.set_up(container)
            self._refuse_if_released()
            await self.stage.begin(container)
        return container

    async def _begin_stage(self, container: Container) -> AgentHost:
        """Prepares the container for a later stage, and starts its agent, up to its first request."""
        self._refuse_if_released()
        self._scoring = None
        with self.clock.during("start"), self.activity.timed():
            await self.stage.begin(container)
        return await self._begin_agent(container)

    async def _begin_agent(self, container: Container) -> AgentHost:
        """Starts the agent of the stage, for which the container is set up, up to its first request."""
        self._refuse_if_released()
        stage = self.stage
        with self.clock.during("start"), self.activity.timed():
            if self.setup.provide_solution:
                self._solution_env = await stage.upload_solution(container)
            await container.set_network(stage.agent_network)  # until its end; a failing phase ends the container
        self._refuse_if_released()
        is_journaled = self.setup.code_agent_factory.deterministic
        journal = Journal(time.time(), self._stage_seed) if is_journaled else None
        host = self.host = self._make_host(container, journal)
        with self.clock.during("agent"), self._unless_released():
            host.start(
                self.setup.code_agent_factory,
                stage.instruction,
                timeout_sec=self._agent_timeout_sec,
                context=self._context(len(self.past_stages)),
            )
            await host.first_request()
        return host

    @property
    def _stage_seed(self) -> int:
        """Seed of what the stage's agent draws."""
        number = len(self.past_stages)
        return self.seed if not number else zlib.crc32(f"{self.seed}/{number}".encode())

    def _context(self, stage: int) -> AgentContext:
        """What the agent of that stage is given besides its instruction; the oracle needs none of it.

        The conversation that a task begins with is for the agent of its first stage.
        """
        context = AgentContext() if self.setup.provide_solution else self.task.context
        return replace(context, messages=()) if stage else context

    async def restore(
        self, changes: StoredChanges, journal: Journal | None, *, elapsed_sec: float, state: AgentState | None
    ) -> None:
        """Starts the container with the files that it had, and brings the agent to where it was.

        Raises:
            SnapshotError, ContainerError: As the class says. Not released then.
        """
        if self.setup.provide_solution:
            self._solution_env = self.stage.solution_env()
        container = await self._start_container(changes)
        with self.clock.during("start"):
            await container.set_network(self.stage.agent_network)
        if not isinstance(container, SnapshottableContainer):
            raise SnapshotUnsupportedError(
                f"Containers of {self.setup.container_factory.name!r} cannot start with captured files."
            )
        await self._rerun_finished_stages(container)
        host = self.host = self._make_host(container, journal)
        host.restore(
            self.setup.code_agent_factory,
            self.stage.instruction,
            timeout_sec=self._agent_timeout_sec,
            context=self._context(len(self.past_stages)),
            elapsed_sec=elapsed_sec,
            state=state,
        )
        if host.observed is None:
            with self._unless_released():
                await host.first_request()
        self._stepped_at = time.perf_counter()

    async def _rerun_finished_stages(self, container: Container) -> None:
        """Has what the agents of past stages asked their LLM at hand again: journals have only digests of it."""
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

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        """Hands `action` to the agent; see `CodeEnvironment.step`. Not released when it raises."""
        began = time.perf_counter()
        policy_sec = began - self._stepped_at
        host, container = self.host, self.container
        assert host is not None
        assert container is not None
        with self.clock.during("agent"):
            goes_on = await self._apply(host, action)
        if not goes_on:
            last = await self._end_stage(host, container)
            if last is not None:
                return last
            host = await self._begin_stage(container)
        time_step = transition(self._shown(host))
        self._note_step(time_step, policy_sec, began)
        return time_step

    async def truncate(self, limit: LimitName) -> TimeStep[LLMRequest]:
        """Ends the episode at its pending request; see `CodeEnvironment.truncate`. Not released when it raises."""
        host, container = self.host, self.container
        assert host is not None
        assert container is not None
        self.truncated_by = limit
        last = await self._end_stage(host, container, ends_episode=True)
        assert last is not None
        return last

    def grant_time(self, seconds: float) -> None:
        """What was spent on something else counts neither for the agent's time limit nor for the policy."""
        self._stepped_at += seconds
        if self.host is not None:
            self.host.grant_time(seconds)

    async def release(self) -> None:
        """Cancels the agent and removes the container, whatever happens to the caller meanwhile. Idempotent.

        What there is to be kept of an episode that ends before it is scored is kept, as far as that can be done.
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
        """What the task's container has to be, under this episode's limits."""
        return self.setup.limits.time.container_spec(self.task)

    @property
    def _mounts(self) -> tuple[Mount, ...]:
        """What its agent brings along; the oracle plays without the agent's program."""
        return () if self.setup.provide_solution else self.setup.code_agent_factory.mounts

    @property
    def _agent_files_dir(self) -> str | None:
        return None if self.setup.provide_solution else self.setup.code_agent_factory.files_dir

    @property
    def _agent_timeout_sec(self) -> float | None:
        return self.setup.limits.time.agent(self.stage)

    async def _start_container(self, changes: StoredChanges | None = None) -> Container:
        self._refuse_if_released()
        spec = replace(self.container_spec, mounts=self._mounts, changes=changes)
        self._network_between = spec.network
        container = self.container = self.setup.container_factory(spec)
        with self.clock.during("start"), self.activity.timed():
            try:
                await container.start()
                self.container_image = container.image
            finally:
                if self._is_released:
                    await finish(container.stop())
            self._refuse_if_released()
        return container

    def _refuse_if_released(self) -> None:
        """Raises when somebody has closed the environment while this episode was in the middle of something."""
        if self._is_released:
            raise EpisodeStateError("The environment was closed while its episode was under way.")

    @property
    def format_errors(self) -> int:
        """Number of replies that the agents of all stages could not use."""
        return sum(host.format_errors for host in self._hosts)

    @property
    def agent_facts(self) -> AgentFacts | None:
        """What came from the agents of all stages, where they are installed."""
        facts = [host.agent_facts for host in self._hosts if host.agent_facts is not None]
        return sum(facts[1:], start=facts[0]) if facts else None

    def _make_host(self, container: Container, journal: Journal | None) -> AgentHost:
        host = AgentHost(
            container,
            journal,
            user=self.stage.agent_user,
            shell=self.stage.agent_shell,
            env=self._solution_env,
            limit_commands=not self.setup.provide_solution,
            activity=self.activity,
            on_requests=self.on_requests,
            side_calls=self._answer_aside if self.setup.side_calls is not None else None,
        )
        self._hosts.append(host)
        return host

    async def _answer_aside(self, request: LLMRequest) -> LLMResponse:
        """Answers a call that takes no step; it counts towards the limits on tokens and cost."""
        assert self.setup.side_calls is not None
        answer = await self.setup.side_calls(request)
        self.usage.pay(answer)
        self.activity.asides.append(Aside(request, answer))
        return answer

    @contextmanager
    def _unless_released(self) -> Iterator[None]:
        """Whatever becomes of an agent that is being cancelled inside, a closed environment is what counts."""
        try:
            yield
        except Exception:
            self._refuse_if_released()
            raise
        self._refuse_if_released()

    async def _apply(self, host: AgentHost, action: LLMResponse | None) -> bool:
        """Answers the pending request and waits for the next one; false when the agent phase is over."""
        self.usage.add(action)
        try:
            host.answer(action)
            with self._unless_released():
                request = await host.next_request()
        except TimeIsUpError:
            self.truncated_by = "order" if self.is_ordered and action is None else "time"
            return False
        except RepeatedFormatError:
            self.truncated_by = "format_errors"
            return False
        except AgentExitError as error:
            self.truncated_by, self.limit_note = "agent_exit", str(error)
            return False
        if request is not None:
            self.truncated_by = self._reached
        return request is not None and not self.truncated_by

    @property
    def _reached(self) -> LimitName | None:
        return "order" if self.is_ordered else self.setup.limits.reached(self.usage)

    def _shown(self, host: AgentHost) -> LLMRequest:
        """The pending request as the policy is to see it."""
        assert host.observed is not None
        return edited(host.observed.arguments, self.edits, self.usage.step_count)

    def pending_requests(self) -> Iterator[tuple[int, LLMRequest]]:
        """The LLM calls without an answer, with their numbers, the observed one first."""
        assert self.host is not None
        for call in self.host.pending:
            yield call.call_id, edited(call.arguments, self.edits, self.usage.step_count)

    def pending_request(self) -> LLMRequest:
        """The pending request, as the policy is to see it."""
        self._refuse_if_released()
        assert self.host is not None
        return self._shown(self.host)

    def _note_step(self, time_step: TimeStep[Any], policy_sec: float | None, began: float) -> None:
        """Writes the time step into the journal, so that a restored episode knows its past."""
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
                    environment_sec=self._stepped_at - began,
                    container_sec=self.activity.container_sec,
                    commands=tuple(self.activity.commands),
                )
            )

    async def _end_stage(
        self, host: AgentHost, container: Container, *, ends_episode: bool = False
    ) -> TimeStep[LLMRequest] | None:
        """Kills what the agent runs, and scores the stage. LAST, or `None` when another stage is to be played."""
        limits = self.setup.limits
        await host.cancel()
        await container.set_network(self._network_between)
        self._refuse_if_released()
        stage, limit = self.stage, self.truncated_by
        is_last = stage is self.task.stages[-1]
        if limit not in (None, "time"):  # a time limit is the stage's own, any other one the episode's
            ends_episode = True
        verify = limit is None or limits.verify_on_truncation
        is_unused = (is_last or ends_episode) and not self.holds_container
        verdict = await self._score(container, verify=verify, is_last=is_unused)
        self._note_stage(host, verdict)
        if not is_last and not ends_episode and verdict is not None and stage.goes_on(verdict):
            self.truncated_by = self._reached
            if self.truncated_by is None:
                return None
        if self.holds_container:
            self.host = None  # its agent was cancelled above
        else:
            await self.release()
        return self._last_step()

    def _last_step(self) -> TimeStep[LLMRequest]:
        self.verdict = verdict_of(self.task, self.past_stages, self.truncated_by)
        reward = self.verdict.reward if self.verdict is not None else None
        if self.truncated_by is not None:
            return truncation(reward)
        assert reward is not None
        return termination(reward)

    async def _score(self, container: Container, *, verify: bool, is_last: bool) -> Verdict | None:
        time_limits = self.setup.limits.time
        with self.clock.during("verify"), self.activity.timed():
            self._scoring = Scoring(
                self.stage,
                container_factory=self.setup.container_factory,
                agents_spec=self.container_spec,
                verifier_spec=time_limits.verifier_spec(self.task, self.stage),
                timeout_sec=time_limits.verifier(self.stage),
                output_dir=self.setup.output_dir,
                agent_files_dir=self._agent_files_dir,
            )
            return await self._scoring.run(container, self._network_between, verify=verify, is_last=is_last)

    def _note_stage(self, host: AgentHost, verdict: Verdict | None) -> None:
        """Keeps what is to be known of a stage that is over."""
        self.past_stages.append(
            PastStage(
                name=self.stage.name,
                verdict=verdict,
                truncated_by=self.truncated_by,
                step_count=self.usage.step_count,
                journal=host.runtime.journal,
                encoder=self.encoder,
            )
        )
        self.encoder = JournalEncoder()


async def _tear_down(host: AgentHost | None, container: Container | None, scoring: Scoring | None) -> None:
    try:
        if scoring is not None:
            await scoring.release()
        if host is not None:
            await host.cancel()
    finally:
        if container is not None:
            await container.stop()
