import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ares_exp.environments.activity import CommandRecord
from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData, Usage
from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.files import parquet_columns, parquet_file
from ares_exp.trajectories.files.jsonl_file import load_jsonl
from ares_exp.trajectories.files.parquet_file import parquet_headers, read_parquet, salvage_parquet, write_parquet
from ares_exp.trajectories.records import (
    EpisodeTrajectory,
    StepRecord,
    serialize_llm_request,
    serialize_llm_response,
    total_reward,
)
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
                commands=[CommandRecord("ls", 0, 0.1), CommandRecord("sleep 9", None, 9.0, True)],
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


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(episodes=st.lists(trajectories(), max_size=3))
def test_whatever_was_recorded_comes_back(tmp_path: Path, episodes: list[EpisodeTrajectory]) -> None:
    path = written(tmp_path, *episodes)
    assert list(read_parquet(path)) == episodes
    headers = list(parquet_headers(path))
    assert [fields["episode_id"] for _, fields in headers] == [item.episode_id for item in episodes]
    for (place, _), item in zip(headers, episodes, strict=True):
        assert next(read_parquet(path, start=place)) == item


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
    assert pq.read_schema(path).names == parquet_columns.parquet_schema().names


def test_the_schema_is_versioned_and_the_docstring_names_every_column(tmp_path: Path) -> None:
    schema = pq.read_schema(written(tmp_path, episode()))
    assert schema.metadata[b"ares_exp.schema_version"] == b"1"
    lines = [line.split("|")[1] for line in (parquet_columns.__doc__ or "").splitlines() if line.startswith("| `")]
    documented = [name.strip("` ") for line in lines for name in line.split(",")]
    assert sorted(documented) == sorted(schema.names)


def test_files_of_the_first_version_keep_loading() -> None:
    """`version_1.parquet` never changes; a new version gets a file of its own."""
    golden = Path(__file__).parent / "golden"
    assert list(read_parquet(golden / "version_1.parquet")) == load_jsonl(golden / "version_2.jsonl")


def test_repeated_columns_are_dictionaries_and_all_are_zstd(tmp_path: Path) -> None:
    group = pq.read_metadata(written(tmp_path, episode(50))).row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert all("RLE_DICTIONARY" in columns[name].encodings for name in parquet_columns.REPEATED)


def test_values_that_no_column_can_hold_are_null_there_and_come_back(tmp_path: Path) -> None:
    action = {
        "data": "x",
        "usage": 3,
        "cost": True,
        "model": 4,
        "logprobs": [0.5, None],
        "completion_token_ids": [2**70],
    }
    steps = (StepRecord(2**80, "MID", {"messages": 3}, action, 0.5, math.inf, 0.0),)
    odd = replace(episode(), steps=steps, num_steps=1, task_name="half \ud83e", error=ErrorInfo("\udc80", "\x00"))
    path = written(tmp_path, odd)
    [row] = pq.read_table(path).to_pylist()
    names = "step_index cost model response tool_calls prompt_tokens logprobs completion_token_ids"
    assert {row[name] for name in names.split()} == {None}
    assert row["discount"] == math.inf
    assert row["task_name"] == "half \\ud83e"
    assert list(read_parquet(path)) == [odd]


def test_secrets_reach_no_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-do-not-write-me"
    monkeypatch.setenv("SOME_API_KEY", secret)
    action = serialize_llm_response(LLMResponse([TextData(secret), ToolCallData("1", "run", secret)], model=secret))
    observation = {"messages": [{"role": "user", "content": secret}]}
    step = StepRecord(0, "MID", observation, action, 0.0, 1.0, 0.0, commands=[CommandRecord(f"echo {secret}", 0, 0.1)])
    told = replace(
        episode(), steps=(step,), num_steps=1, task_name=secret, error=ErrorInfo("E", secret), metadata={"x": secret}
    )
    rows = pq.read_table(written(tmp_path, told)).to_pylist()
    assert secret not in repr(rows)
    assert rows[0]["commands"][0]["command"] == "echo ***"


def test_long_episodes_span_row_groups_and_any_of_them_can_be_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "ROWS_PER_GROUP", 7)
    monkeypatch.setattr(parquet_file, "ROWS_PER_BATCH", 3)
    episodes = [episode(steps, name=f"e{steps}") for steps in (1, 9, 2, 30, 4)]
    path = written(tmp_path, *episodes, failed())
    assert pq.read_metadata(path).num_row_groups == 8
    headers = list(parquet_headers(path))
    assert [place for place, _ in headers] == [(0, 0), (0, 2), (1, 5), (2, 1), (6, 4), (7, 2)]
    assert [next(read_parquet(path, start=place)) for place, _ in headers] == [*episodes, failed()]
    assert list(read_parquet(path, start=headers[-2][0])) == [episodes[-1], failed()]


def test_a_row_group_is_bounded_by_its_text_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "CHARS_PER_GROUP", 5000)
    path = written(tmp_path, episode(20, text="x" * 1000))
    assert pq.read_metadata(path).num_row_groups > 4
    assert list(read_parquet(path)) == [episode(20, text="x" * 1000)]


def test_headers_do_not_read_steps(tmp_path: Path) -> None:
    path = rewritten(written(tmp_path, episode(), failed()), lambda t: with_column(t, "step_json", ["no JSON"] * 5))
    assert [fields["num_steps"] for _, fields in parquet_headers(path)] == [4, 0]
    with pytest.raises(TrajectoryFormatError, match=r"t\.parquet at row 0 of row group 0: "):
        list(read_parquet(path))


