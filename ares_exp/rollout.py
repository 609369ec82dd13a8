"""The rollout loop: one episode from reset to LAST. The file to read first."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.errors import MalformedAnswerError, PolicyError, PolicyTimeoutError, RefusalError, UnansweredError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse
from ares_exp.recorded_results import MAX_COUNT, MAX_NUMBER, is_countable

WaitsFor = Literal["start", "policy", "environment", "end"]
"""`start`: container and agent; `policy`: an answer; `environment`: commands and, at the end, the verifier; `end`: that
everything is released."""


class _Patience:
    """Until when an answer is awaited: the shorter of the runner's bound and what the environment's limit leaves."""

    def __init__(self, limit_sec: float | None, left_sec: float | None) -> None:
        now = asyncio.get_running_loop().time()
        self._given_up_at = now + limit_sec if limit_sec is not None else math.inf
        self._time_is_up_at = now + left_sec if left_sec is not None else math.inf
        self.timer = asyncio.timeout_at(self._when())

    @property
    def is_time_up(self) -> bool:
        """Whether it was the environment's limit that ended the waiting."""
        return self.timer.expired() and self._time_is_up_at <= self._given_up_at

    def extend(self, seconds: float) -> None:
        """Moves the environment's limit, of which the policy's waiting takes nothing."""
        self._time_is_up_at += seconds
        if not self.timer.expired():
            self.timer.reschedule(self._when())

    def _when(self) -> float | None:
        first = min(self._given_up_at, self._time_is_up_at)
        return None if math.isinf(first) else first


@dataclass(slots=True)
class Tally:
    """What an episode used so far, and where it is; kept by the caller, so that it survives an exception.

    Attributes:
        num_steps: Answers that were given.
        prompt_tokens, generated_tokens, cost: Of those answers; US dollars.
        policy_sec: Seconds that the policy took for them.
        waited_sec: Seconds of these in which the policy waited for its endpoint's rate limit.
        waits_for: What the episode waits for now.
        since: Since when, on the monotonic clock.
        last: The LAST step, once it was reached.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    policy_sec: float = 0.0
    waited_sec: float = 0.0
    waits_for: WaitsFor = "start"
    since: float = field(default_factory=time.monotonic)
    last: TimeStep[Any] | None = None
    patience: _Patience | None = field(default=None, repr=False)

    def grant(self, seconds: float) -> None:
        """Notes that the policy has to wait so long; the pending answer may come so much later."""
        self.waited_sec += seconds
        if self.patience is not None:
            self.patience.extend(seconds)

    def wait_for(self, what: WaitsFor) -> None:
        """Notes that the episode made progress, and what it waits for next."""
        self.waits_for, self.since = what, time.monotonic()

    def add(self, response: LLMResponse) -> None:
        """Counts one answer of the policy."""
        self.num_steps += 1
        self.pay(response)

    def pay(self, response: LLMResponse) -> None:
        """Counts what an answer costs, also if the episode does not get it."""
        self.prompt_tokens += response.usage.prompt_tokens
        self.generated_tokens += response.usage.generated_tokens
        self.cost += response.cost


async def run_episode(
    environment: Environment,
    policy: LLMClient,
    tally: Tally,
    *,
    policy_timeout_sec: float | None = None,
    time_left: Callable[[], float | None] = lambda: None,
    unanswered: Callable[[Any], None] = lambda observation: None,
    at_last: Callable[[], Awaitable[None]] | None = None,
) -> TimeStep[Any]:
    """Plays one episode and returns its LAST time step. The environment is closed, whatever happens.

    Args:
        environment: Is entered, reset, stepped and left.
        policy: Answers its observations.
        tally: Counts; also when an exception ends the episode.
        policy_timeout_sec: Bound on one answer.
        time_left: Seconds that the environment's own time limit leaves, `None` without one. An answer that is not there
            by then is given as `None`, and the environment ends the episode, or the stage of its task.
        unanswered: Is told of the observation for which that is so, before the environment is.
        at_last: Awaited when LAST was reached, before everything is released.

    Raises:
        PolicyError: The policy failed, or gave no answer within `policy_timeout_sec`.
        AgentError, ContainerError, VerifierError: From the environment.
    """
    async with environment:
        time_step = await environment.reset()
        while time_step.step_type != "LAST":
            tally.wait_for("policy")
            response = await _ask(policy, time_step.observation, tally, policy_timeout_sec, time_left(), unanswered)
            tally.wait_for("environment")
            time_step = await environment.step(response)
        tally.last = time_step
        tally.wait_for("end")
        if at_last is not None:
            await at_last()
    return time_step


async def _ask(
    policy: LLMClient,
    request: Any,
    tally: Tally,
    limit_sec: float | None,
    left_sec: float | None,
    unanswered: Callable[[Any], None],
) -> LLMResponse | None:
    """The policy's answer; `None` when the environment's time is up before."""
    tally.patience = patience = _Patience(limit_sec, left_sec)
    began = time.perf_counter()
    try:
        async with patience.timer:
            response = await policy(request)
    except UnansweredError:
        return None
    except PolicyError as error:
        if isinstance(error, RefusalError) and error.answer is not None:
            tally.pay(error.answer)
        raise
    except (Exception, SystemExit) as error:
        if patience.is_time_up:
            unanswered(request)
            return None
        if patience.timer.expired():
            raise PolicyTimeoutError(f"The policy gave no answer within its limit of {limit_sec:g} s.") from error
        raise PolicyError(f"The policy raised {type(error).__name__}: {error}") from error
    finally:
        tally.patience = None
        tally.policy_sec += time.perf_counter() - began
    if not isinstance(response, LLMResponse):
        raise PolicyError(f"Expected the policy to answer with an LLMResponse, got {type(response).__name__}.")
    if not is_countable(response):
        raise MalformedAnswerError(
            f"Expected the policy's answer to cost 0 or more US dollars, below {MAX_NUMBER:g}, and to have used "
            f"0 or more tokens, below {MAX_COUNT:,}, got cost={response.cost!r:.80}, usage={response.usage!r:.200}."
        )
    tally.add(response)
    return response
