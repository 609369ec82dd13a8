"""The code environment: a task, a container and a code agent behind `reset`, `step` and `close`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import Container, ContainerFactory
from ares_exp.containers.network_policy import PUBLIC, NetworkPolicy
from ares_exp.environments.activity import Activity
from ares_exp.environments.agent_host import AgentHost, TimeIsUpError
from ares_exp.environments.episode_limits import EpisodeLimits, LimitName
from ares_exp.environments.task_choice import choose_task
from ares_exp.environments.time_step import TimeStep, restart, termination, transition, truncation
from ares_exp.errors import AgentSetupTimeoutError, ConfigError, EpisodeStateError, VerifierTimeoutError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.task import Task, Verdict

FIRST_REQUEST_GRACE_SEC = 2.0
"""How long past its time limit an agent may take for its first request."""


class CodeEnvironment:
    """Plays tasks: each LLM request of the code agent is an observation, each LLM response an action.

    An episode starts a container, sets the task up, and lets the agent run to its first LLM request. A step hands the
    agent its response and waits for the next request. When the agent returns, or a limit cuts it short, the agent's
    commands are killed, the verifier scores the container, and the container is removed.
    """

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
    ) -> None:
        """Touches nothing yet.

        Args:
            tasks: What `reset()` chooses from, by a generator seeded with `seed`.
            container_factory: Makes the container of an episode.
            code_agent_factory: Makes the agent of an episode.
            limits: When an episode is truncated; by default only by the task's own time limits.
            seed: Same seed, same tasks in the same order.
            provide_solution: Puts the task's solution into the container and lifts the agent's limits on single
                commands: for the oracle.
            output_dir: Where the verifier's own files are kept, or `None`.
        """
        if not tasks:
            raise ConfigError("Expected at least one task for the environment, got none.")
        self._tasks = list(tasks)
        self._container_factory = container_factory
        self._code_agent_factory = code_agent_factory
        self._limits = limits or EpisodeLimits()
        self._random = random.Random(seed)
        self._provide_solution = provide_solution
        self._output_dir = output_dir
        self._container: Container | None = None
        self._baseline_network = PUBLIC
        self._host: AgentHost | None = None
        self._busy = False
        self.step_count = 0
        self.current_task: Task | None = None
        self.time_step: TimeStep[LLMRequest] | None = None
        self.truncated_by: LimitName | None = None
        self.verdict: Verdict | None = None
        self.phase_sec: dict[str, float] = {}
        self.activity = Activity()
        self._activity = Activity()
        self.container_image: str | None = None
        self._tokens = 0
        self._cost = 0.0

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[LLMRequest]:
        """Starts an episode; one under way is abandoned.

        Args:
            seed: Reseeds the choice of tasks.
            options: `{"task": name_or_index}` picks the task.

        Raises:
            AgentError, ContainerError: As the class says; nothing is left running.
            ConfigError: No such task.
        """
        with self._one_call_at_a_time():
            self.time_step = None
            await self._release()
            if seed is not None:
                self._random.seed(seed)
            task = choose_task(self._tasks, options or {}, self._random)
            self.current_task, self.step_count, self.truncated_by, self.verdict = task, 0, None, None
            self._tokens, self._cost, self.phase_sec = 0, 0.0, {}
            self._activity = Activity()  # a new one: what is left of the last agent may still count in the old
            try:
                self.time_step = restart(await self._begin(task))
            except BaseException:
                await self._release()
                raise
            finally:
                self.activity = self._activity.take()
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
        """
        with self._one_call_at_a_time():
            host = self._require_running()
            try:
                with self._phase("agent"):
                    request = await self._apply(host, action)
                self.time_step = await self._end() if request is None else transition(request)
            except BaseException:
                self.time_step = None
                await self._release()
                raise
            finally:
                self.activity = self._activity.take()
            return self.time_step

    @property
    def time_left_sec(self) -> float | None:
        """Seconds that the agent's time limit leaves; `None` without a limit, or with no episode under way."""
        return self._host.time_left_sec if self._host is not None else None

    async def close(self) -> None:
        """Cancels the agent and removes the container. Idempotent. A LAST `time_step` stays readable."""
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        await self._release()

    async def __aenter__(self) -> Self:
        """Returns the environment itself."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment."""
        await self.close()

    async def _begin(self, task: Task) -> LLMRequest:
        """Starts container and agent, up to the agent's first request."""
        spec = replace(task.container_spec, start_timeout_sec=self._limits.time.start(task))
        container = self._container = self._container_factory(spec)
        self._baseline_network = spec.network
        with self._phase("start"), self._activity.timed():
            try:
                await container.start()
                self.container_image = container.image
                await task.set_up(container)
                solution_env = await task.upload_solution(container) if self._provide_solution else {}
                await container.set_network(task.agent_network)  # until `_end`; a phase that fails ends the container
            finally:
                if self._container is not container:
                    await finish(container.stop())
            if self._container is not container:
                raise EpisodeStateError("The environment was closed while it was being reset.")
        self._host = AgentHost(
            container,
            user=task.agent_user,
            env=solution_env,
            limit_commands=not self._provide_solution,
            activity=self._activity,
        )
        timeout_sec = self._limits.time.agent(task)
        with self._phase("agent"):
            self._host.start(self._code_agent_factory, task.instruction, timeout_sec=timeout_sec)
            request = await self._first_request(self._host, timeout_sec)
        assert request is not None  # the host raises NoRequestError instead
        return request

    async def _first_request(self, host: AgentHost, timeout_sec: float | None) -> LLMRequest | None:
        """The agent's first request, also a little past its limit: the next step then truncates, and verifies."""
        with suppress(TimeIsUpError):
            return await host.next_request()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REQUEST_GRACE_SEC):
                return await host.next_request(late=True)
        raise AgentSetupTimeoutError(f"The code agent sent no LLM request within its limit of {timeout_sec:g} s.")

    async def _apply(self, host: AgentHost, action: LLMResponse | None) -> LLMRequest | None:
        """Answers the pending request; returns the next one, `None` when the agent phase is over."""
        try:
            host.answer(action)
            assert action is not None  # the host takes `None` for an answer that came too late
            self.step_count += 1
            self._tokens += action.usage.total_tokens
            self._cost += action.cost
            request = await host.next_request()
        except TimeIsUpError:
            self.truncated_by = "time"
            return None
        if request is not None:
            self.truncated_by = self._limits.reached(steps=self.step_count, tokens=self._tokens, cost=self._cost)
        return None if self.truncated_by else request

    async def _end(self) -> TimeStep[LLMRequest]:
        """Kills what the agent runs, verifies, and removes the container."""
        assert self._host is not None
        assert self._container is not None
        assert self.current_task is not None
        await self._host.cancel()
        await self._container.set_network(self._baseline_network)
        if self.truncated_by is None or self._limits.verify_on_truncation:
            self.verdict = await self._verify(self.current_task, self._container)
        await self._release()
        reward = self.verdict.reward if self.verdict is not None else None
        if self.truncated_by is not None:
            return truncation(reward)
        assert reward is not None
        return termination(reward)

    async def _verify(self, task: Task, container: Container) -> Verdict:
        timeout_sec = self._limits.time.verifier(task)
        with self._phase("verify"), self._activity.timed():
            limit = asyncio.timeout(timeout_sec)
            try:
                async with limit, self._network(container, task.verifier_network):
                    return await task.verify(container, self._output_dir)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise VerifierTimeoutError(
                    f"The verifier did not finish within its limit of {timeout_sec:g} s."
                ) from None

    @asynccontextmanager
    async def _network(self, container: Container, policy: NetworkPolicy) -> AsyncIterator[None]:
        """Has `policy` in force inside, and the one between phases again afterwards."""
        try:
            await container.set_network(policy)
            yield
        finally:
            await finish(container.set_network(self._baseline_network))

    async def _release(self) -> None:
        """Cancels the agent and removes the container, whatever happens to the caller meanwhile."""
        host, self._host = self._host, None
        container, self._container = self._container, None
        if host is not None or container is not None:
            await finish(_tear_down(host, container))

    def _require_running(self) -> AgentHost:
        if self._host is None:
            state = "has not been reset" if self.current_task is None else "has ended its episode"
            raise EpisodeStateError(f"step() on an environment that {state}: call reset() first.")
        return self._host

    @contextmanager
    def _one_call_at_a_time(self) -> Iterator[None]:
        if self._busy:
            raise EpisodeStateError("reset() or step() while another of them is under way: await that one first.")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds the wall seconds spent inside to `phase_sec[name]`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phase_sec[name] = self.phase_sec.get(name, 0.0) + time.perf_counter() - began


async def _tear_down(host: AgentHost | None, container: Container | None) -> None:
    try:
        if host is not None:
            await host.cancel()
    finally:
        if container is not None:
            await container.stop()
