"""Scripted policies, and the slots in which requests wait."""

import asyncio
from typing import Any

import pydantic
import pytest

from ares_exp.errors import PolicyError, RateLimitError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.policies.waiting import MAX_PAUSES, RequestSlots
from tests.loopback_endpoint import LoopbackEndpoint, error
from tests.unit.policies.conftest import Make

HI = LLMRequest([{"role": "user", "content": "hi"}])


async def execute(client: LLMClient, count: int) -> list[str]:
    return [(await client(HI)).text for _ in range(count)]


async def test_concurrent_episodes_have_separate_positions() -> None:
    policy = ScriptedPolicy(replies=["a", "b", "c"])
    first, second = (policy.for_episode(EpisodeSpec("t", attempt)) for attempt in range(2))
    assert await execute(first, 2) == ["a", "b"]
    assert await execute(second, 1) == ["a"]
    assert await asyncio.gather(execute(first, 1), execute(second, 2)) == [["c"], ["b", "c"]]


async def test_missing_replies_name_task_and_request() -> None:
    client = ScriptedPolicy(replies=["a", "b"]).for_episode(EpisodeSpec("fix-bug"))
    await execute(client, 2)
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"'fix-bug' has 2 replies.*request 3.*policy\.repeat_last=true"):
            await client(HI)


async def test_last_reply_is_repeated_on_request() -> None:
    client = ScriptedPolicy(replies=["a", "b"], repeat_last=True).for_episode(EpisodeSpec("t"))
    assert await execute(client, 4) == ["a", "b", "b", "b"]


async def test_advanced_reply_is_skipped() -> None:
    policy = ScriptedPolicy(replies=["a", "b", "c"])
    client: Any = policy.for_episode(EpisodeSpec("t"))
    for reply in ("a", "b"):
        client.advance(HI, LLMResponse.from_text(reply))
    assert await execute(client, 1) == ["c"]
    past: Any = ScriptedPolicy(replies=["a"]).for_episode(EpisodeSpec("t"))
    past.advance(HI, LLMResponse.from_text("a"))
    past.advance(HI, LLMResponse.from_text("x"))
    with pytest.raises(PolicyError, match="request 3"):
        await past(HI)


async def test_empty_replies_are_an_error() -> None:
    with pytest.raises(PolicyError, match="has 0 replies"):
        await ScriptedPolicy(replies=[], repeat_last=True)(HI)


@pytest.mark.parametrize(
    ("task_name", "said"),
    [("fix-1", "exact"), ("fix-2", "glob"), ("fix-2b", "glob"), ("other", "default"), ("fix-[x]", "brackets")],
)
async def test_replies_are_selected_by_task(task_name: str, said: str) -> None:
    policy = ScriptedPolicy(
        replies={"*": ["default"], "fix-[x]": ["brackets"], "fix-*": ["glob"], "fix-2*": ["later"], "fix-1": ["exact"]}
    )
    assert await execute(policy.for_episode(EpisodeSpec(task_name)), 1) == [said]


async def test_task_without_replies_is_an_error() -> None:
    policy = ScriptedPolicy(replies={"a": ["x"], "b-*": ["y"]})
    with pytest.raises(PolicyError, match=r"no replies for task 'c', only for: a, b-\*\. .*'\*'"):
        policy.for_episode(EpisodeSpec("c"))


async def test_policy_is_a_client_without_a_run() -> None:
    assert await execute(ScriptedPolicy(replies={"*": ["a", "b"]}), 2) == ["a", "b"]


@pytest.mark.parametrize("replies", ["text", [1], {"a": "text"}, None, {"a": [None]}])
def test_wrong_replies_are_rejected(replies: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match="replies"):
        ScriptedPolicy(replies=replies)


