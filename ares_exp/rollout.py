"""The rollout loop: one episode from reset to LAST. The file to read first."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from ares_exp.environments.environment import Environment
from ares_exp.environments.time_step import TimeStep
from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMClient
from ares_exp.llms.response import LLMResponse


@dataclass(slots=True)
class Tally:
    """What an episode used so far; kept by the caller, so that it survives an exception."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    policy_sec: float = 0.0

    def add(self, response: LLMResponse, seconds: float) -> None:
        """Counts one answer of the policy and the seconds that it took."""
        self.num_steps += 1
        self.prompt_tokens += response.usage.prompt_tokens
        self.generated_tokens += response.usage.generated_tokens
        self.cost += response.cost
        self.policy_sec += seconds


async def run_episode(
    environment: Environment, policy: LLMClient, tally: Tally, *, policy_timeout_sec: float | None = None
) -> TimeStep[Any]:
    """Plays one episode and returns its LAST time step. The environment is closed, whatever happens.

    Raises:
        PolicyError: The policy failed, or gave no answer within `policy_timeout_sec`.
        AgentError, ContainerError, VerifierError: From the environment.
    """
    async with environment:
        time_step = await environment.reset()
        while time_step.step_type != "LAST":
            response = await _ask(policy, time_step.observation, tally, policy_timeout_sec)
            time_step = await environment.step(response)
    return time_step


async def _ask(policy: LLMClient, request: Any, tally: Tally, timeout_sec: float | None) -> LLMResponse:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_sec):
            response = await policy(request)
    except PolicyError:
        raise
    except TimeoutError as error:
        raise PolicyError(f"The policy gave no answer within its limit of {timeout_sec} s.") from error
    except Exception as error:
        raise PolicyError(f"The policy raised {type(error).__name__}: {error}") from error
    tally.add(response, time.perf_counter() - began)
    return response
