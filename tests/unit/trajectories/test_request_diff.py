"""Requests of a replay, compared with the recorded ones."""

from typing import Any

import pytest

from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.trajectories.recorded_responses import Exchange, RecordedResponses
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.request_diff import (
    Match,
    RequestComparison,
    StepComparison,
    apart,
    first_difference,
    make_normalisers,
    short_diff,
)


def request(*texts: str, **settings: Any) -> Any:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return serialize_llm_request(LLMRequest(messages, **settings))


@pytest.fixture
def comparison() -> RequestComparison:
    return RequestComparison(make_normalisers(["durations", "pids"]))


def test_equal_requests_are_exact(comparison: RequestComparison) -> None:
    one = request("a", system_prompt="s")
    assert comparison.compare(3, one, request("a", system_prompt="s")) == StepComparison(3, Match.EXACT)


def test_requests_equal_after_normalising_match(comparison: RequestComparison) -> None:
    step = comparison.compare(0, request("3 ms, pid 1, PGID: 1"), request("4 ms, pid 2, PGID: 2"))
    assert (step.match, step.where, step.normalisers) == (Match.NORMALISED, "message 0 (user)", ("durations", "pids"))
    assert step.to_dict() == {
        "step": 0,
        "match": "normalised",
        "where": "message 0 (user)",
        "normalisers": ["durations", "pids"],
    }


def test_first_different_message_is_shown_normalised(comparison: RequestComparison) -> None:
    step = comparison.compare(1, request("3 ms", "b", "x\n7 ms\ny"), request("4 ms", "b", "x\n8 ms\nz"))
    assert (step.match, step.where) == (Match.DIFFERENT, "message 2 (user)")
    assert step.diff == (" <duration>", "-y", "+z")


def test_difference_counts_once(comparison: RequestComparison) -> None:
    old, new = ["q", "a", "17"], ["q", "a", "18"]
    assert comparison.compare(1, request(*old), request(*new)).match is Match.DIFFERENT
    assert comparison.compare(2, request(*old, "b", "r"), request(*new, "b", "r")).match is Match.EXACT
    later = comparison.compare(3, request(*old, "b", "r", "c", "1 ms"), request(*new, "b", "r", "c", "2 ms"))
    assert (later.match, later.where) == (Match.NORMALISED, "message 6 (user)")
    assert comparison.compare(4, request(*old, "b", "r", "c", "x"), request(*new, "b", "r", "c", "y")).where == (
        "message 6 (user)"
    )


def test_known_difference_elsewhere_is_ignored(comparison: RequestComparison) -> None:
    comparison.compare(0, request("17"), request("18"))
    assert comparison.compare(1, request("summary", "a", "17"), request("summary", "a", "18")).match is Match.EXACT
    assert comparison.compare(2, request("17"), request("19")).match is Match.DIFFERENT


def test_secrets_are_masked_on_both_sides(comparison: RequestComparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-do-not-write-me")
    assert comparison.compare(0, request("key ***"), request("key sk-do-not-write-me")).match is Match.EXACT


def test_first_difference_of_two_texts() -> None:
    assert apart("abcdefgh", "abcdeXgh", width=4, before=2) == (3, "defg", "deXg")
    assert apart("same", "same", width=9, before=9) == (0, "same", "same")


def test_extra_or_missing_messages_differ(comparison: RequestComparison) -> None:
    more = comparison.compare(0, request("a"), request("a", "b"))
    assert (more.where, more.diff) == ("message 1 (assistant)", ("+b",))
    fewer = comparison.compare(1, request("a", "c"), request("a"))
    assert (fewer.where, fewer.diff) == ("message 1 (assistant)", ("-c",))


def test_different_settings_are_a_difference(comparison: RequestComparison) -> None:
    tools = [{"type": "function", "function": {"name": "a"}}]
    step = comparison.compare(0, request("a", temperature=0.5, tools=tools), request("a", tools=tools))
    assert (step.match, step.where, step.diff) == (Match.DIFFERENT, "`temperature`", ("-0.5",))
    assert comparison.compare(1, request("a", tools=tools), request("a")).where == "`tools`"
    assert comparison.compare(2, request("a", tools=tools), request("a")).match is Match.EXACT


def test_structured_messages_are_compared(comparison: RequestComparison) -> None:
    def with_call(call_id: str) -> dict[str, Any]:
        return {"messages": [{"role": "tool", "tool_call_id": call_id, "content": [{"text": "1 ms"}]}]}

    step = comparison.compare(0, with_call("a"), with_call("b"))
    assert (step.match, step.where) == (Match.DIFFERENT, "message 0 (tool)")
    assert any("tool_call_id" in line for line in step.diff if line[0] == "+")
    assert comparison.compare(1, with_call("a"), with_call("b")).match is Match.EXACT


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "reasoning_details"])
def test_reasoning_in_messages_is_ignored(comparison: RequestComparison, field: str) -> None:
    def kept(text: str, reasoning: Any, role: str = "assistant") -> dict[str, Any]:
        return {"messages": [{"role": role, "content": text, **({field: reasoning} if reasoning else {})}]}

    for was, now in (("hm", "well"), ("hm", None), (None, [{"type": "reasoning.text", "text": "hm"}])):
        assert comparison.compare(0, kept("a", was), kept("a", now)).match is Match.EXACT
        assert first_difference(kept("a", was), kept("a", now)) is None
    step = comparison.compare(1, kept("a", "hm"), kept("b", "well"))
    assert (step.match, step.diff) == (Match.DIFFERENT, ("-a", "+b"))
    assert comparison.compare(2, kept("a", "hm", "user"), kept("a", "well", "user")).match is Match.DIFFERENT


@pytest.mark.parametrize("has_origin", [(True, True), (True, False), (False, True), (False, False)])
def test_equivalent_spelling_matches_only_over_http(
    comparison: RequestComparison, has_origin: tuple[bool, bool]
) -> None:
    origins = [{"origin": Origin("chat_completions")} if has else {} for has in has_origin]
    spellings = "a", [{"type": "text", "text": "a"}]
    old, new = (
        serialize_llm_request(LLMRequest([{"role": "user", "content": content}], **more))
        for content, more in zip(spellings, origins, strict=True)
    )
    assert comparison.compare(0, old, new).is_same == all(has_origin)


def test_conversations_do_not_share_a_recorded_one() -> None:
    def asked(conversation: str) -> Any:
        return request("q", origin=Origin("chat_completions", conversation))

    recorded = RecordedResponses([Exchange(asked("old"), LLMResponse.from_text(text)) for text in "ab"])
    first = recorded.next_for(asked("one"))
    assert first.response == LLMResponse.from_text("a")
    assert recorded.next_for(asked("two")) is None


def test_foreign_observations_differ(comparison: RequestComparison) -> None:
    assert comparison.compare(0, {"value": 1}, request("a")).match is Match.DIFFERENT
    assert comparison.compare(1, {"messages": ["odd"]}, request("a")).where == "message 0 (None)"


def test_diff_is_short() -> None:
    old, new = "\n".join(map(str, range(1000))), "\n".join(map(str, range(500, 1500)))
    diff = short_diff(old, new)
    assert len(diff) == 12
    assert diff[-1].endswith("more lines")
    assert max(map(len, short_diff("a" * 10_000 + "b" + "a" * 10_000, "a" * 20_001))) < 200
