"""Conformance suite for code agents. It uses `check_agent` to check whether their episodes support snapshots."""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import fields

import pytest

from ares_exp.agents.code_agent import CodeAgentFactory, ContextualAgent, as_agent_factory
from ares_exp.config.parts import kind_of
from ares_exp.errors import SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.tasks.task_contract import AgentContext
from ares_exp.testing.check_agent import Replies, check_agent
from ares_exp.testing.echo_container import RehearsalContainer

TIMEOUT_SEC = 120.0
"""Time limit in seconds for an episode in memory. It is long, because the machine may be busy."""


class AgentContract:
    """The suite for code agents. Define the fixture `factory`, and `replies` that make the agent end its episode."""

    replies: Replies = (
        "```bash\nls\n```",
        "Hm.",
        "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
    )
    """Texts of the LLM responses that the agent gets, in order."""

    @pytest.fixture
    def factory(self) -> CodeAgentFactory:
        """Returns the agent factory to test."""
        raise NotImplementedError

    @pytest.fixture
    def container(self) -> RehearsalContainer:
        """Returns a simulated container: `echo TEXT` outputs `TEXT`, and any other command outputs itself."""
        return RehearsalContainer(lambda command: command.removeprefix("echo "))

    def test_preflight_passes(self, factory: CodeAgentFactory) -> None:
        asyncio.run(as_agent_factory(factory).preflight())

    def test_each_episode_has_a_separate_agent(self, factory: CodeAgentFactory, container: RehearsalContainer) -> None:
        agents = [factory(container=container, llm_client=_silent) for _ in range(2)]
        assert agents[0] is not agents[1]
        assert all(inspect.iscoroutinefunction(agent.run) for agent in agents)

    def test_agent_runs_and_replays(self, factory: CodeAgentFactory, container: RehearsalContainer) -> None:
        checking = check_agent(factory, replies=self.replies, container=container)
        try:
            steps = asyncio.run(checking)
        except SnapshotUnsupportedError as error:
            if as_agent_factory(factory).deterministic:
                raise
            pytest.skip(str(error))
        assert steps >= 1, "the agent sent no LLM request"

    def test_supported_context_is_accepted(self, factory: CodeAgentFactory, container: RehearsalContainer) -> None:
        supports = as_agent_factory(factory).supports
        assert supports <= {field.name for field in fields(AgentContext)}
        if supports:
            assert isinstance(factory(container=container, llm_client=_silent), ContextualAgent)

    def test_options_recreate_the_factory(self, factory: CodeAgentFactory) -> None:
        found = as_agent_factory(factory)
        options = json.loads(json.dumps(dict(found.options), allow_nan=False))
        assert options == dict(found.options)
        if options:
            assert as_agent_factory(kind_of(factory)(**options)).options == options

    def test_factory_has_a_name(self, factory: CodeAgentFactory) -> None:
        assert isinstance(as_agent_factory(factory).name, str)
        assert as_agent_factory(factory).name


async def _silent(request: LLMRequest) -> LLMResponse:
    raise NotImplementedError
