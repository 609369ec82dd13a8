import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from ares_exp.containers.activity import CommandRecord
from ares_exp.errors import ConfigError, TrajectoryFormatError
from ares_exp.llms.request import LLMRequest, freeze
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.exports import parquet_export
from ares_exp.trajectories.exports.parquet_export import write_parquet
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, serialize_llm_request, serialize_llm_response
from tests.unit.trajectories.chats import chat, with_response

RESPONSE = LLMResponse(
    [TextData("look"), ToolCallData("c1", "run", '{"a": 1}'), TextData("ing")],
    cost=0.25,
    usage=Usage(7, 3),
    completion_token_ids=[5, 6, 7],
    logprobs=[-0.5, -1.0, -2.0],
    finish_reason="stop",
    model="local/tiny",
)


def episode(steps: int = 3, *, name: str = "e", text: str = "", metadata: Any = None) -> EpisodeTrajectory:
    """`steps` answers: the first record is FIRST, the last one LAST with the reward 1."""
    commands = (CommandRecord("ls", 0, 0.1), CommandRecord("sleep 9", None, 9.0, True))
    messages = freeze([{"role": "user", "content": f"{index} {text}"} for index in range(steps)])
    base, records = chat(name, "task", length=steps + 1), []
    for index, record in enumerate(base.steps):
        request = None if index == steps else serialize_llm_request(LLMRequest(messages[: index + 1]))
        acted = {"action": serialize_llm_response(RESPONSE), "policy_sec": 0.5, "commands": commands} if index else {}
        records.append(replace(record, observation=request, **acted))  # type: ignore[arg-type]
    known = {"attempt": 0} if metadata is None else metadata
    return replace(base, steps=tuple(records), metadata=known)


def failed() -> EpisodeTrajectory:
    error = ErrorInfo("ContainerStartError", "no image")
    return EpisodeTrajectory("failed", "task", (), 1.0, 2.0, None, 0, False, Outcome.CONTAINER_ERROR, error)


def written(folder: Path, *episodes: EpisodeTrajectory) -> Path:
    path = folder / "t.parquet"
    write_parquet(path, episodes)
    return path


def test_each_step_is_a_row(tmp_path: Path) -> None:
    table = pq.read_table(written(tmp_path, replace(episode(2), error=ErrorInfo("limit", "steps"))))
    first, second, third = table.to_pylist()
    assert [row["step_type"] for row in (first, second, third)] == ["FIRST", "MID", "LAST"]
    assert [row["reward"] for row in (first, second, third)] == [None, 0.0, 1.0]
    assert [row["returns_to_go"] for row in (first, second, third)] == [None, 1.0, 1.0]
    assert {row["total_reward"] for row in (first, second, third)} == {1.0}
    assert json.loads(second["metadata"]) == {"attempt": 0}
    assert (second["error_type"], second["error_message"]) == ("limit", "steps")
    expected = {
        "episode_id": "e",
        "task_name": "task",
        "outcome": "completed",
        "num_steps": 3,
        "model": "local/tiny",
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "generated_tokens": 3,
        "cost": 0.25,
        "response": "looking",
        "tool_calls": [{"id": "c1", "name": "run", "arguments": '{"a": 1}'}],
        "completion_token_ids": [5, 6, 7],
        "logprobs": [-0.5, -1.0, -2.0],
        "policy_sec": 0.5,
        "container_sec": None,
        "commands": [
            {"command": "ls", "exit_code": 0, "duration_sec": 0.1, "timed_out": False},
            {"command": "sleep 9", "exit_code": None, "duration_sec": 9.0, "timed_out": True},
        ],
    }
    assert {name: second[name] for name in expected} == expected
    assert json.loads(second["messages_added"]) == [{"role": "user", "content": "1 "}]
    assert first["response"] is None
    assert third["messages_added"] is None


