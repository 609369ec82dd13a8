import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.containers.activity import CommandRecord
from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, ToolCallData, Usage
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.trajectories.exports import parquet_export
from ares_exp.trajectories.exports.parquet_export import read_parquet, write_parquet
from ares_exp.trajectories.files.episode_file import read_episodes
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
    total_reward,
)
from tests.examples import examples
from tests.unit.trajectories.chats import chat, with_answer
from tests.unit.trajectories.strategies import trajectories

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
    messages = [{"role": "user", "content": f"go {text}"}]
    records = [StepRecord(0, "FIRST", serialize_llm_request(LLMRequest(messages)), None, None, None, 10.0)]
    for index in range(1, steps + 1):
        messages.append({"role": "user", "content": f"{index} {text}"})
        last = index == steps
        records.append(
            StepRecord(
                index,
                "LAST" if last else "MID",
                None if last else serialize_llm_request(LLMRequest(messages)),
                serialize_llm_response(RESPONSE),
                float(last),
                float(not last),
                10.0 + index,
                policy_sec=0.5,
                commands=(
                    CommandRecord("ls", 0, 0.1),
                    CommandRecord("sleep 9", None, 9.0, True),
                ),
            )
        )
    return EpisodeTrajectory(
        episode_id=name,
        task_name="task",
        steps=tuple(records),
        start_time=9.0,
        end_time=99.0,
        total_reward=total_reward(records),
        num_steps=len(records),
        truncated=False,
        outcome=Outcome.COMPLETED,
        metadata={"attempt": 0} if metadata is None else metadata,
    )


def failed() -> EpisodeTrajectory:
    error = ErrorInfo("ContainerStartError", "no image")
    return EpisodeTrajectory("failed", "task", (), 1.0, 2.0, None, 0, False, Outcome.CONTAINER_ERROR, error)


def written(folder: Path, *episodes: EpisodeTrajectory) -> Path:
    path = folder / "t.parquet"
    write_parquet(path, episodes)
    return path


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes=st.lists(trajectories(), max_size=3))
def test_whatever_was_recorded_comes_back(tmp_path: Path, episodes: list[EpisodeTrajectory]) -> None:
    path = written(tmp_path, *episodes)
    assert list(read_parquet(path)) == episodes


def test_each_step_is_a_row_with_what_people_ask_for(tmp_path: Path) -> None:
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
    answer = LLMResponse([*thoughts, TextData("hi")], usage=Usage(10, 7, cached_tokens=4, reasoning_tokens=5))
    trajectory = with_answer(chat(), answer)
    _, second, third, _ = pq.read_table(written(tmp_path, trajectory)).to_pylist()
    names = ("reasoning", "response", "cached_tokens", "reasoning_tokens")
    assert [second[name] for name in names] == ["hm", "hi", 4, 5]
    assert [third[name] for name in names] == [None, "I do 2.", None, None]
    assert list(read_parquet(written(tmp_path, trajectory))) == [trajectory]


def test_an_episode_that_failed_in_reset_has_one_row_and_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path, failed(), episode(), failed())
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 1 + 4 + 1
    assert rows[0]["error_type"] == "ContainerStartError"
    assert rows[0]["num_steps"] == 0
    assert rows[0]["step_index"] is rows[0]["step_json"] is rows[0]["total_reward"] is None
    assert list(read_parquet(path)) == [failed(), episode(), failed()]


