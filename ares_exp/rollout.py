"""The rollout loop: one episode from reset to LAST. The file to read first."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from ares_exp.asking.asked_ahead import AskedAhead, ForesightedClient, concurrency_of
from ares_exp.asking.checked_answer import checked_answer
from ares_exp.config.parts import has_members
from ares_exp.environment import EnvironmentBase, MinimalEnvironment, PendingRequest, TimeStep, complete
from ares_exp.errors import PolicyError, PolicyTimeoutError, RefusalError, UnansweredError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse
from ares_exp.records.episode_usage import EpisodeUsage

WaitsFor = Literal["start", "policy", "environment", "end"]
"""`start`: container and agent; `policy`: an answer; `environment`: commands and, at the end, the verifier; `end`: that
everything is released."""


class AnswerDeadline:
    """Deadline for one answer: the earlier of the runner's limit and the end of the environment's time limit."""

    def __init__(self, limit_sec: float | None, left_sec: float | None) -> None:
        """Takes both limits in seconds from now; `None` is no limit."""
        now = asyncio.get_running_loop().time()
        self._given_up_at = now + limit_sec if limit_sec is not None else math.inf
        self._time_is_up_at = now + left_sec if left_sec is not None else math.inf
        self.timer = asyncio.timeout_at(self._when())

    @property
    def is_time_up(self) -> bool:
        """Whether the environment's limit, not the runner's, ended the wait."""
        return self.timer.expired() and self._time_is_up_at <= self._given_up_at

    def extend(self, seconds: float) -> None:
        """Moves the environment's limit: time that the policy waits for its endpoint does not count."""
        self._time_is_up_at += seconds
        self._reschedule()

    def hold(self, seconds: float) -> None:
        """Moves both limits: nobody was asked meanwhile."""
        self._given_up_at += seconds
        self.extend(seconds)

    def _reschedule(self) -> None:
        if not self.timer.expired():
            self.timer.reschedule(self._when())

    def _when(self) -> float | None:
        first = min(self._given_up_at, self._time_is_up_at)
        return None if math.isinf(first) else first


@dataclass
class EpisodeEvents:
    """State of a running episode, and the hooks that its loop and its policy call; kept by the caller of the loop.

    Subclasses override the hooks, for example to record each paid answer, or the episode at its LAST step.

    Attributes:
        usage: Tokens and cost of all answers that were paid for, and the number of those that the episode was given.
        policy_sec: Seconds that the policy took for these answers.
        waited_sec: Seconds of these in which the policy waited for its endpoint's rate limit.
        held_sec: Seconds of these in which the run was held, and the policy not asked.
        waits_for: What the episode waits for now.
        since: Start of that wait, in seconds of the monotonic clock.
        last: The LAST step, once it was reached.
        deadline: Deadline of the pending answer; `None` while no answer is pending.
    """

    usage: EpisodeUsage = field(default_factory=EpisodeUsage)
    policy_sec: float = 0.0
    waited_sec: float = 0.0
    held_sec: float = 0.0
    waits_for: WaitsFor = "start"
    since: float = field(default_factory=time.monotonic)
    last: TimeStep[Any] | None = None
    deadline: AnswerDeadline | None = field(default=None, repr=False)

    def wait_for(self, what: WaitsFor) -> None:
        """Records that the episode made progress and now waits for `what`."""
        self.waits_for, self.since = what, time.monotonic()

    def waited(self, seconds: float) -> None:
        """Adds seconds that the policy waited for its endpoint, and moves the pending answer's deadline by as much."""
        self.waited_sec += seconds
        if self.deadline is not None:
            self.deadline.extend(seconds)

    def held(self, seconds: float) -> None:
        """Adds seconds in which the run was held: they count towards no time limit, and are no stall."""
        self.held_sec += seconds
        self.since = time.monotonic()
        if self.deadline is not None:
            self.deadline.hold(seconds)

    @property
    def is_time_up(self) -> bool:
        """Whether the environment's time limit passed while the answer was awaited."""
        return self.deadline is not None and self.deadline.is_time_up

    @property
    def num_stages(self) -> int:
        """Number of finished stages of the task."""
        return 0

    def has_room(self, answers: int) -> bool:
        """Whether the limits of the episode let so many answers be applied, and another one after them."""
        return True

    def pay(self, answer: LLMResponse) -> None:
        """Counts an answer that has to be paid for."""
        self.usage.pay(answer)
        self.paid(answer)

    def paid(self, answer: LLMResponse) -> None:
        """Called for each answer that has to be paid for, whether or not the episode receives it."""

    async def ended(self) -> None:
        """Called at LAST, before anything is released."""