def test_reasoning_and_its_tokens_have_columns(tmp_path: Path) -> None:
    thoughts = [ThinkingData("h"), ThinkingData("m"), ThinkingData("Zm8=", redacted=True)]
    response = LLMResponse([*thoughts, TextData("hi")], usage=Usage(10, 7, cached_tokens=4, reasoning_tokens=5))
    trajectory = with_response(chat(), response)
    _, second, third, _ = pq.read_table(written(tmp_path, trajectory)).to_pylist()
    names = ("reasoning", "response", "cached_tokens", "reasoning_tokens")
    assert [second[name] for name in names] == ["hm", "hi", 4, 5]
    assert [third[name] for name in names] == [None, "I do 2.", None, None]


def test_episode_failed_in_reset_has_one_row(tmp_path: Path) -> None:
    rows = pq.read_table(written(tmp_path, failed(), episode(), failed())).to_pylist()
    assert len(rows) == 1 + 4 + 1
    assert rows[0]["error_type"] == "ContainerStartError"
    assert rows[0]["num_steps"] == 0
    assert rows[0]["step_index"] is rows[0]["commands"] is rows[0]["total_reward"] is None
    assert [row["episode_id"] for row in rows] == ["failed", *["e"] * 4, "failed"]


def test_docstring_names_every_column(tmp_path: Path) -> None:
    schema = pq.read_schema(written(tmp_path))
    assert schema == pq.read_schema(written(tmp_path, failed(), episode()))
    lines = [line.split("|")[1] for line in (parquet_export.__doc__ or "").splitlines() if line.startswith("| `")]
    documented = [name.strip("` ") for line in lines for name in line.split(",")]
    assert sorted(documented) == sorted(schema.names)


def test_rewards_by_name_can_be_queried(tmp_path: Path) -> None:
    scored = replace(episode(), rewards={"reward": 1.0, "style": 0.5})
    path = written(tmp_path, scored, replace(episode(), episode_id="plain", rewards={}))
    found = duckdb.sql(f"select episode_id, rewards['style'] from '{path}' where step_index = 0 order by 2").fetchall()
    assert found == [(scored.episode_id, 0.5), ("plain", None)]


def test_foreign_action_leaves_response_columns_empty(tmp_path: Path) -> None:
    step = StepRecord(0, "MID", {"messages": 3}, {"data": "x", "usage": 3}, 0.5, math.inf, 0.0)
    odd = replace(episode(), steps=(step,), num_steps=1, task_name="half \ud83e", error=ErrorInfo("\udc80", "\x00"))
    [row] = pq.read_table(written(tmp_path, odd)).to_pylist()
    names = "cost model response tool_calls prompt_tokens logprobs completion_token_ids"
    assert {row[name] for name in names.split()} == {None}
    assert row["discount"] == math.inf
    assert (row["task_name"], row["error_type"]) == ("half \\ud83e", "\\udc80")


def test_value_outside_its_column_is_an_error(tmp_path: Path) -> None:
    for changes in ({"action": {"data": [], "usage": {}, "model": 4}}, {"step_index": 2**80}):
        odd = replace(episode(), steps=(replace(episode().steps[1], **changes),), num_steps=1)
        with pytest.raises(TrajectoryFormatError, match="Cannot write the rows of 'e' to a table: "):
            written(tmp_path, odd)


def test_failure_preserves_the_old_file(tmp_path: Path) -> None:
    path = written(tmp_path, episode())
    before = path.read_bytes()

    def broken() -> Any:
        yield episode(name="other")
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_parquet(path, broken())
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["t.parquet"]


def test_missing_package_is_an_error_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'ares-exp\[parquet\]'"):
        written(tmp_path, episode())


def test_secrets_reach_no_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-do-not-write-me"
    monkeypatch.setenv("SOME_API_KEY", secret)
    action = serialize_llm_response(LLMResponse([TextData(secret), ToolCallData("1", "run", secret)], model=secret))
    observation = {"messages": [{"role": "user", "content": secret}]}
    step = StepRecord(0, "MID", observation, action, 0.0, 1.0, 0.0, commands=(CommandRecord(f"echo {secret}", 0, 0.1),))
    told = replace(
        episode(), steps=(step,), num_steps=1, task_name=secret, error=ErrorInfo("E", secret), metadata={"x": secret}
    )
    rows = pq.read_table(written(tmp_path, told)).to_pylist()
    assert secret not in repr(rows)
    assert rows[0]["commands"][0]["command"] == "echo ***"
