"""Rows of sampled tokens: what goes on, what forks, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ares_exp.errors import UntrainableError
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.endpoint_policy import SAMPLING_FIELDS
from ares_exp.policies.in_process.sampling import NEUTRAL_SAMPLING
from ares_exp.training.sampled_calls import NEUTRAL
from ares_exp.training.sequences import SequenceCounts, sequences_of
from ares_exp.trajectories import JsonTrajectoryCollector, load
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.training.sampled_episodes import Call, check_rule, episode

FIRST = Call([1, 2, 3], [10, 11], version="v1")
SECOND = Call([1, 2, 3, 10, 11, 4, 5], [20], version="v2")
"""Goes on exactly where the first ended."""

RETOKENISED = Call([1, 2, 3, 1011, 4, 5], [20, 21])
"""The same text as `SECOND`'s history, perhaps: other ids."""


def test_calls_that_go_on_where_the_one_before_ended_are_one_row() -> None:
    report = sequences_of(episode([FIRST, SECOND], attempt=2))
    (row,) = report.rows
    assert row.ids == (1, 2, 3, 10, 11, 4, 5, 20)
    assert row.mask == (0, 0, 0, 1, 1, 0, 0, 1)
    assert row.logprobs == (0, 0, 0, *FIRST.logprobs, 0, 0, *SECOND.logprobs)
    assert (row.reward, row.rewards, row.task, row.attempt) == (1.0, {"reward": 1.0}, "task", 2)
    assert (row.conversation, row.episode_id, row.policy_versions) == ("main", "e1", ("v1", "v2"))
    assert (row.steps, row.starts, row.made) == ((1, 2), (3, 7), "clean")
    assert row.prompt_ids == (1, 2, 3)
    assert row.response_ids == (10, 11, 4, 5, 20)
    assert row.response_mask == (1, 1, 0, 0, 1)
    assert row.response_logprobs == (*FIRST.logprobs, 0, 0, *SECOND.logprobs)
    assert (report.clean, report.realigned, report.forked, report.calls) == (1, 0, 0, 2)


def test_other_ids_for_what_was_sampled_fork_and_no_token_is_trained_on_twice() -> None:
    report = sequences_of(episode([FIRST, RETOKENISED]))
    kept, forked = report.rows
    assert (kept.ids, kept.mask) == ((1, 2, 3, 10, 11), (0, 0, 0, 1, 1))
    assert (forked.ids, forked.mask) == ((1, 2, 3, 1011, 4, 5, 20, 21), (0, 0, 0, 0, 0, 0, 1, 1))
    assert (kept.made, forked.made) == ("clean", "forked")
    assert (report.clean, report.realigned, report.forked) == (1, 0, 1)


def test_a_rewritten_history_forks_and_later_calls_go_on_in_the_row_that_fits() -> None:
    compacted = Call([1, 9, 9], [30])
    of_first = Call([1, 2, 3, 10, 11, 4, 5, 20, 6], [40])
    of_compacted = Call([1, 9, 9, 30, 7], [50])
    calls = [FIRST, SECOND, compacted, of_first, of_compacted]
    report = sequences_of(episode(calls))
    assert [row.steps for row in report.rows] == [(1, 2, 4), (3, 5)]
    assert check_rule(report.rows, calls) == 2 + 1 + 1 + 1 + 1


def test_of_several_rows_the_longest_start_goes_on() -> None:
    again = Call(FIRST.prompt, [10])
    report = sequences_of(episode([FIRST, again, SECOND]))
    assert [row.steps for row in report.rows] == [(1, 3), (2,)]


def test_a_row_goes_on_with_other_tokens_at_its_end_where_that_is_allowed() -> None:
    other_end = Call([1, 2, 3, 10, 99, 4], [20])  # the template closes the turn with another token than was sampled
    report = sequences_of(episode([FIRST, other_end]), realign_tokens=1)
    (row,) = report.rows
    assert (row.ids, row.mask) == ((1, 2, 3, 10, 99, 4, 20), (0, 0, 0, 1, 0, 0, 1))
    assert (row.made, report.realigned, report.untrained_tokens) == ("realigned", 1, 1)
    assert check_rule(report.rows, [FIRST, other_end]) == 2
    assert len(sequences_of(episode([FIRST, other_end])).rows) == 2
    assert "1 sampled token" in report.sentences()[1]