async def run_episode(
    environment: MinimalEnvironment,
    policy: LLMClient,
    events: EpisodeEvents | None = None,
    *,
    policy_timeout_sec: float | None = None,
) -> TimeStep[Any]:
    """Plays one episode and returns its LAST time step. Closes the environment in any case.

    If the environment's own time limit passes before the policy answers, the environment is given `None` and ends the
    episode, or the current stage of its task.

    Where the agent waits for several answers and the policy may be asked for several at once
    (`ConcurrentClient`), it is; the environment is given them one at a time, in its order, whichever comes first.

    Args:
        environment: Is entered, reset, stepped and left.
        policy: Answers its observations.
        events: Receives the events of the episode; keeps the usage, also when an exception ends the episode.
        policy_timeout_sec: Limit on one answer, in seconds from when its turn comes.

    Raises:
        PolicyError: The policy failed, or gave no answer within `policy_timeout_sec`.
        AgentError, ContainerError, VerifierError: From the environment.
    """
    events = events or EpisodeEvents()
    client = policy if has_members(policy, ForesightedClient) else _foresighted(policy, events)
    env = complete(environment)
    async with env:
        time_step = await env.reset()
        watching = _watching(env, client, time_step)
        try:
            while time_step.step_type != "LAST":
                events.wait_for("policy")
                if client.looks_ahead:
                    client.expect(_pending(env, time_step))
                response = await _ask(client, time_step.observation, events, policy_timeout_sec, env.time_left_sec)
                events.wait_for("environment")
                time_step = await env.step(response)
        finally:
            if watching is not None:
                watching.cancel()
            await client.close()
        events.last = time_step
        events.wait_for("end")
        await events.ended()
    return time_step


def _foresighted(policy: LLMClient, events: EpisodeEvents) -> ForesightedClient:
    """Returns a client that asks the policy, several at once if it may be, and pays for what it answers."""

    async def ask(call: PendingRequest, is_ahead: bool) -> LLMResponse:
        try:
            answer = checked_answer(await policy(call.request))
        except RefusalError as refusal:
            if refusal.answer is not None:
                events.pay(refusal.answer)
            raise
        events.pay(answer)
        return answer

    return AskedAhead(ask, concurrency=concurrency_of(policy), has_room=events.has_room, on_wait=events.waited)


def _pending(env: EnvironmentBase, time_step: TimeStep[Any]) -> tuple[PendingRequest, ...]:
    """Returns the pending requests; none where a wrapper shows another observation than the first: it may edit them."""
    pending = env.pending_requests()
    return pending if pending and pending[0].request == time_step.observation else ()


def _watching(env: EnvironmentBase, client: ForesightedClient, first: TimeStep[Any]) -> asyncio.Task[None] | None:
    """Begins to tell the client what the agent asks meanwhile; `None` where the client makes no use of it."""
    pending = _pending(env, first) if client.looks_ahead else ()
    return asyncio.create_task(_watch(env, client, pending)) if pending else None


async def _watch(env: EnvironmentBase, client: ForesightedClient, known: tuple[PendingRequest, ...]) -> None:
    """Tells the client of every change of the pending requests."""
    while True:
        known = await env.changed_requests(known)
        client.expect(known)


async def _ask(
    policy: LLMClient, request: Any, events: EpisodeEvents, limit_sec: float | None, left_sec: float | None
) -> LLMResponse | None:
    """Returns the policy's answer; `None` when the environment's time is up first."""
    events.deadline = deadline = AnswerDeadline(limit_sec, left_sec)
    began = time.perf_counter()
    try:
        async with deadline.timer:
            response = await policy(request)
    except UnansweredError:
        events.usage.add(None)
        return None
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        if deadline.is_time_up:
            events.usage.add(None)
            return None
        if deadline.timer.expired():
            raise PolicyTimeoutError(f"The policy gave no answer within its limit of {limit_sec:g} s.") from error
        raise PolicyError(f"The policy raised {type(error).__name__}: {error}") from error
    finally:
        events.deadline = None
        events.policy_sec += time.perf_counter() - began
    events.usage.num_steps += 1
    return response
