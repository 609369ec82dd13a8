"""The parts that an agent gets from its host: its LLM client, its context, and its earlier state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ares_exp.agents.code_agent import CodeAgent, ContextualAgent, StatefulAgent
from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.errors import AgentError, SnapshotMismatchError
from ares_exp.llms.request import LLMRequest, Message
from ares_exp.llms.response import LLMResponse


@dataclass(frozen=True, slots=True)
class AgentState:
    """The state that an agent's `get_state` returned.

    Attributes:
        version: Its `state_version` then.
        data: The state.
    """

    version: Any
    data: Any


class HostedLLM:
    """The LLM client that the agent holds."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self._runtime = runtime

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Asks the policy.

        Raises:
            TypeError: The agent passes something other than a request. Checked here, where the agent is to blame.
        """
        example = 'LLMRequest([{"role": "user", "content": text}])'
        if not isinstance(request, LLMRequest):
            raise TypeError(
                f"Expected llm_client to be given an LLMRequest, got {type(request).__name__}: use {example}."
            )
        for message in request.messages:
            if type(message) is not Message or "role" not in message:
                raise TypeError(
                    f"Expected the messages of an LLMRequest to be mappings with a `role`, got {message!r:.80}: use "
                    f"{example}."
                )
        response: LLMResponse = await self._runtime.call("llm", request)
        return response


def with_context(agent: CodeAgent) -> ContextualAgent:
    """Returns the agent as one that takes a context: its factory says so, and the task was accepted for that.

    Raises:
        AgentError: It takes none.
    """
    if not isinstance(agent, ContextualAgent):
        raise AgentError(
            f"The task gives its agent more than an instruction, and {type(agent).__name__} has no set_context()."
        )
    return agent


def with_state(agent: CodeAgent, state: AgentState) -> StatefulAgent:
    """Gives the agent its state.

    Raises:
        SnapshotMismatchError: It does not take it.
    """
    kind = type(agent).__name__
    if not isinstance(agent, StatefulAgent):
        raise SnapshotMismatchError(f"The snapshot has a state of the agent, and {kind} has no set_state().")
    if agent.state_version != state.version:
        raise SnapshotMismatchError(
            f"The snapshot has a state of version {state.version!r:.40} of the agent, and {kind} takes version "
            f"{agent.state_version!r}. Restore with the agent as it was."
        )
    try:
        agent.set_state(state.data)
    except ValueError as error:
        raise SnapshotMismatchError(f"{kind} does not take the state that the snapshot has: {error}") from None
    return agent