def test_the_size_grows_linearly_also_with_large_metadata(tmp_path: Path) -> None:
    noise = "".join(chr(32 + (number * 7919) % 997) for number in range(1_500_000))
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
        (lambda t: t.slice(0, 2), " at row 1 .*: expected 4 rows of episode 'e', the file ends before"),
        (lambda t: t.take([0, 1, 4, 2, 3, 5, 6, 7]), " at row 2 .*: expected 4 rows of episode 'e', got another's"),
        (lambda t: t.drop_columns(["step_json"]), ": expected the rows of trajectories .* `step_json`, got none"),
        (lambda t: with_column(t, "step_json", list(range(8))), ": expected .* a text column `step_json`, got int64"),
        (lambda t: with_column(t, "step_json", ["{}", None, *["{}"] * 6]), " at row 1 .*: expected text, got None"),
        (lambda t: with_column(t, "step_json", ["{"] * 8), " at row 0 of row group 0: Expecting "),
        (lambda t: with_column(t, "step_json", ["3"] * 8), " at row 0 .*: expected a JSON object, got int"),
        (lambda t: with_column(t, "step_json", ["{}"] * 8), " at row 0 .*: the field 'observation' is missing"),
        (lambda t: with_column(t, "step_json", ["[" * 100_000] * 8), " at row 0 .*: it is nested too deeply"),
        (lambda t: with_column(t, "episode_json", [None, *["{}"] * 7]), " at row 0 .*: expected text, got None"),
        (lambda t: with_column(t, "episode_json", ["{}"] * 8), " at row 0 .*: the field 'episode_id' is missing"),
        (lambda t: with_column(t, "episode_json", ["[]"] * 8), " at row 0 .*: expected a JSON object, got list"),
        (lambda t: edited(t, "num_steps", -1), " at row 0 .*: expected `num_steps` to be 0 or more"),
        (lambda t: edited(t, "num_steps", 10**30), " at row 4 .*: expected 10{30} rows of episode 'e', got another's"),
        (lambda t: edited(t, "schema_version", 99), " at row 0 .*: expected schema_version 2 or lower, got 99"),
        (
            lambda t: t.replace_schema_metadata({"ares_exp.schema_version": "7"}),
            ": expected ares_exp.schema_version 1, got '7': update ares_exp",
        ),
    ],
)
def test_foreign_and_hostile_tables_are_refused_with_path_and_row(tmp_path: Path, change: Any, message: str) -> None:
    path = rewritten(written(tmp_path, episode(), episode(name="f")), change)
    with pytest.raises(TrajectoryFormatError, match=rf"t\.parquet{message}"):
        list(read_parquet(path))


def edited(table: Any, key: str, value: object) -> Any:
    texts = [json.dumps({**json.loads(text), key: value}) for text in table["episode_json"].to_pylist()]
    return with_column(table, "episode_json", texts)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b'{"steps": [', b"PAR1" + b"\xff" * 60 + b"<\0\0\0PAR1"]
)
def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    for read in (read_parquet, parquet_headers, salvage_parquet):
        with pytest.raises(TrajectoryFormatError, match=r"t\.parquet: "):
            list(read(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.parquet", tmp_path):
        with pytest.raises(TrajectoryFormatError, match=str(path)):
            list(read_parquet(path))


def test_damage_anywhere_is_found_or_harmless(tmp_path: Path) -> None:
    original = [episode(4), failed()]
    path = written(tmp_path, *original)
    data = path.read_bytes()
    found = 0
    for position in range(0, len(data), max(1, len(data) // 400)):
        for damaged in (data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :], data[:position]):
            path.write_bytes(damaged)
            try:
                read = list(read_parquet(path))
            except TrajectoryFormatError:
                found += 1
            else:
                assert read == original
    assert found > 400


def test_a_text_that_is_repeated_a_million_times_takes_memory_once(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from ares_exp.trajectories.files import parquet_file
parquet_file.MAX_CHARS = 100_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    list(parquet_file.read_parquet(Path(sys.argv[1])))
except parquet_file.TrajectoryFormatError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "MB")
"""
    path = written(tmp_path, episode())
    [head, *_] = pq.read_table(path)["episode_json"].to_pylist()
    head = json.dumps({**json.loads(head), "num_steps": 10**6})
    step = json.dumps({"x": "y" * 5_000_000})
    numbers = pa.array([0] * 100_000, pa.int32())
    columns = [pa.DictionaryArray.from_arrays(numbers, [text]) for text in (head, step)]
    pq.write_table(pa.table(columns, ["episode_json", "step_json"]), path)
    assert path.stat().st_size < 1_000_000
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=100, check=True)
    assert "expected at most 100000000 characters in the 1000000 rows of episode 'e'" in done.stdout
    assert int(done.stdout.split()[-2]) < 600  # a batch of it is 1280


def test_salvaging_keeps_the_episodes_before_the_damage(tmp_path: Path) -> None:
    def change(table: Any) -> Any:
        return with_column(table, "step_json", [*table["step_json"].to_pylist()[:5], "{", *["{}"] * 2])

    path = rewritten(written(tmp_path, episode(), episode(name="f")), change)
    with pytest.raises(TrajectoryFormatError, match=r"recover .*t\.parquet` keeps what is good"):
        list(read_parquet(path))
    episodes, [problem] = salvage_parquet(path)
    assert episodes == [episode()]
    assert "at row 5" in problem
    assert salvage_parquet(written(tmp_path, episode())) == ([episode()], [])


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
        assert module.read_parquet(path).shape == (5, len(parquet_columns.parquet_schema()))
