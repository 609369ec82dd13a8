"""Exports of an episode whose agent asks a sub-agent and a background request: each step says whose it is."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from ares_exp.llms.request import LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.trajectories.exports.atif_writer import OTHER_CONVERSATIONS, REWRITTEN, to_atif
from ares_exp.trajectories.exports.parquet_export import write_parquet
from ares_exp.trajectories.exports.preference_export import preference_rows
from ares_exp.trajectories.exports.sft_export import sft_rows
from ares_exp.trajectories.records import EpisodeTrajectory, serialize_llm_request
from tests.unit.trajectories.chats import answered, assistant, user

CONVERSATIONS = ["main", "sub-1", "main", "side-2"]


def episode(name: str = "e", done: str = "done", reward: float = 1.0) -> EpisodeTrajectory:
    """The main conversation asks a sub-agent, goes on, and a title is asked for at the end."""
    chats = [[user("go")], [user("help")], [user("go"), assistant("ask"), user("helped")], [user("a title?")]]
    requests = [
        LLMRequest(messages, origin=Origin("chat_completions", conversation))
        for messages, conversation in zip(chats, CONVERSATIONS, strict=True)
    ]
    responses = [
        LLMResponse.from_text(text, policy_version=str(number), model="m")
        for number, text in enumerate(["ask", "help", done, "title"], 1)
    ]
    return answered(requests, responses, reward=reward, episode_id=name)


def test_parquet_has_conversations_of_requests_and_responses(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", [episode()])
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["conversation"] for row in rows] == [None, *CONVERSATIONS]
    assert [row["request_conversation"] for row in rows] == [*CONVERSATIONS, None]
    assert [row["policy_version"] for row in rows] == [None, "1", "2", "3", "4"]


def test_sft_rows_name_their_conversation() -> None:
    rows, _ = sft_rows([episode()])
    assert [(row["conversation"], row["messages"][-1]["content"]) for row in rows] == [
        ("sub-1", "help"),
        ("main", "done"),
        ("side-2", "title"),
    ]


def test_preference_pairs_use_main_conversations() -> None:
    rows, _ = preference_rows([episode(), episode("f", "gave up", 0.0)])
    (row,) = rows
    assert row["conversation"] == "main"
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("done", "gave up")


def test_atif_steps_name_their_conversation() -> None:
    document, dropped = to_atif(episode())
    acted = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["extra"]["ares_exp"].get("conversation", "main") for step in acted] == CONVERSATIONS
    assert dropped == [OTHER_CONVERSATIONS]
    told = [step["message"] for step in document["steps"] if "context_management" in step.get("extra", {})]
    assert [text.split(":")[0] for text in told] == [
        f"The agent continues its conversation {conversation}" for conversation in CONVERSATIONS[1:]
    ]
    assert [step["extra"]["ares_exp"]["action"]["policy_version"] for step in acted] == ["1", "2", "3", "4"]


def test_rewritten_history_in_a_conversation_is_reported() -> None:
    first, _, third, *_ = episode().steps
    rewritten = replace(third, step_index=1, observation=serialize_llm_request(LLMRequest([user("so far")])))
    _, dropped = to_atif(replace(episode(), steps=(first, rewritten), num_steps=2))
    assert dropped == [REWRITTEN]