def test_a_realignment_leaves_a_token_of_the_last_call() -> None:
    """Another conversation shares the start of every chat: that is no reason to throw a short answer away."""
    short, other = Call([1, 2], [10]), Call([1, 7, 7], [20])
    assert [row.steps for row in sequences_of(episode([short, other]), realign_tokens=5).rows] == [(1,), (2,)]


def test_sub_agents_and_background_client_are_trained_on_when_asked() -> None:
    calls = [FIRST, Call([7], [8], "sub-1a"), SECOND, Call([7, 8, 9], [5], "sub-1a"), Call([1, 2, 3], [4], "side-2b")]
    alone, subs, everything = (
        sequences_of(episode(calls), conversations=conversations)
        for conversations in (("main",), ("main", "sub-*"), ("*",))
    )
    assert [row.conversation for row in alone.rows] == ["main"]
    assert alone.other_conversations == {"sub-1a": 2, "side-2b": 1}
    assert [(row.conversation, row.steps) for row in subs.rows] == [("main", (1, 3)), ("sub-1a", (2, 4))]
    assert [row.conversation for row in everything.rows] == ["main", "sub-1a", "side-2b"]
    assert all(row.made == "clean" for row in everything.rows)
    assert "3 calls of other conversations (side-2b, sub-1a)" in alone.sentences()[1]
    with pytest.raises(ValueError, match="a list of names"):
        sequences_of(episode(calls), conversations="main")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"prompt_token_ids": None}, "no `prompt_token_ids`.*policy=vllm"),
        ({"completion_token_ids": None}, "no `completion_token_ids`"),
        ({"logprobs": None}, "no `logprobs`.*policy=transformers"),
        ({"logprobs": [-0.5]}, "2 sampled tokens and 1 log-prob"),
        ({"logprobs": [-0.5, float("nan")]}, "no list of log-probabilities"),
        ({"logprobs": [-0.5, 0.5]}, "no list of log-probabilities"),
        ({"logprobs": [-0.5, float("-inf")]}, "no list of log-probabilities"),
        ({"completion_token_ids": [1, -1]}, "no list of ids"),
        ({"completion_token_ids": [1, True]}, "no list of ids"),
        ({"completion_token_ids": [], "logprobs": []}, "3 prompt and 0 sampled tokens"),
        ({"prompt_token_ids": []}, "0 prompt and 2 sampled tokens"),
        ({"sampling": {"temperature": 0.7}}, "temperature 0.7, expected 1"),
        ({"sampling": {"temperature": 1.0, "top_p": 0.9}}, "`top_p=0.9`"),
        ({"sampling": {"top_k": 20}}, "`top_k=20`"),
        ({"sampling": {"min_p": 0.05}}, "`min_p=0.05`"),
        ({"sampling": {"repetition_penalty": 1.1}}, "`repetition_penalty=1.1`"),
        ({"sampling": {"response_format": {"type": "json_object"}}}, "`response_format="),
    ],
)
def test_what_is_no_sampling_from_the_policy_is_refused_by_name(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(UntrainableError, match=message) as refused:
        sequences_of(episode([FIRST], model="tiny", **broken))
    assert "by tiny at step 1 of episode e1 (task)" in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LLMRequest([{"role": "user", "content": "x"}], tool_choice="required"), "tool_choice='required'"),
        (
            LLMRequest([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]),
            r"do not tell \(image_url\)",
        ),
    ],
)
def test_requests_whose_responses_are_no_sampling_are_refused(request_: LLMRequest, message: str) -> None:
    with pytest.raises(UntrainableError, match=message):
        sequences_of(episode([FIRST], request=request_))


def test_whatever_alters_sampling_is_recorded_by_policies_that_ask_endpoints() -> None:
    """What is not on record could not be refused."""
    assert set(NEUTRAL) - set(SAMPLING_FIELDS) == set()


def test_neutral_values_of_token_endpoints_are_trainable() -> None:
    assert sequences_of(episode([FIRST], sampling=NEUTRAL_SAMPLING)).clean == 1


