"""Conformance suite for policies."""

from __future__ import annotations

import asyncio
import functools
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.policy import AdvancingClient, EpisodeSpec, Policy, UpdatablePolicy, as_policy
from ares_exp.trajectories.records import serialize_llm_request, serialize_llm_response

TIMEOUT_SEC = 120.0
"""Time limit in seconds for one test, with a few responses. It is long, because the machine may be busy."""


def opened(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Makes a coroutine an ordinary test. It receives the policy after its `preflight`, and finally closes it."""

    @functools.wraps(test)
    def run(suite: PolicyContract, policy: LLMClient, **fixtures: Any) -> None:
        async def execute() -> None:
            complete = as_policy(policy)
            try:
                await complete.preflight()
                await test(suite, complete, **fixtures)
            finally:
                await complete.close()

        asyncio.run(asyncio.wait_for(execute(), TIMEOUT_SEC))

    return run


class PolicyContract:
    """The suite for policies. Define the fixture `policy`, and `question` if the policy rejects the default request."""

    task_name = "contract"
    """Name of the task in each episode. Override it if the policy supports only certain tasks."""

    @pytest.fixture
    def policy(self) -> LLMClient:
        """Returns a policy whose `preflight` has not been called."""
        raise NotImplementedError

    @pytest.fixture
    def question(self) -> LLMRequest:
        """Returns a request to which the policy can respond repeatedly, also as the first request of an episode."""
        return LLMRequest([{"role": "user", "content": "Say something."}])

    def episode(self, attempt: int = 0) -> EpisodeSpec:
        """Returns the `EpisodeSpec` of an attempt at the task `task_name`."""
        return EpisodeSpec(self.task_name, attempt, seed=attempt)

    @opened
    async def test_policy_returns_a_response(self, policy: Policy, question: LLMRequest) -> None:
        response = await policy.for_episode(self.episode())(question)
        assert isinstance(response, LLMResponse)
        json.dumps(serialize_llm_response(response), allow_nan=False)
        assert response.cost >= 0
        assert response.usage.total_tokens >= 0

    @opened
    async def test_request_is_unchanged(self, policy: Policy, question: LLMRequest) -> None:
        before = json.dumps(serialize_llm_request(question))
        await policy.for_episode(self.episode())(question)
        assert json.dumps(serialize_llm_request(question)) == before

    @opened
    async def test_concurrent_episodes_get_responses(self, policy: Policy, question: LLMRequest) -> None:
        clients = [policy.for_episode(self.episode(attempt)) for attempt in range(4)]
        responses = await asyncio.gather(*(client(question) for client in clients))
        assert all(isinstance(response, LLMResponse) for response in responses)

    @opened
    async def test_concurrent_requests_get_responses(self, policy: Policy, question: LLMRequest) -> None:
        client = policy.for_episode(self.episode())
        if (count := min(4, concurrency_of(client))) < 2:
            pytest.skip("it accepts only one request at a time")
        responses = await asyncio.gather(*(client(question) for _ in range(count)))
        assert all(isinstance(response, LLMResponse) for response in responses)

    @opened
    async def test_advancing_client_skips_responses(self, policy: Policy, question: LLMRequest) -> None:
        ran, resumed = policy.for_episode(self.episode()), policy.for_episode(self.episode())
        if not isinstance(resumed, AdvancingClient):
            pytest.skip("its clients do not count their responses")
        resumed.advance(question, await ran(question))
        assert (await resumed(question)).text == (await ran(question)).text

    @opened
    async def test_needs_solution_is_a_bool(self, policy: Policy) -> None:
        assert policy.needs_solution in (True, False)

    @opened
    async def test_episode_seed_is_valid(self, policy: Policy) -> None:
        seed = policy.seed_of(self.task_name, 0)
        assert seed is None or 0 <= seed < 2**31

    @opened
    async def test_report_is_json_and_renders(self, policy: Policy) -> None:
        if (report := policy.report([])) is not None:
            json.dumps(report.to_dict(), allow_nan=False)
            report.render(io.StringIO())

    @opened
    async def test_updated_policy_reports_its_version(self, policy: Policy, question: LLMRequest) -> None:
        if not isinstance(policy, UpdatablePolicy):
            pytest.skip("its weights cannot be changed")
        clients = [policy.for_episode(self.episode(attempt)) for attempt in range(3)]
        await policy.update("contract-1")
        before = await clients[0](question)
        in_progress = asyncio.ensure_future(clients[1](question))
        await asyncio.gather(policy.update("contract-2"), policy.update("contract-3"))
        assert policy.policy_version == "contract-3"
        after = await clients[2](question)
        assert (before.policy_version, after.policy_version) == ("contract-1", "contract-3")
        assert (await in_progress).policy_version in ("contract-1", "contract-2", "contract-3")

    def test_close_is_idempotent(self, policy: LLMClient) -> None:
        async def close() -> None:
            await as_policy(policy).close()
            await as_policy(policy).close()

        asyncio.run(close())
