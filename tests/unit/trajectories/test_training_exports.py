import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData
from ares_exp.records.results import Outcome
from ares_exp.trajectories import records
from ares_exp.trajectories.exports.preference_export import preference_rows
from ares_exp.trajectories.exports.sft_export import sft_rows
from tests.examples import examples
from tests.unit.trajectories.chats import answered, assistant, user
from tests.unit.trajectories.strategies import trajectories

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {}}}


def ran(
    requests: Sequence[Sequence[Any]],
    replies: Sequence[str | LLMResponse],
    *,
    system_prompt: str = "Be brief.",
    tools: list[Any] | None = None,
    **more: Any,
) -> records.EpisodeTrajectory:
    """An episode in which `replies` were given to `requests`, one each."""
    asked = [LLMRequest([*messages], system_prompt=system_prompt, tools=tools) for messages in requests]
    given = [reply if isinstance(reply, LLMResponse) else LLMResponse.from_text(reply) for reply in replies]
    return answered(asked, given, **more)


def talk(*replies: str, **more: Any) -> records.EpisodeTrajectory:
    """An agent that appends each reply, and the word `ok` of its user."""
    requests: list[list[Any]] = [[user("Go.")]]
    for reply in replies[:-1]:
        requests.append([*requests[-1], assistant(reply), user("ok")])
    return ran(requests, replies, **more)


def test_linear_episode_is_one_row_ending_with_reply() -> None:
    rows, report = sft_rows([talk("a", "b", "c")])
    assert list(rows) == [
        {
            "messages": [SYSTEM, user("Go."), assistant("a"), user("ok"), assistant("b"), user("ok"), assistant("c")],
            "tools": [],
            "episode_id": "e",
            "task": "task",
            "conversation": "main",
            "reward": 1.0,
        }
    ]
    assert report.sentences() == ["1 row from 1 episode."]


def test_rewritten_history_gives_one_row_per_version() -> None:
    episode = ran([[user("1")], [user("1"), assistant("a"), user("2")], [user("2")]], ["a", "b", "c"])
    rows, _ = sft_rows([episode])
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        ["Be brief.", "1", "a", "2", "b"],
        ["Be brief.", "2", "c"],
    ]


def test_other_tools_make_another_conversation() -> None:
    first, second = ran([[user("1")]], ["a"], tools=[TOOL]), ran([[user("1")]], ["a"])
    rows, _ = sft_rows([first, second])
    assert [row["tools"] for row in rows] == [[TOOL], []]


def test_same_conversation_of_two_episodes_is_one_row() -> None:
    rows, report = sft_rows([talk("a", episode_id="1"), talk("b"), talk("a", episode_id="2")])
    assert [row["episode_id"] for row in rows] == ["1", "e"]
    assert report.left_out == {"conversations that duplicate an earlier conversation": 1}
    assert report.rows == 2


def test_episodes_without_a_reward_are_counted() -> None:
    rows, report = sft_rows([talk("1", episode_id="good"), talk("2", reward=0.0), talk("3", reward=None)])
    assert [row["episode_id"] for row in rows] == ["good", "e"]
    assert report.sentences() == ["2 rows from 3 episodes.", "Left out: 1 episode without a reward."]


def test_tool_calls_have_the_chat_completions_form() -> None:
    reply = LLMResponse([TextData("Run "), TextData("it."), ToolCallData("c1", "run", '{"command": "ls"}')])
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    kept = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    episode = ran([[user("1"), kept, response]], [reply], tools=[TOOL])
    (row,) = sft_rows([episode])[0]
    assert row["messages"][2:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ab", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Run it.", "tool_calls": [call]},
    ]
    (row,) = sft_rows([episode], tool_arguments="object")[0]
    assert [row["messages"][at]["tool_calls"][0]["function"]["arguments"] for at in (2, 4)] == [{"command": "ls"}] * 2


