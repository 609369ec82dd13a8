from __future__ import annotations

import asyncio
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest

from ares_exp.environment import TimeStep, restart, termination, transition, truncation
from ares_exp.errors import (
    ContextOverflowError,
    EndpointUnreachableError,
    MalformedResponseError,
    PolicyError,
    PolicyTimeoutError,
    RefusalError,
)
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.episode_events import EpisodeEvents, ResponseDeadline
from ares_exp.rollout import run_episode

REQUEST = LLMRequest([{"role": "user", "content": "?"}])


class ThreeSteps:
    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.closed_with: list[Any] = []

    async def reset(self) -> TimeStep[Any]:
        return restart(REQUEST)

    async def step(self, action: Any) -> TimeStep[Any]:
        self.actions.append(action)
        return termination(0.75) if len(self.actions) == 3 else transition(REQUEST)

    async def close(self) -> None: ...

    async def __aenter__(self) -> ThreeSteps:
        return self

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        self.closed_with.append(kind)


async def test_loop_runs_to_the_last_step() -> None:
    env, events = ThreeSteps(), EpisodeEvents()
    response = LLMResponse.from_text("a", usage=Usage(10, 5), cost=0.25)

    async def policy(request: LLMRequest) -> LLMResponse:
        assert request is REQUEST
        return response

    last = await run_episode(env, policy, events)
    assert (last.reward, env.actions, env.closed_with) == (0.75, [response] * 3, [None])
    usage = events.usage
    assert (usage.num_steps, usage.prompt_tokens, usage.generated_tokens, usage.cost) == (3, 30, 15, 0.75)


async def test_policy_without_async_is_explained() -> None:
    def policy(request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("a")

    with pytest.raises(PolicyError, match=r"policy `policy` to be asynchronous, got LLMResponse.* `async def`"):
        await run_episode(ThreeSteps(), policy)  # type: ignore[arg-type]


async def test_rollout_needs_only_environment_and_policy() -> None:
    async def policy(request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("a")

    assert [(await run_episode(ThreeSteps(), policy)).reward for _ in range(2)] == [0.75, 0.75]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(PolicyError("refused"), "refused"), (KeyError("x"), "KeyError"), (TimeoutError("mine"), "TimeoutError: mine")],
)
async def test_failing_policy_closes_the_environment(error: Exception, expected: str) -> None:
    env = ThreeSteps()

    async def policy(request: LLMRequest) -> LLMResponse:
        raise error

    with pytest.raises(PolicyError, match=expected):
        await run_episode(env, policy, EpisodeEvents())
    assert env.closed_with == [PolicyError]


async def test_refusal_is_paid_but_not_a_step() -> None:
    events, refusal = EpisodeEvents(), RefusalError("no")
    refusal.response = LLMResponse.from_text("no", usage=Usage(10, 5), cost=0.25)

    async def policy(request: LLMRequest) -> LLMResponse:
        raise refusal

    with pytest.raises(RefusalError):
        await run_episode(ThreeSteps(), policy, events)
    usage = events.usage
    assert (usage.num_steps, usage.prompt_tokens, usage.generated_tokens, usage.cost) == (0, 10, 5, 0.25)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("text", "an LLMResponse, got str"),
        (None, "got NoneType"),
        (LLMResponse("text"), "TextData.text., got 'text'"),  # type: ignore[arg-type]
        (LLMResponse(["text"]), "got .'text'"),  # type: ignore[list-item]
    ],
)
async def test_invalid_response_is_a_policy_error(response: Any, expected: str) -> None:
    async def policy(request: LLMRequest) -> Any:
        return response

    with pytest.raises(PolicyError, match=f"Expected the .*{expected}.*LLMResponse.from_text"):
        await run_episode(ThreeSteps(), policy, EpisodeEvents())


