import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ares_exp.commands.cli.run_command import run_command
from ares_exp.records.recorded_results import read_results
from ares_exp.records.results import Outcome
from ares_exp.runs.resume.recorded_run import RecordedRun
from tests.unit.runs.sweeps.recorded_job import record, result

main = partial(run_command, "merge", program="ares-exp merge")


def shard(folder: Path, task: str, reward: float | None = 1.0, **more: Any) -> Path:
    outcome = Outcome.COMPLETED if reward is not None else Outcome.AGENT_ERROR
    overrides = ["policy=oracle", f"env.tasks='@{ord(task) - 97}/2'"]
    return record(folder, [result(task, 0, reward, outcome)], tasks=[task], overrides=overrides, **more)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    first, second = shard(tmp_path / "first", "a", concurrency=4), shard(tmp_path / "second", "b", 0.0, concurrency=8)
    for run, name in ((first, "a"), (second, "b")):
        (run / "trajectories").mkdir()
        (run / "trajectories" / f"{name}.json").write_text(name)
        (run / "trajectories.jsonl").write_text(f'"{name}"\n"tor')
        (run / "files" / f"{name}-0").mkdir(parents=True)
        (run / "files" / f"{name}-0" / "reward.txt").write_text("1")
    return [str(first), str(second)]


def test_two_shards_become_one_run(tmp_path: Path, shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(out), *shards]) == 0, capsys.readouterr().err
    assert [one.task_name for one in read_results(out / "episodes.jsonl").results] == ["a", "b"]
    totals = json.loads((out / "summary.json").read_text())
    assert (totals["planned"], totals["scored"], totals["mean_reward"], totals["wall_sec"]) == (2, 2, 0.5, 2.0)
    assert json.loads((out / "results.json").read_text())["statistics"]["attempts"] == 2
    assert yaml.safe_load((out / "config.yaml").read_text())["env"]["tasks"] == ["a", "b"]
    assert list(json.loads((out / "provenance.json").read_text())["tasks"]) == ["a", "b"]
    assert RecordedRun(out).overrides() == ["policy=oracle", 'env.tasks=["a","b"]']
    assert sorted(path.name for path in (out / "trajectories").iterdir()) == ["a.json", "b.json"]
    assert (out / "trajectories.jsonl").read_text() == '"a"\n"b"\n', "whole lines"
    assert (out / "files" / "b-0" / "reward.txt").exists()
    assert yaml.safe_load((out / "parts" / "1" / "config.yaml").read_text())["concurrency"] == 8
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_merged_run_can_be_run_again(tmp_path: Path, shards: list[str]) -> None:
    config = {"env": {"path": "${name}", "tasks": "${name}"}, "name": "x"}
    (Path(shards[0]) / ".hydra" / "config.yaml").write_text(json.dumps(config))
    assert main([str(tmp_path / "out"), *shards]) == 0
    composed = RecordedRun(tmp_path / "out").composed_config()
    assert composed["env"] == {"path": "${name}", "tasks": ["a", "b"], "exclude": [], "limit": None}


def test_links_and_odd_names_in_shards_are_harmless(
    tmp_path: Path, shards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, out = Path(shards[0]), tmp_path / "out"
    (tmp_path / "mine").write_text("mine\n")
    for name in ("trajectories.jsonl", "run.log"):
        (first / name).unlink(missing_ok=True)
        (first / name).symlink_to(tmp_path / "mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.json").write_text("secret")
    (first / "trajectories" / "x.json").symlink_to(tmp_path / "folder" / "c.json")
    (first / "trajectories" / "folder").symlink_to(tmp_path / "folder")
    (first / "summary.json").write_text('{"recording_failures": Infinity, "wall_sec": 1%s}' % ("0" * 400))
    provenance = json.loads((first / "provenance.json").read_text())
    (first / "provenance.json").write_text(json.dumps({**provenance, "tasks": {'a"],x=[': None, "a": None}}))
    (first / ".hydra" / "overrides.yaml").write_text(json.dumps(["name=${"]))
    assert main([str(out), *shards]) == 1, capsys.readouterr().err  # an attempt was not run
    assert (out / "trajectories.jsonl").read_text() == '"b"\n'
    assert sorted(path.name for path in (out / "trajectories").iterdir()) == ["a.json", "b.json"]
    assert not (out / "parts" / "0" / "run.log").exists()
    assert RecordedRun(out).overrides() == ["name=${", 'env.tasks=["a\\"],x=[","a","b"]']


def test_missing_shards_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = shard(tmp_path / "killed", "a", None, ended=False)
    config = yaml.safe_load((killed / "config.yaml").read_text())
    (killed / "config.yaml").write_text(yaml.safe_dump({**config, "env": {"tasks": "@0/3"}}))
    assert main([str(tmp_path / "out"), str(killed)]) == 1
    told = capsys.readouterr().err
    assert "2 of 3 shards are missing (values of env.tasks): @1/3, @2/3." in told
    assert f"ares-exp resume={killed}" in told


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(Path(argv[0]).parent.iterdir())
    assert main(argv) == 2
    assert sorted(Path(argv[0]).parent.iterdir()) == before, "nothing is left of it"
    return capsys.readouterr().err


def test_different_runs_are_refused(tmp_path: Path, shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    other = shard(tmp_path / "other", "c", seed=3)
    out = str(tmp_path / "out")
    assert "`seed` is 'nothing' and 3" in refused([out, *shards, str(other)], capsys)
    assert main([out, *shards, str(other), "--allow", "seed"]) == 0


def test_duplicate_attempts_are_refused_or_counted_once(
    tmp_path: Path, shards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    again = shard(tmp_path / "again", "a", 0.0)
    out = str(tmp_path / "out")
    told = refused([out, *shards, str(again)], capsys)
    assert f"{shards[0]} and {again} have different results for attempt 0 at the task a" in told
    assert "The same run directory is listed twice" in refused([out, shards[0], shards[0]], capsys)
    copy = shard(tmp_path / "copy", "a")
    assert main([out, *shards, str(copy)]) == 0, "the same rows count once"
    assert len(read_results(Path(out) / "episodes.jsonl").results) == 2


def test_changed_tasks_are_refused(tmp_path: Path, shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path, digest in zip(shards, "12", strict=True):
        (Path(path) / "provenance.json").write_text(json.dumps({"tasks": {"shared": digest}}))
    assert "ran different versions of shared" in refused([str(tmp_path / "out"), *shards], capsys)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "[]"),
        ("config.yaml", "{"),
        ("provenance.json", "[]"),
        ("provenance.json", '{"tasks": 3}'),
        ("summary.json", "{"),
        ("episodes.jsonl", "{}\n"),
    ],
)
def test_broken_records_are_named(
    tmp_path: Path, shards: list[str], name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(shards[1]) / name).write_text(text)
    assert name in refused([str(tmp_path / "out"), *shards], capsys)


def test_existing_directory_is_kept(tmp_path: Path, shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert "exists" in refused([str(tmp_path / "out"), *shards], capsys)
    assert "no episodes.jsonl" in refused([str(tmp_path / "other"), str(tmp_path / "out")], capsys)
