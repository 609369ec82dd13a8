"""The `Environment` protocol: anything with `reset`, `step` and `close` is one."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from ares_exp.environments.time_step import TimeStep
from ares_exp.llms.response import LLMResponse


def check_action(action: object) -> None:
    """Refuses what is no answer of a policy, before it changes anything.

    Raises:
        TypeError: It is neither an `LLMResponse` nor `None`.
    """
    if action is not None and not isinstance(action, LLMResponse):
        raise TypeError(
            f"Expected step() to be given an LLMResponse, got {type(action).__name__}. Of a text it is made by "
            "LLMResponse.from_text(text)."
        )


@runtime_checkable
class Environment(Protocol):
    """An asynchronous environment: observation = LLM request, action = LLM response.

    `reset()` and `step()` raise when the agent, the container or the verifier fails; a LAST step always means
    that the episode ended by itself or by a limit. `close()` may be called at any time and more than once.
    """

    async def reset(self) -> TimeStep[Any]:
        """Starts an episode (abandoning one under way) and returns its FIRST step."""
        ...

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action` to the pending observation and returns the next step."""
        ...

    async def close(self) -> None:
        """Releases everything that the environment holds."""
        ...

    async def __aenter__(self) -> Environment:
        """Returns the environment itself."""
        ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment."""
        ...
