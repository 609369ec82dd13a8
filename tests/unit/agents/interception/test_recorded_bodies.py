"""Request bodies that real agents sent, in the order in which they sent them (`tests.soak.recorded_bodies`).

In each run, the policy thought, called two tools (one with arguments that are no JSON, or a custom one), thought again
(in an encrypted form where the wire has one), called a tool that reads a file (an image but for qwen-code), and was
done.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.interception.agent_endpoint import WIRES
from ares_exp.agents.interception.served_wire import Asked, Wire
from ares_exp.llms.canonical import canonical, fingerprint
from ares_exp.llms.reasoning import reasoning_of_message
from ares_exp.llms.response import ThinkingData

BODIES = Path(__file__).parents[3] / "fixtures" / "agent_bodies"
CLAUDE = ("cache_control", "is_error", "metadata")
CODEX = ("client_metadata", "prompt_cache_key")
AGENTS = {
    "claude_code": ("messages", CLAUDE),
    "claude_code_betas": ("messages", (*CLAUDE, "context_management", "defer_loading")),
    "codex": ("responses", (*CODEX, "tools[tool_search]")),
    "codex_code_mode": ("responses", CODEX),
    "opencode": ("chat_completions", ()),
    "qwen_code": ("chat_completions", ()),
}
"""By the name of the file: the wire, and what cannot be carried, all of it."""

CODEX_TIMES = re.compile(r"Chunk ID: \w+|Wall time:? [\d.]+ seconds")


@cache
def runs(agent: str) -> list[list[Asked]]:
    recorded = json.loads((BODIES / f"{agent}.json").read_text())
    wire: Wire = next(one for one in WIRES if one.name == AGENTS[agent][0])
    return [[wire.read({**recorded["common"], **body}, {}) for body in run] for run in recorded["runs"]]


def timeless(value: Any) -> Any:
    if isinstance(value, str):
        return CODEX_TIMES.sub("", value)
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items()}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("agent", AGENTS)
def test_nothing_is_lost_but_what_is_declared(agent: str) -> None:
    for run in runs(agent):
        lost = {name for asked in run if asked.request.origin for name in asked.request.origin.dropped}
        assert lost == set(AGENTS[agent][1])


@pytest.mark.parametrize("agent", AGENTS)
def test_each_request_continues_the_one_before(agent: str) -> None:
    for run in runs(agent):
        assert len(run) == 3
        for earlier, later in pairwise(canonical(asked.request) for asked in run):
            assert later.continues(earlier)
            assert not earlier.continues(later)
            assert later.fingerprint != earlier.fingerprint


@pytest.mark.parametrize(
    ("agent", "normalise"), [("claude_code", None), ("codex", timeless), ("opencode", None), ("qwen_code", None)]
)
def test_two_runs_ask_the_same(agent: str, normalise: Any) -> None:
    one, other = ([fingerprint(asked.request, normalise) for asked in run] for run in runs(agent))
    assert one == other


def test_codex_differs_in_times() -> None:
    one, other = ([fingerprint(asked.request) for asked in run] for run in runs("codex"))
    assert (one[0], one[1] == other[1]) == (other[0], False)


@pytest.mark.parametrize("agent", ["opencode", "qwen_code"])
def test_reasoning_in_text_comes_back_as_it_was_given(agent: str) -> None:
    (*_, last), *_ = runs(agent)
    said = [message for message in last.request.messages if message["role"] == "assistant"]
    assert [message["reasoning_content"] for message in said] == ["I think é", "again"]


@pytest.mark.parametrize("agent", ["claude_code", "claude_code_betas", "codex"])
def test_reasoning_comes_back_as_it_was_given(agent: str) -> None:
    (*_, last), *_ = runs(agent)
    said = [message for message in last.request.messages if message["role"] == "assistant"]
    assert [reasoning_of_message(message, pytest.fail) for message in said] == [
        [ThinkingData("I think é")],
        [ThinkingData("c2VjcmV0", redacted=True)],
    ]


@pytest.mark.parametrize("agent", ["claude_code", "claude_code_betas", "codex", "opencode"])
def test_images_of_tools_are_there(agent: str) -> None:
    (*_, last), *_ = runs(agent)
    *_, part = last.request.messages[-1]["content"]
    assert part["image_url"]["url"].startswith("data:image/png;base64,")


def test_calls_of_custom_tools_come_back() -> None:
    (*_, last), *_ = runs("codex")
    (patch,) = [call for message in last.request.messages for call in message.get("tool_calls", ())][1:2]
    assert json.loads(patch["function"]["arguments"])["input"].startswith("*** Begin Patch")
    assert last.forms["apply_patch"].kind == "custom"
    (*_, last), *_ = runs("codex_code_mode")
    assert (last.forms["functions__exec"].kind, last.forms["clock__sleep"].kind) == ("custom", "function")
