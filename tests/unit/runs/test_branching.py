"""Branches: their first answer; whole branches are in tests/e2e/test_branches.py."""

from __future__ import annotations

from typing import Any

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.runs.branching import _FirstAnswer

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HI = LLMRequest([{"role": "user", "content": "hi"}])


def branch(*replies: str) -> Any:
    return _FirstAnswer("given", ScriptedPolicy(replies=list(replies)).for_episode(EpisodeSpec("t")))


async def test_the_policy_answers_after_the_answer_that_was_given() -> None:
    client = branch("a", "b")
    assert [(await client(HI)).text for _ in range(3)] == ["given", "a", "b"]


async def test_a_resumed_branch_goes_past_what_was_answered() -> None:
    client = branch("a", "b")
    client.advance(HI, LLMResponse.from_text("given"))
    assert (await client(HI)).text == "a"
    client = branch("a", "b")
    for text in ("given", "a"):
        client.advance(HI, LLMResponse.from_text(text))
    assert (await client(HI)).text == "b"


async def test_a_policy_without_a_place_of_its_own_is_told_nothing() -> None:
    client: Any = _FirstAnswer("given", OraclePolicy())
    client.advance(HI, LLMResponse.from_text("given"))
    client.advance(HI, LLMResponse.from_text("x"))
    assert "solve.sh" in (await client(HI)).text