def thought(text: str, *thoughts: str) -> LLMResponse:
    return LLMResponse([*map(ThinkingData, thoughts), ThinkingData("Zm8=", redacted=True), TextData(text)])


def test_reasoning_is_counted_and_included_on_request() -> None:
    replies = [thought("a", "one"), thought("b", "two ", "three"), thought("a", "four"), "a"]
    requests: list[list[Any]] = [[user("Go.")]]
    for text in "aba":
        requests.append([*requests[-1], assistant(text), user("ok")])
    episode = ran(requests, replies)
    rows, report = sft_rows([episode])
    assert [message["content"] for message in next(rows)["messages"][2::2]] == ["a", "b", "a", "a"]
    assert [*rows] == []
    assert "Left out: 3 blocks of reasoning (--reasoning keeps them)." in report.sentences()

    rows, report = sft_rows([episode], reasoning="field")
    (row,) = rows
    assert row["messages"][2::2] == [
        assistant("a") | {"reasoning_content": "one"},
        assistant("b") | {"reasoning_content": "two three"},
        assistant("a") | {"reasoning_content": "four"},
        assistant("a"),
    ]
    assert report.sentences() == ["1 row from 1 episode."]
    (row,) = sft_rows([episode], reasoning="think")[0]
    assert row["messages"][4] == assistant("<think>\ntwo three\n</think>\n\nb")


