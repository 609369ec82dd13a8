"""Conformance suite for policies."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.policy import AdvancingClient, EpisodeSpec, Policy, UpdatablePolicy, as_policy
from ares_exp.trajectories.records import serialize_llm_request, serialize_llm_response

T = TypeVar("T")

TIMEOUT_SEC = 120.0
"""Time limit in seconds for one test, with a few responses. It is long, because the machine may be busy."""


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

    def test_policy_returns_a_response(self, policy: LLMClient, question: LLMRequest) -> None:
        async def ask(opened: Policy) -> LLMResponse:
            return await opened.for_episode(self.episode())(question)

        response = _with(policy, ask)
        assert isinstance(response, LLMResponse)
        json.dumps(serialize_llm_response(response), allow_nan=False)
        assert response.cost >= 0
        assert response.usage.total_tokens >= 0

    def test_request_is_unchanged(self, policy: LLMClient, question: LLMRequest) -> None:
        before = json.dumps(serialize_llm_request(question))

        async def ask(opened: Policy) -> None:
            await opened.for_episode(self.episode())(question)

        _with(policy, ask)
        assert json.dumps(serialize_llm_request(question)) == before

    def test_concurrent_episodes_get_responses(self, policy: LLMClient, question: LLMRequest) -> None:
        async def ask(opened: Policy) -> list[LLMResponse]:
            clients = [opened.for_episode(self.episode(attempt)) for attempt in range(4)]
            return await asyncio.gather(*(client(question) for client in clients))

        assert all(isinstance(response, LLMResponse) for response in _with(policy, ask))

    def test_concurrent_requests_get_responses(self, policy: LLMClient, question: LLMRequest) -> None:
        async def ask(opened: Policy) -> list[LLMResponse]:
            client = opened.for_episode(self.episode())
            if (count := min(4, concurrency_of(client))) < 2:
                pytest.skip("it accepts only one request at a time")
            return await asyncio.gather(*(client(question) for _ in range(count)))

        assert all(isinstance(response, LLMResponse) for response in _with(policy, ask))

    def test_advancing_client_skips_responses(self, policy: LLMClient, question: LLMRequest) -> None:
        async def ask(opened: Policy) -> None:
            ran, resumed = opened.for_episode(self.episode()), opened.for_episode(self.episode())
            if not isinstance(resumed, AdvancingClient):
                pytest.skip("its clients do not count their responses")
            resumed.advance(question, await ran(question))
            assert (await resumed(question)).text == (await ran(question)).text

        _with(policy, ask)

    def test_needs_solution_is_a_bool(self, policy: LLMClient) -> None:
        async def look(opened: Policy) -> object:
            return opened.needs_solution

        assert _with(policy, look) in (True, False)

    def test_episode_seed_is_valid(self, policy: LLMClient) -> None:
        async def look(opened: Policy) -> int | None:
            return opened.seed_of(self.task_name, 0)

        seed = _with(policy, look)
        assert seed is None or 0 <= seed < 2**31

    def test_report_is_json_and_renders(self, policy: LLMClient) -> None:
        async def look(opened: Policy) -> None:
            if (report := opened.report([])) is not None:
                json.dumps(report.to_dict(), allow_nan=False)
                report.render(io.StringIO())

        _with(policy, look)

    def test_updated_policy_reports_its_version(self, policy: LLMClient, question: LLMRequest) -> None:
        async def ask(opened: Policy) -> list[str | None]:
            if not isinstance(opened, UpdatablePolicy):
                pytest.skip("its weights cannot be changed")
            clients = [opened.for_episode(self.episode(attempt)) for attempt in range(3)]
            await opened.update("contract-1")
            before = await clients[0](question)
            in_progress = asyncio.ensure_future(clients[1](question))
            await asyncio.gather(opened.update("contract-2"), opened.update("contract-3"))
            assert opened.policy_version == "contract-3"
            responses = [before, await in_progress, await clients[2](question)]
            return [response.policy_version for response in responses]

        first, in_progress, last = _with(policy, ask)
        assert (first, last) == ("contract-1", "contract-3")
        assert in_progress in ("contract-1", "contract-2", "contract-3")

    def test_close_is_idempotent(self, policy: LLMClient) -> None:
        async def close() -> None:
            await as_policy(policy).close()
            await as_policy(policy).close()

        asyncio.run(close())


def _with(policy: LLMClient, use: Callable[[Policy], Awaitable[T]]) -> T:
    """Calls the policy's `preflight`, then `use`, and then its `close`, as a run does."""

    async def run() -> T:
        opened = as_policy(policy)
        try:
            await opened.preflight()
            return await use(opened)
        finally:
            await opened.close()

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_SEC))