def test_sampling_that_is_not_on_record_is_that_of_the_request() -> None:
    with pytest.raises(UntrainableError, match=r"top_p=0\.5"):
        sequences_of(episode([FIRST], request=LLMRequest([], top_p=0.5), sampling=None))
    report = sequences_of(episode([FIRST], sampling=None))
    assert report.unstated_sampling == 1
    assert "The record of 1 call has no temperature" in report.sentences()[-1]


def test_sampling_left_to_the_engine_is_reported() -> None:
    left = {"temperature": 1.0, "top_k": None, "seed": None}
    assert sequences_of(episode([FIRST], sampling=left)).unstated_sampling == 1
    assert sequences_of(episode([FIRST], sampling={"temperature": 1.0, "seed": None})).unstated_sampling == 0


def test_neutral_sampling_is_taken_and_other_sampling_when_asked() -> None:
    neutral = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": True, "max_tokens": 5}
    assert sequences_of(episode([FIRST], sampling=neutral)).unstated_sampling == 0
    altered = episode([FIRST], sampling={"temperature": 0.7, "top_p": 0.9})
    assert sequences_of(altered, temperature=0.7, altered_sampling=True).clean == 1
    assert sequences_of(altered, temperature=None, altered_sampling=True).clean == 1
    with pytest.raises(UntrainableError, match="top_p"):
        sequences_of(altered, temperature=0.7)


def test_an_episode_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(UntrainableError, match=r"e1 \(task\) has no sampled tokens"):
        sequences_of(episode([]))
    with pytest.raises(UntrainableError, match="conversations main; there are sub-1"):
        sequences_of(episode([replace(FIRST, conversation="sub-1")]))


def test_rows_of_a_dict_and_of_a_file_are_those_of_memory(tmp_path: Path) -> None:
    whole = episode([FIRST, SECOND, RETOKENISED])
    expected = sequences_of(whole)
    assert sequences_of(whole.to_dict()) == expected
    collector = JsonTrajectoryCollector(tmp_path)
    handle = collector.begin_episode(task_name="task", metadata=whole.metadata, episode_id="e1", start_time=0.0)
    for record in whole.steps:
        collector.record_step(record, episode=handle)
    collector.end_episode(episode=handle, rewards=whole.rewards)
    (stored,) = load(tmp_path)
    assert sequences_of(stored) == expected


@st.composite
def histories(draw: st.DrawFn) -> list[Call]:
    """Calls of an agent that goes on, rewrites, retokenises and asks again, in two conversations."""
    token = st.integers(0, 3)  # few ids: starts coincide by chance, too
    spoken = st.lists(token, min_size=1, max_size=3)
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 7))):
        conversation = draw(st.sampled_from(["main", "sub-1"]))
        earlier = [call for call in calls if call.conversation == conversation]
        base: list[int] = []
        if earlier:
            past = draw(st.sampled_from(earlier))
            base = [*past.prompt, *past.completion]
        cut = draw(st.sampled_from([0, 0, 0, 1, 2, len(base)]))
        prompt = [*base[: len(base) - cut], *draw(st.lists(token, max_size=3))]
        calls.append(Call(prompt or [0], draw(spoken), conversation))
    return calls


@given(histories(), st.integers(0, 2))
def test_the_rule_holds_for_any_history(calls: list[Call], realign_tokens: int) -> None:
    report = sequences_of(episode(calls), conversations=["*"], realign_tokens=realign_tokens)
    trained = check_rule(report.rows, calls)
    assert trained == sum(len(call.completion) for call in calls) - report.untrained_tokens
    assert report.untrained_tokens == 0 or realign_tokens
    assert report.clean + report.realigned + report.forked == len(report.rows)
    assert sorted(step for row in report.rows for step in row.steps) == list(range(1, len(calls) + 1))
    for row in report.rows:
        assert all(row.mask[at] and not any(row.mask[: row.starts[0]]) for at in row.starts)


def test_counts_of_several_reports_add_up() -> None:
    counts = SequenceCounts()
    for call in (SECOND, RETOKENISED):
        counts.add(sequences_of(episode([FIRST, call])))
    assert counts.sentences() == ["3 rows of 4 calls, 7 tokens trained on: 2 clean, 0 re-aligned, 1 forked."]


def test_episodes_without_a_reward_have_rows_without_one() -> None:
    whole: EpisodeTrajectory = episode([FIRST], reward=None)
    assert sequences_of(whole).rows[0].reward is None