async def test_reply_may_call_tools() -> None:
    call = {"name": "bash", "arguments": {"command": "ls"}}
    policy = ScriptedPolicy(
        replies=[
            {"text": "Now.", "tool_calls": [call, {"name": "x", "arguments": "{"}]},
            {"tool_calls": [{"name": "submit", "arguments": {}}]},
        ]
    )  # fmt: skip
    client = policy.for_episode(EpisodeSpec("t"))
    first, second = [await client(HI) for _ in range(2)]
    assert first.data == (
        TextData("Now."),
        ToolCallData("call_1_0", "bash", '{"command": "ls"}'),
        ToolCallData("call_1_1", "x", "{"),
    )
    assert second.data == (ToolCallData("call_1_0", "submit", "{}"),)
    assert first.finish_reason == "tool_calls"
    with pytest.raises(pydantic.ValidationError, match="tool_calls"):
        ScriptedPolicy(replies=[{"calls": []}])


class Waits(list[float]):
    """What an episode was told of its waits; `told` is set when it is."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    def __call__(self, seconds: float) -> None:
        self.append(seconds)
        self.told.set()

    @property
    def spec(self) -> EpisodeSpec:
        return EpisodeSpec("t", on_wait=self)


async def test_wait_is_reported_before_it_starts(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(429, headers={"Retry-After": "0.2"}), error(503))
    asked_when_told: list[int] = []
    waits: list[float] = []

    def on_wait(seconds: float) -> None:
        waits.append(seconds)
        asked_when_told.append(len(endpoint.requests))

    assert (await make().for_episode(EpisodeSpec("t", on_wait=on_wait))(HI)).text == "hello"
    assert asked_when_told == [1, 2]
    assert 0.2 <= waits[0] <= 0.205
    assert 0.005 <= waits[1] <= 0.02


async def test_retry_wait_frees_the_slot(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(503))
    policy, first, second = make(max_concurrency=1, retry_base_sec=50.0), Waits(), Waits()
    waiting = asyncio.create_task(policy.for_episode(first.spec)(HI))
    async with asyncio.timeout(10):
        await first.told.wait()
        assert (await policy.for_episode(second.spec)(HI)).text == "hello"
    assert second == []
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_retry_after_delays_all_requests(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(429, headers={"Retry-After": "50"}))
    policy, first, second = make(), Waits(), Waits()
    asking = [asyncio.create_task(policy.for_episode(first.spec)(HI))]
    async with asyncio.timeout(10):
        await first.told.wait()
        asking.append(asyncio.create_task(policy.for_episode(second.spec)(HI)))
        await second.told.wait()
    assert len(endpoint.requests) == 1, "it asked, although the endpoint had said to wait"
    assert 0 < second[0] <= first[0]
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def test_refused_wait_delays_no_other_request(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(429, headers={"Retry-After": "3600"}))
    policy, waits = make(), Waits()
    with pytest.raises(RateLimitError):
        await policy(HI)
    async with asyncio.timeout(10):
        await policy.for_episode(waits.spec)(HI)
    assert waits == []


async def test_long_wait_for_a_slot_is_reported() -> None:
    slots, waits = RequestSlots(1), Waits()

    async def wait() -> None:
        async with slots.one(waits):
            pass

    async with asyncio.timeout(20):
        async with slots.one(waits):
            waiting = asyncio.create_task(wait())
            await waits.told.wait()
            assert not waiting.done()
        await waiting


async def test_number_of_pauses_is_bounded() -> None:
    slots, waits = RequestSlots(1, sleep=lambda seconds: asyncio.sleep(0)), Waits()
    slots.pause(50.0)
    async with asyncio.timeout(20), slots.one(waits):
        pass
    assert len(waits) == MAX_PAUSES


async def test_cancelled_waiter_leaves_the_queue() -> None:
    slots, waits = RequestSlots(1), Waits()

    async def enter() -> None:
        async with slots.one(waits):
            pass

    slots.pause(50.0)
    in_pause = asyncio.create_task(enter())
    async with asyncio.timeout(10):
        await waits.told.wait()
        in_pause.cancel()
        await asyncio.wait({in_pause})
        slots = RequestSlots(1)
        async with slots.one(waits):
            in_queue = asyncio.create_task(enter())
            await asyncio.sleep(0)
            in_queue.cancel()
            await asyncio.wait({in_queue})
        async with slots.one(waits):
            pass
