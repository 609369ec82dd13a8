"""Rows of recorded episodes: read while a run goes on, written to files, by the command, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from ares_exp.commands.cli.run_command import run_module
from ares_exp.errors import UserError
from ares_exp.records.run_dir import RunDir
from ares_exp.training.recorded_sequences import RecordedSequences
from ares_exp.training.sequence_files import write_sequences
from ares_exp.training.sequences import TrainingSequence, sequences_of
from ares_exp.trajectories import JsonTrajectoryCollector
from ares_exp.trajectories.collectors.jsonl_collector import JsonlTrajectoryCollector
from ares_exp.trajectories.files.line_file import read_lines
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.training.sampled_episodes import Call, episode

FIRST = Call([1, 2, 3], [10, 11], version="v1")
SECOND = Call([1, 2, 3, 10, 11, 4, 5], [20], version="v2")
REWRITTEN = Call([1, 9], [30])
COLLECTORS = {
    "json": lambda run: JsonTrajectoryCollector(run / "trajectories"),
    "jsonl": lambda run: JsonlTrajectoryCollector(run / "trajectories.jsonl"),
}


def start(collector: Any, whole: EpisodeTrajectory) -> Any:
    handle = collector.begin_episode(task_name="task", metadata=whole.metadata, episode_id=whole.episode_id)
    for record in whole.steps:
        collector.record_step(record, episode=handle)
    return handle


def record(collector: Any, whole: EpisodeTrajectory) -> None:
    collector.end_episode(episode=start(collector, whole), rewards=whole.rewards)


def a_run(path: Path, *episodes: EpisodeTrajectory) -> Path:
    collector = COLLECTORS["json"](path)
    for whole in episodes:
        record(collector, whole)
    collector.close()
    return path


def export(*arguments: object) -> int:
    return run_module("ares_exp.commands.export", [*map(str, arguments), "--to", "tokens"], "ares-exp export")


def ids(reports: Iterator[Any]) -> list[str]:
    return [report.rows[0].episode_id for report in reports]


@pytest.mark.parametrize("form", COLLECTORS)
def test_episodes_of_a_run_that_goes_on_are_read_once_when_they_have_ended(tmp_path: Path, form: str) -> None:
    collector = COLLECTORS[form](tmp_path)
    recorded = RecordedSequences(tmp_path)
    record(collector, episode([FIRST], name="a"))
    in_progress = start(collector, episode([FIRST, SECOND], name="b"))
    assert ids(recorded.new()) == ["a"]
    assert ids(recorded.new()) == []
    collector.end_episode(episode=in_progress)
    assert ids(recorded.new()) == ["b"]
    collector.close()
    assert ids(RecordedSequences(tmp_path).new()) == ["a", "b"]
    assert recorded.sentences() == ["2 rows of 3 calls, 5 tokens trained on: 2 clean, 0 re-aligned, 0 forked."]


async def test_following_ends_with_the_process_that_runs_the_run(tmp_path: Path) -> None:
    run, found = RunDir(tmp_path), []
    collector = COLLECTORS["json"](tmp_path)
    with run.owned():
        record(collector, episode([FIRST], name="a"))
        follower = RecordedSequences(tmp_path).follow(poll_sec=0.001)
        found.append(await anext(follower))
        record(collector, episode([FIRST], name="b"))
        found.append(await anext(follower))
        record(collector, episode([FIRST], name="c"))
    found += [report async for report in follower]
    assert [report.rows[0].episode_id for report in found] == ["a", "b", "c"]


async def test_a_place_without_a_run_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run that has started"):
        await anext(RecordedSequences(tmp_path).follow())


def test_what_gives_no_rows_is_counted_and_named(tmp_path: Path) -> None:
    run = a_run(
        tmp_path,
        episode([FIRST, REWRITTEN], name="a"),
        episode([FIRST], name="b", logprobs=None),
        episode([FIRST], name="c", reward=None),
    )
    recorded = RecordedSequences(run)
    assert ids(recorded.new()) == ["a"]
    assert dict(recorded.left_out) == {
        "episodes that cannot be trained on": 1,
        "episodes without a reward": 1,
    }
    assert recorded.sentences()[:2] == [
        "2 rows of 2 calls, 3 tokens trained on: 1 clean, 0 re-aligned, 1 forked.",
        "Left out: 1 episode that cannot be trained on.",
    ]
    assert "at step 1 of episode b (task) has no `logprobs`" in recorded.sentences()[-1]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    if path.name.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    with read_lines(path) as lines:
        return [json.loads(line.text) for line in lines]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.jsonl.zst"])
def test_files_have_the_rows(tmp_path: Path, name: str) -> None:
    rows = [
        *sequences_of(episode([FIRST, SECOND, REWRITTEN], attempt=3, finish_reason="stop")).rows,
        *sequences_of(episode([Call([1], [2], "sub-1")], reward=None), conversations=["*"]).rows,
    ]
    write_sequences(tmp_path / name, rows)
    back = [
        row | {"rewards": {item["name"]: item["value"] for item in row["rewards"]}} for row in read(tmp_path / name)
    ]
    assert [TypeAdapter(TrainingSequence).validate_python(row) for row in back] == rows
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_secrets_and_half_characters_do_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdef")
    secret = "sk-0123456789abcdef\ud83d"
    row = replace(sequences_of(episode([FIRST])).rows[0], task=secret, policy_versions=(secret,), rewards={secret: 1.0})
    for name in ("rows.parquet", "rows.jsonl"):
        write_sequences(tmp_path / name, [row])
        assert "0123456789abcdef" not in repr(read(tmp_path / name))
    read(tmp_path / "rows.parquet")[0]["task"].encode()


def test_lists_that_do_not_belong_together_are_refused() -> None:
    (row,) = sequences_of(episode([FIRST])).rows
    with pytest.raises(ValueError, match="got 4, 5 and 5"):
        replace(row, mask=row.mask[1:])


@pytest.mark.train("datasets")
@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_datasets_opens_it(tmp_path: Path, name: str) -> None:
    import datasets

    rows: list[TrainingSequence] = list(sequences_of(episode([FIRST, SECOND, REWRITTEN])).rows)
    write_sequences(tmp_path / name, rows)
    form = "parquet" if name.endswith("parquet") else "json"
    back = datasets.load_dataset(form, data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / "c"))
    assert back["ids"] == [list(row.ids) for row in rows]
    assert back["mask"] == [list(row.mask) for row in rows]
    assert back["logprobs"] == [list(row.logprobs) for row in rows]


def test_the_command_writes_rows_and_says_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(
        tmp_path / "run", episode([FIRST, REWRITTEN]), episode([replace(FIRST, conversation="sub-1")], name="b")
    )
    out = tmp_path / "new" / "rows.parquet"
    assert export(run, out) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == [
        f"Wrote {out}.",
        "2 rows of 2 calls, 3 tokens trained on: 1 clean, 0 re-aligned, 1 forked.",
    ]
    assert "no sampled tokens in the conversations main; there are sub-1" in said
    assert [row["steps"] for row in read(out)] == [[1], [2]]
    assert export(run, out, "--force", "--conversation", "*") == 0
    assert len(read(out)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["out.csv"], "ends with .jsonl or .jsonl.zst or .parquet"),
        (["rows.jsonl", "--realign-tokens", "-1"], "at least 0, got -1"),
        (["rows.jsonl", "--temperature", "warm"], "a number or `any`, got 'warm'"),
        (["rows.jsonl", "--min-reward", "2"], "can be exported to tokens. Left out: 1 episode with a reward below 2"),
        (["rows.jsonl", "--temperature", "0.7"], "temperature 1.0, expected 0.7"),
    ],
)
def test_the_command_refuses_what_gives_no_rows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(a_run(tmp_path, episode([FIRST])))
    assert export(".", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("rows*"))
