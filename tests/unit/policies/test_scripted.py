from __future__ import annotations

import asyncio
from typing import Any

import pydantic
import pytest

from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.policies.scripted import ScriptedPolicy

HI = LLMRequest([{"role": "user", "content": "hi"}])


async def execute(client: LLMClient, count: int) -> list[str]:
    return [(await client(HI)).text for _ in range(count)]


async def test_replies_in_order() -> None:
    policy: Policy = ScriptedPolicy(replies=["a", "b"])
    await policy.preflight()
    response = await policy.for_episode(EpisodeSpec("t"))(HI)
    assert (response.text, response.model, response.finish_reason, response.cost) == ("a", "scripted", "stop", 0.0)
    await policy.close()
    await policy.close()


async def test_concurrent_episodes_have_their_own_place() -> None:
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


async def test_repeating_the_last_reply() -> None:
    client = ScriptedPolicy(replies=["a", "b"], repeat_last=True).for_episode(EpisodeSpec("t"))
    assert await execute(client, 4) == ["a", "b", "b", "b"]


async def test_an_advanced_reply_is_skipped() -> None:
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


async def test_no_replies_at_all() -> None:
    with pytest.raises(PolicyError, match="has 0 replies"):
        await ScriptedPolicy(replies=[], repeat_last=True)(HI)


@pytest.mark.parametrize(
    ("task_name", "said"),
    [("fix-1", "exact"), ("fix-2", "glob"), ("fix-2b", "glob"), ("other", "default"), ("fix-[x]", "brackets")],
)
async def test_replies_by_task(task_name: str, said: str) -> None:
    policy = ScriptedPolicy(
        replies={"*": ["default"], "fix-[x]": ["brackets"], "fix-*": ["glob"], "fix-2*": ["later"], "fix-1": ["exact"]}
    )
    assert await execute(policy.for_episode(EpisodeSpec(task_name)), 1) == [said]


async def test_a_task_without_replies() -> None:
    policy = ScriptedPolicy(replies={"a": ["x"], "b-*": ["y"]})
    with pytest.raises(PolicyError, match=r"task 'c' in policy\.replies, which has: a, b-\*\. .*'\*'"):
        policy.for_episode(EpisodeSpec("c"))


async def test_a_policy_is_a_client_without_a_run() -> None:
    assert await execute(ScriptedPolicy(replies={"*": ["a", "b"]}), 2) == ["a", "b"]


@pytest.mark.parametrize("replies", ["text", [1], {"a": "text"}, None, {"a": [None]}])
def test_wrong_replies(replies: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match="replies"):
        ScriptedPolicy(replies=replies)


async def test_a_reply_may_call_tools() -> None:
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
