"""The rollout loop: one episode from reset to LAST. The file to read first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse

WaitsFor = Literal["start", "policy", "environment", "end"]
"""`start`: container and agent; `policy`: an answer; `environment`: commands and, at the end, the verifier; `end`: that
everything is released."""


@dataclass(slots=True)
class Tally:
    """What an episode used so far, and where it is; kept by the caller, so that it survives an exception.

    Attributes:
        num_steps: Answers that were given.
        prompt_tokens, generated_tokens, cost: Of those answers; US dollars.
        policy_sec: Seconds that the policy took for them.
        waits_for: What the episode waits for now.
        since: Since when, on the monotonic clock.
        last: The LAST step, once it was reached.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    policy_sec: float = 0.0
    waits_for: WaitsFor = "start"
    since: float = field(default_factory=time.monotonic)
    last: TimeStep[Any] | None = None

    def wait_for(self, what: WaitsFor) -> None:
        """Notes that the episode made progress, and what it waits for next."""
        self.waits_for, self.since = what, time.monotonic()

    def add(self, response: LLMResponse) -> None:
        """Counts one answer of the policy."""
        self.num_steps += 1
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
) -> TimeStep[Any]:
    """Plays one episode and returns its LAST time step. The environment is closed, whatever happens.

    Args:
        environment: Is entered, reset, stepped and left.
        policy: Answers its observations.
        tally: Counts; also when an exception ends the episode.
        policy_timeout_sec: Bound on one answer.
        time_left: Seconds that the environment's own time limit leaves, `None` without one. An answer that is not there
            by then is given as `None`, and the environment ends the episode.

    Raises:
        PolicyError: The policy failed, or gave no answer within `policy_timeout_sec`.
        AgentError, ContainerError, VerifierError: From the environment.
    """
    async with environment:
        time_step = await environment.reset()
        while time_step.step_type != "LAST":
            tally.wait_for("policy")
            response = await _ask(policy, time_step.observation, tally, policy_timeout_sec, time_left())
            tally.wait_for("environment")
            time_step = await environment.step(response)
        tally.last = time_step
        tally.wait_for("end")
    return time_step


async def _ask(
    policy: LLMClient, request: Any, tally: Tally, limit_sec: float | None, left_sec: float | None
) -> LLMResponse | None:
    """The policy's answer; `None` when the environment's time is up before."""
    bounds = [bound for bound in (limit_sec, left_sec) if bound is not None]
    timer = asyncio.timeout(min(bounds, default=None))
    began = time.perf_counter()
    try:
        async with timer:
            response = await policy(request)
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        if not timer.expired():
            raise PolicyError(f"The policy raised {type(error).__name__}: {error}") from error
        if left_sec is not None and (limit_sec is None or left_sec <= limit_sec):
            return None
        raise PolicyError(f"The policy gave no answer within its limit of {limit_sec:g} s.") from error
    finally:
        tally.policy_sec += time.perf_counter() - began
    if not isinstance(response, LLMResponse):
        raise PolicyError(f"Expected the policy to answer with an LLMResponse, got {type(response).__name__}.")
    tally.add(response)
    return response
