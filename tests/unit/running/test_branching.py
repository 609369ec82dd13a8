"""Branches: their first answer, and what they share; whole branches are in tests/e2e/test_branches.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.containers.local.leftovers import find
from ares_exp.containers.local.prepared_files import PreparedFiles
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.records.results import EpisodeResult
from ares_exp.running.branching import _FirstAnswer

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


@pytest.mark.local
@pytest.mark.parametrize(("branches", "copies"), [(1, []), (3, [True] * 3)])
def test_branches_start_from_files_that_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branches: int, copies: list[bool]
) -> None:
    copied, copied_to = [], PreparedFiles.copied_to

    def seen(self: PreparedFiles, *arguments: Any) -> bool:
        copied.append(copied_to(self, *arguments))
        return copied[-1]

    def play(*words: str, commands: tuple[str, ...]) -> list[EpisodeResult]:
        replies = ",".join(f'"```bash\n{command}\n```"' for command in commands)
        return list(ares_exp.run([*words, "tracker=none", f"policy.replies=[{replies}]"], quiet=True).rows)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PreparedFiles, "copied_to", seen)
    task = ("env.tasks=write-greeting", "container=local", "policy=scripted", "snapshot=every_step")
    play(*task, "hydra.run.dir=a", commands=("echo Hello, harbor! > /app/drawn", SUBMIT))
    begin = ("branch_from=a/write-greeting@1", f"branches={branches}", "snapshot=none", "hydra.run.dir=b")
    rows = play(*begin, commands=("cp /app/drawn /app/greeting.txt", SUBMIT))
    assert [row.reward for row in rows] == [1.0] * branches
    assert copied == copies
    assert [one for one in find() if one.kind == "directory" and one.whose == f"process {os.getpid()}"] == []
