import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ares_exp.commands.cli.run_command import run_command
from ares_exp.commands.export import FORMATS, ExportedEpisodes
from ares_exp.records.results import Outcome
from ares_exp.trajectories.collectors import JsonlTrajectoryCollector, JsonTrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.trajectories.atif_schema import validate_atif
from tests.unit.trajectories.chats import chat, cut, ids, read_episodes, with_step, write

GOLDEN = Path(__file__).parents[1] / "trajectories" / "golden" / "version_3.jsonl"


def export(run: Path, out: Path, name: str, *options: str) -> int:
    return run_command("export", [str(run), str(out), "--to", name, *options], "ares-exp export")


def of_oracle(episode: EpisodeTrajectory) -> EpisodeTrajectory:
    return with_step(episode, 1, action={**(episode.steps[1].action or {}), "model": "oracle"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three finished episodes: rewards 1, 0 and none."""
    folder = tmp_path / "run" / "trajectories"
    write(folder / "e0.json", chat("e0", "fix-a", start=0.0))
    write(folder / "e1.json", chat("e1", "fix-b", reward=0.0, start=1.0, outcome=Outcome.TRUNCATED))
    write(folder / "e2.json", chat("e2", "other", reward=None, start=2.0, outcome=Outcome.AGENT_ERROR))
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.zst"])
def test_jsonl_contains_everything_recorded(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    [golden] = read_episodes(GOLDEN)
    write(run / "trajectories" / "golden.json", replace(golden, start_time=5.0, end_time=99.0))
    assert export(run, run.parent / "new" / name, "jsonl") == 0
    assert capsys.readouterr().out == f"Wrote {run.parent / 'new' / name}.\n4 episodes.\n"
    assert list(read_episodes(run.parent / "new" / name)) == [
        EpisodeTrajectory.load(path) for path in sorted((run / "trajectories").iterdir())
    ]


def test_atif_has_a_file_per_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = replace(
        chat("board", start=3.0), steps=(replace(chat().steps[0], observation={"board": [1]}),), num_steps=1
    )
    write(run / "trajectories" / "board.json", board)
    assert export(run, run.parent / "out", "atif") == 0
    files = sorted((run.parent / "out").iterdir())
    assert [path.name for path in files] == [f"{name}.atif.json" for name in ("board", "e0", "e1", "e2")]
    for path in files:
        validate_atif(json.loads(path.read_text()))
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "4 episodes."
    assert said[2].startswith("In 1 episode: Observations or actions that are not chat requests")


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", ".hidden", "a b", "x" * 300, "\udc80", ".."])
def test_hostile_episode_id_stays_in_the_directory(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "in.jsonl", chat(name))
    assert export(source, tmp_path / "out", "atif") == 0
    [path] = (tmp_path / "out").iterdir()
    assert path.name.endswith(".atif.json")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["in.jsonl", "out"]


@pytest.mark.parametrize(
    ("options", "kept", "left_out"),
    [
        ([], ["e0", "e1", "e2"], []),
        (["--task", "fix-*"], ["e0", "e1"], ["1 episode of other tasks"]),
        (["--task", "fix-a", "--task", "other"], ["e0", "e2"], ["1 episode of other tasks"]),
        (["--outcome", "agent_error"], ["e2"], ["1 episode with the outcome completed", "1 episode with the outcome"]),
        (["--min-reward", "1"], ["e0"], ["1 episode with a reward below 1", "1 episode without a reward"]),
        (["--max-reward", "0"], ["e1"], ["1 episode with a reward above 0", "1 episode without a reward"]),
        (["--min-reward=-1"], ["e0", "e1"], ["1 episode without a reward"]),
    ],
)
def test_only_selected_episodes_are_written(
    run: Path, options: list[str], kept: list[str], left_out: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, run.parent / "out.jsonl", "jsonl", *options) == 0
    assert ids(read_episodes(run.parent / "out.jsonl")) == kept
    said = capsys.readouterr().out
    assert all(f"Left out: {reason}" in said for reason in left_out)
    assert said.count("Left out: ") == len(left_out)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harbor"}))
def test_empty_selection_writes_no_file(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"new/out{next(iter(FORMATS[name].suffixes), '')}"
    assert export(run, run.parent / out, name, "--task", "none") == 2
    told = f"Nothing in {run} can be exported to {name}. Left out: 3 episodes of other tasks."
    assert told in capsys.readouterr().err
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_missing_and_empty_runs_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "no", tmp_path / "out.jsonl", "jsonl") == 2
    assert "No such file" in capsys.readouterr().err
    assert export(tmp_path, tmp_path / "out.jsonl", "jsonl") == 2
    assert capsys.readouterr().err == f"error: Nothing in {tmp_path} can be exported to jsonl.\n"


def test_broken_files_are_named_and_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "trajectories"
    cut(folder / "e1.json", 300)
    middle = folder / "e2.json"
    middle.write_text(middle.read_text().replace('"MID"', '"MAD"', 1))
    contradicting = folder / "x.jsonl"
    write(contradicting, replace(chat("x"), num_steps=77))
    assert export(run, run.parent / "out.jsonl", "jsonl") == 1
    assert ids(read_episodes(run.parent / "out.jsonl")) == ["e0", "e1"]
    said = capsys.readouterr()
    assert said.out.splitlines()[1:] == ["2 episodes."]
    for told in (f"error: {middle} at byte ", "expected 77 steps"):
        assert told in said.err


def test_each_episode_of_killed_run_is_exported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, steps = tmp_path / "run", chat().steps
    collectors = (
        JsonTrajectoryCollector(run / "trajectories"),
        JsonlTrajectoryCollector(run / "trajectories.jsonl"),
    )
    for collector in collectors:
        for name in ("a", "b"):
            collector.begin_episode(task_name="t", episode_id=name, start_time=float(name == "b"))
            for step in steps[: 4 if name == "a" else 2]:
                collector.record_step(step)
            if name == "a":
                collector.end_episode()
    assert export(run, tmp_path / "out.jsonl", "jsonl") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "1 episode.",
        "Left out: 1 episode still running.",
    ]
    partial = (run / "trajectories" / "b.json").read_bytes()
    for collector in collectors:
        collector.end_episode()
        collector.close()
    (run / "trajectories.jsonl").unlink()
    (run / "trajectories" / "b.json").write_bytes(partial)
    assert export(run, tmp_path / "out.jsonl", "jsonl", "--force") == 0
    whole, lost = read_episodes(tmp_path / "out.jsonl")
    assert (whole.episode_id, whole.steps) == ("a", steps)
    assert (lost.episode_id, lost.steps, lost.outcome) == ("b", steps[:2], Outcome.LOST)


def test_only_one_episode_is_in_memory(run: Path) -> None:
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        counts = []
        for _ in ExportedEpisodes(run):
            gc.collect()
            counts.append(sum(isinstance(thing, EpisodeTrajectory) for thing in gc.get_objects()))
    finally:
        gc.unfreeze()
    assert counts == [1, 1, 1]


def test_duplicate_episodes_are_exported_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run.parent / "copy" / "trajectories" / "e0.json", chat("e0", "fix-a", start=0.0))
    assert export(run.parent, run.parent / "out.parquet", "parquet") == 0
    assert "Left out: 1 episode with the id of an earlier episode." in capsys.readouterr().out


def test_existing_files_are_overwritten_only_with_force(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = run.parent / "out.parquet", run.parent / "out"
    out.write_text("precious")
    assert export(run, out, "parquet") == 2
    assert out.read_text() == "precious"
    assert "Use `--force` to overwrite it" in capsys.readouterr().err
    assert export(run, out, "parquet", "--force") == 0
    assert pq.read_table(out).num_rows == 12
    folder.mkdir()
    for name in ("atif", "harbor"):
        assert export(run, folder, name) == 2
        assert "out already exists. Use another name, or remove it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out", "parquet"], "Expected OUT to be a parquet file, with a name that ends in .parquet, got"),
        (["out.csv", "sft"], "ends in .jsonl or .jsonl.zst, got"),
        (["out.jsonl", "jsonl", "--oracle"], "only with `--to sft, preference`, not with `--to jsonl`."),
        (["out.jsonl", "sft", "--temperature=1"], "`--temperature` works only with `--to tokens`, not with"),
        (["out", "harbor", "--task=x"], "not with `--to harbor`."),
        (["out", "atif", "--force"], "`--force` works only with"),
        (["run/trajectories/e0.json/out.jsonl", "jsonl"], "Cannot write "),
    ],
)
def test_mistakes_are_errors_without_output(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out, *rest = arguments
    assert export(run, run.parent / out, *rest) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("options", "kept", "left_out"),
    [
        ([], ["good"], ["1 episode of the oracle (`--oracle` includes them)", "1 episode with a reward below 1"]),
        (["--oracle"], ["good", "solution"], ["1 episode with a reward below 1"]),
        (["--min-reward=0"], ["bad", "good"], ["1 episode of the oracle"]),
        (["--max-reward=0.5"], ["bad"], ["2 episodes with a reward above 0.5"]),
    ],
)
def test_sft_exports_only_successes_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], kept: list[str], left_out: list[str]
) -> None:
    source = write(
        tmp_path / "in.jsonl", chat("good", "a"), chat("bad", "b", reward=0.0), of_oracle(chat("solution", "c"))
    )
    assert export(source, tmp_path / "sft.jsonl", "sft", *options) == 0
    rows = lines(tmp_path / "sft.jsonl")
    assert sorted({row["episode_id"] for row in rows}) == kept
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    said = capsys.readouterr().out
    assert f"{len(rows)} row" in said
    assert all(f"Left out: {reason}" in said for reason in left_out), said


def test_preference_pairs_include_the_oracle_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", chat("bad", length=3, reward=0.0), of_oracle(chat("solution")))
    assert export(source, tmp_path / "pairs.jsonl", "preference") == 2
    assert "Left out: 1 episode of the oracle (`--oracle` includes them)." in capsys.readouterr().err
    assert export(source, tmp_path / "pairs.jsonl", "preference", "--oracle") == 0
    [row] = lines(tmp_path / "pairs.jsonl")
    assert (row["chosen_episode_id"], row["rejected_episode_id"]) == ("solution", "bad")