@pytest.mark.parametrize(
    ("cost", "usage"),
    [
        *((cost, Usage(1, 1)) for cost in (float("nan"), float("inf"), -0.5, 1e200, "1", None)),
        *((0.0, usage) for usage in (Usage(-1, 1), Usage(1, -1), Usage(2**53, 1), Usage(1, 10**30))),
    ],
)
async def test_response_with_invalid_usage_is_malformed(cost: Any, usage: Usage) -> None:
    events = EpisodeEvents()

    async def policy(request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("a", usage=usage, cost=cost)

    with pytest.raises(MalformedResponseError, match=r"Expected .* cost from 0 .* got cost=") as raised:
        await run_episode(ThreeSteps(), policy, events)
    assert repr(cost) in str(raised.value)
    assert repr(usage) in str(raised.value)
    assert (events.usage.num_steps, events.usage.prompt_tokens, events.usage.cost) == (0, 0, 0.0)


async def test_exiting_policy_is_a_policy_error() -> None:
    async def policy(request: LLMRequest) -> LLMResponse:
        raise SystemExit(3)

    with pytest.raises(PolicyError, match="SystemExit"):
        await run_episode(ThreeSteps(), policy, EpisodeEvents())


async def test_context_overflow_truncates_the_episode() -> None:
    class Truncated(ThreeSteps):
        async def truncate(self, limit: str) -> TimeStep[Any]:
            return truncation({"context": 0.5}[limit])

    async def policy(request: LLMRequest) -> LLMResponse:
        raise ContextOverflowError("The prompt is too long.")

    events = EpisodeEvents()
    last = await run_episode(Truncated(), policy, events)
    assert (last.step_type, last.reward, last.discount, events.last) == ("LAST", 0.5, 1.0, last)
    with pytest.raises(ContextOverflowError):  # this environment cannot truncate
        await run_episode(ThreeSteps(), policy)


async def test_missing_response_in_time_ends_the_episode() -> None:
    class Hasty(ThreeSteps):
        time_left_sec = 0.02

        def grant_time(self, seconds: float) -> None: ...

    env, events = Hasty(), EpisodeEvents()

    async def policy(request: LLMRequest) -> LLMResponse:
        await asyncio.sleep(60)
        raise AssertionError

    last = await run_episode(env, policy, events, policy_timeout_sec=30)
    assert (env.actions, events.usage.num_steps, events.last) == ([None] * 3, 0, last)


@pytest.mark.parametrize("unreachable", [None, EndpointUnreachableError("There is no server.")])
async def test_unresponsive_policy_times_out(unreachable: PolicyError | None) -> None:
    env, events = ThreeSteps(), EpisodeEvents()

    async def policy(request: LLMRequest) -> LLMResponse:
        events.unreachable = unreachable
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(PolicyError, match=rf"{unreachable or ''}.*0\.05 s"):
        await run_episode(env, policy, events, policy_timeout_sec=0.05)
    assert env.closed_with == [type(unreachable) if unreachable else PolicyTimeoutError]


@pytest.mark.parametrize(("limit_sec", "left_sec", "extended_by"), [(5.0, 9.0, 0.0), (9.0, 5.0, 3.0), (None, 5.0, 3.0)])
async def test_held_or_waiting_request_extends_the_deadline(
    limit_sec: float | None, left_sec: float, extended_by: float
) -> None:
    deadline, times = ResponseDeadline(limit_sec, left_sec), []
    async with deadline.timer:
        for move in (lambda seconds: None, deadline.hold, deadline.extend):
            move(3.0)
            times.append(deadline.timer.when() or 0.0)
    assert [after - before for before, after in pairwise(times)] == [pytest.approx(3.0), pytest.approx(extended_by)]


@pytest.mark.parametrize("fails", [False, True])
async def test_requests_sent_ahead_end_with_the_episode(fails: bool) -> None:
    class Foresighted:
        looks_ahead, closed = False, 0

        def expect(self, pending: Any) -> None: ...

        async def __call__(self, request: LLMRequest) -> LLMResponse:
            if fails:
                raise PolicyError("down")
            return LLMResponse.from_text("a")

        async def close(self) -> None:
            self.closed += 1

    policy = Foresighted()
    with pytest.raises(PolicyError) if fails else nullcontext():
        await run_episode(ThreeSteps(), policy)
    assert policy.closed == 1