def test_a_file_of_no_episodes_has_the_columns(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert list(read_parquet(path)) == []
    assert pq.read_schema(path).names == parquet_export.parquet_schema().names


def test_the_schema_is_versioned_and_the_docstring_names_every_column(tmp_path: Path) -> None:
    schema = pq.read_schema(written(tmp_path, episode()))
    assert schema.metadata[b"ares_exp.schema_version"] == b"4"
    lines = [line.split("|")[1] for line in (parquet_export.__doc__ or "").splitlines() if line.startswith("| `")]
    documented = [name.strip("` ") for line in lines for name in line.split(",")]
    assert sorted(documented) == sorted(schema.names)


def test_rewards_by_name_can_be_queried(tmp_path: Path) -> None:
    scored = replace(episode(), rewards={"reward": 1.0, "style": 0.5})
    path = written(tmp_path, scored, replace(episode(), episode_id="plain", rewards={}))
    found = duckdb.sql(f"select episode_id, rewards['style'] from '{path}' where step_index = 0 order by 2").fetchall()
    assert found == [(scored.episode_id, 0.5), ("plain", None)]


def test_golden_file_is_read() -> None:
    golden = Path(__file__).parent / "golden"
    assert list(read_parquet(golden / "version_4.parquet")) == list(read_episodes(golden / "version_3.jsonl"))


def test_file_of_another_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(parquet_export, "SCHEMA_VERSION", 3)
        path = written(tmp_path, episode())
    with pytest.raises(TrajectoryFormatError, match="expected schema_version 4, got 3: use the version of ares_exp"):
        list(read_parquet(path))


def test_values_that_no_column_can_hold_are_null_there_and_come_back(tmp_path: Path) -> None:
    action = {
        "data": "x",
        "usage": 3,
        "cost": True,
        "model": 4,
        "logprobs": [0.5, None],
        "completion_token_ids": [2**70],
    }
    steps = (StepRecord(0, "MID", {"messages": 3}, action, 0.5, math.inf, 0.0),)
    odd = replace(episode(), steps=steps, num_steps=1, task_name="half \ud83e", error=ErrorInfo("\udc80", "\x00"))
    path = written(tmp_path, odd)
    [row] = pq.read_table(path).to_pylist()
    names = "cost model response tool_calls prompt_tokens logprobs completion_token_ids"
    assert {row[name] for name in names.split()} == {None}
    assert row["discount"] == math.inf
    assert row["task_name"] == "half \\ud83e"
    assert list(read_parquet(path)) == [odd]


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


def test_the_size_grows_linearly_also_with_large_metadata(tmp_path: Path) -> None:
    noise = "".join(chr(32 + (number * 7919) % 997) for number in range(400_000))
    sizes = []
    for steps in (200, 400):
        path = written(tmp_path, episode(steps, metadata={"config": noise}))
        group = pq.read_metadata(path).row_group(0)
        sizes.append(group.total_byte_size)
        assert [item.num_steps for item in read_parquet(path)] == [steps + 1]
    assert sizes[1] < 1.1 * sizes[0]
    texts = [episode(steps, text="y" * 2000) for steps in (200, 400)]
    sizes = [pq.read_metadata(written(tmp_path, item)).row_group(0).total_byte_size for item in texts]
    assert sizes[1] < 2.1 * sizes[0]


def test_episodes_are_taken_one_at_a_time_and_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = written(tmp_path, episode())

    def broken() -> Any:
        yield episode(name="other")
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_parquet(path, broken())
    assert list(read_parquet(path)) == [episode()]
    assert [item.name for item in tmp_path.iterdir()] == ["t.parquet"]


def test_an_episode_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryFormatError, match="Expected 7 steps of 'e', got 4"):
        written(tmp_path, replace(episode(), num_steps=7))


def rewritten(path: Path, change: Any) -> Path:
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    return path


def with_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.schema.get_field_index(name), name, [values])


def test_what_another_program_filtered_and_wrote_again_is_read(tmp_path: Path) -> None:
    def change(table: Any) -> Any:
        kept = table.filter(pa.compute.equal(table["outcome"], "completed"))
        columns = [column.cast(pa.large_string()) if column.type == pa.string() else column for column in kept.columns]
        return pa.table(columns, names=table.schema.names).select(["step_json", "outcome", "episode_json"])

    path = rewritten(written(tmp_path, failed(), episode(), episode(5, name="f")), change)
    assert list(read_parquet(path)) == [episode(), episode(5, name="f")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(0, 2), "expected 4 steps, got 2"),
        (lambda t: t.take([0, 1, 4, 2, 3, 5, 6, 7]), "expected 4 steps, got 2"),
        (lambda t: t.drop_columns(["step_json"]), "step_json"),
        (lambda t: with_column(t, "step_json", list(range(8))), "must be str"),
        (lambda t: with_column(t, "step_json", ["{}", None, *["{}"] * 6]), "the field 'observation' is missing"),
        (lambda t: with_column(t, "step_json", ["{"] * 8), "Expecting "),
        (lambda t: with_column(t, "step_json", ["[" * 100_000] * 8), "it is nested too deeply"),
        (lambda t: with_column(t, "episode_json", ["{}"] * 8), "`episode_id`, but it is missing"),
        (lambda t: with_column(t, "episode_json", ["[]"] * 8), "'list' object is not a mapping"),
    ],
)
def test_foreign_and_broken_tables_are_refused_with_their_path(tmp_path: Path, change: Any, message: str) -> None:
    path = rewritten(written(tmp_path, episode(), episode(name="f")), change)
    with pytest.raises(TrajectoryFormatError, match=rf"t\.parquet: .*{message}"):
        list(read_parquet(path))


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b'{"steps": [', b"PAR1" + b"\xff" * 60 + b"<\0\0\0PAR1"]
)
def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(TrajectoryFormatError, match=r"t\.parquet: "):
        list(read_parquet(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.parquet", tmp_path):
        with pytest.raises(TrajectoryFormatError, match=str(path)):
            list(read_parquet(path))


@pytest.mark.parametrize("library", ["pandas", "polars", "duckdb", "datasets"])
def test_the_usual_libraries_open_it(tmp_path: Path, library: str) -> None:
    module: Any = pytest.importorskip(library)
    path = str(written(tmp_path, failed(), episode()))
    if library == "duckdb":
        with module.connect() as connection:
            rows = connection.sql(f"select task_name, outcome, max(total_reward) from '{path}' group by all").fetchall()
        assert sorted(rows) == [("task", "completed", 1.0), ("task", "container_error", None)]
    elif library == "datasets":
        rows = module.load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path))
        assert rows[2]["commands"][0]["command"] == "ls"
    else:
        assert module.read_parquet(path).shape == (5, len(parquet_export.parquet_schema()))