@pytest.mark.parametrize("tool_arguments", ["text", "object"])
def test_reasoning_precedes_tool_calls(tool_arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    kept = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    first = LLMResponse([ThinkingData("hm"), ToolCallData("c1", "run", '{"command": "ls"}')])
    episode = ran([[user("1")], [user("1"), kept, response]], [first, "done"])
    (row,) = sft_rows([episode], tool_arguments=tool_arguments, reasoning="field")[0]
    assert row["messages"][2]["reasoning_content"] == "hm"


def test_pairs_include_reasoning() -> None:
    better = ran([[user("1")]], [thought("a", "one")], reward=1.0, episode_id="good")
    worse = ran([[user("1")]], [thought("b", "two")], reward=0.0, episode_id="bad")
    (row,) = preference_rows([better, worse], reasoning="field")[0]
    assert [row[name][0]["reasoning_content"] for name in ("chosen", "rejected")] == ["one", "two"]


def test_arguments_without_an_object_remain_text() -> None:
    reply = LLMResponse([ToolCallData(str(at), "run", text) for at, text in enumerate(["{oops", "[1]", "[" * 100_000])])
    (row,) = sft_rows([ran([[user("1")]], [reply])], tool_arguments="object")[0]
    arguments = [call["function"]["arguments"] for call in row["messages"][-1]["tool_calls"]]
    assert arguments == ["{oops", "[1]", "[" * 100_000]


def test_steps_without_a_conversation_are_counted() -> None:
    board = records.StepRecord(0, "FIRST", {"board": [0]}, None, None, None, 0.0)
    end = records.StepRecord(1, "LAST", None, {"move": 1}, 1.0, 0.0, 1.0)
    game = records.EpisodeTrajectory("g", "game", (board, end), 0.0, 1.0, 1.0, 2, False, Outcome.COMPLETED)
    rows, report = sft_rows([game, ran([[user("1")]], [""])])
    assert list(rows) == []
    assert report.left_out == {
        "steps whose observation is not a chat request": 1,
        "steps whose action has neither text nor a tool call": 1,
    }


@examples(20)
@given(st.lists(trajectories(), max_size=3))
def test_rows_end_with_reply_and_never_overlap(episodes: list[records.EpisodeTrajectory]) -> None:
    rows, report = sft_rows(episodes)
    made = list(rows)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert report.rows == len(made)
    assert {row["reward"] is None for row in made} <= {False}
    for row in made:
        assert row["messages"][-1]["role"] == "assistant"
        for other in made:
            if other is not row and other["episode_id"] == row["episode_id"] and other["tools"] == row["tools"]:
                assert other["messages"][: len(row["messages"])] != row["messages"]


def test_pair_splits_before_the_first_different_reply() -> None:
    good, bad = talk("a", "good", "end", episode_id="2"), talk("a", "bad", reward=0.0, episode_id="1")
    rows, report = preference_rows([bad, good])
    assert list(rows) == [
        {
            "prompt": [SYSTEM, user("Go."), assistant("a"), user("ok")],
            "chosen": [assistant("good"), user("ok"), assistant("end")],
            "rejected": [assistant("bad")],
            "tools": [],
            "task": "task",
            "conversation": "main",
            "chosen_episode_id": "2",
            "chosen_reward": 1.0,
            "rejected_episode_id": "1",
            "rejected_reward": 0.0,
        }
    ]
    assert report.sentences() == ["1 row from 2 episodes."]


def test_attempts_split_by_environment_share_a_reply() -> None:
    good = ran([[user("Go.")], [user("Go."), assistant("a"), user("3")]], ["a", "b"])
    bad = ran([[user("Go.")], [user("Go."), assistant("a"), user("4")]], ["a", "c"], reward=0.0)
    (row,) = preference_rows([good, bad])[0]
    assert row["prompt"] == [SYSTEM, user("Go.")]
    assert row["chosen"] == [assistant("a"), user("3"), assistant("b")]


@pytest.mark.parametrize(
    ("worse", "reason"),
    [
        (talk("a", reward=0.0), "pairs of attempts with the same messages"),
        (talk("b", reward=0.0, tools=[TOOL]), "pairs of attempts with different tools"),
        (talk("b", reward=0.0, system_prompt="Be long."), "pairs of attempts whose messages differ from the start"),
    ],
)
def test_reason_for_a_missing_pair_is_reported(worse: records.EpisodeTrajectory, reason: str) -> None:
    rows, report = preference_rows([talk("a"), worse])
    assert list(rows) == []
    assert report.left_out == {reason: 1}


def test_unsuitable_attempts_make_no_pairs() -> None:
    episodes = [talk("a", reward=0.5), talk("b", reward=0.5), talk("c", reward=None), talk("d", task_name="other")]
    rows, report = preference_rows(episodes)
    assert list(rows) == []
    assert report.left_out == {
        "episodes without a reward": 1,
        "episodes of tasks whose rewards differ too little": 3,
    }
    close = [talk("a", reward=0.5), talk("b", reward=0.25)]
    assert len(list(preference_rows(close, min_margin=0.25)[0])) == 1
    assert len(list(preference_rows(close, min_margin=0.26)[0])) == 0


@examples(20)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from([None, 0.0, 0.5, 1.0])), max_size=7),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 0.75]),
    st.randoms(use_true_random=False),
)
def test_pairs_are_bounded_and_independent_of_order(
    attempts: list[tuple[str, float | None]], most: int, margin: float, random: Any
) -> None:
    episodes = [talk(text, reward=reward, episode_id=f"e{at}") for at, (text, reward) in enumerate(attempts)]
    made = list(preference_rows(episodes, pairs_per_task=most, min_margin=margin)[0])
    assert len(made) <= most
    for row in made:
        assert row["chosen_reward"] - row["rejected_reward"] >= max(margin, 0.5)
        assert row["chosen"] != row["rejected"]
    possible = {
        (good, bad)
        for good, high in attempts
        for bad, low in attempts
        if high is not None and low is not None and high > low and high - low >= margin and good != bad
    }
    assert len(made) == min(most, len(possible))
    shuffled = random.sample(episodes, len(episodes))
    assert list(preference_rows(shuffled, pairs_per_task=most, min_margin=margin)[0]) == made


@pytest.mark.parametrize("wrong", [{"min_margin": -0.1}, {"min_margin": float("nan")}, {"pairs_per_task": 0}])
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        preference_rows([], **wrong)
