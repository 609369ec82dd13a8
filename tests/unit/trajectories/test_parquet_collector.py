import sys
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors.parquet_collector import ParquetTrajectoryCollector
from ares_exp.trajectories.files.episode_file import salvage_episode
from ares_exp.trajectories.files.jsonl_file import load_jsonl
from ares_exp.trajectories.files.parquet_file import read_parquet

STEPS = load_jsonl(Path(__file__).parent / "golden" / "version_2.jsonl")[0].steps


@pytest.mark.parametrize("durability", ["none", "episode", "step"])
def test_each_episode_becomes_a_file_when_it_ends(tmp_path: Path, durability: str) -> None:
    collector = ParquetTrajectoryCollector(tmp_path / "p", durability=durability)  # type: ignore[arg-type]
    assert isinstance(collector, TrajectoryCollector)
    assert not collector.output_dir.exists()
    for name in ("a", "b"):
        handle = collector.begin_episode(task_name="t", episode_id=name)
        for step in STEPS:
            collector.record_step(step, episode=handle)
        partial = tmp_path / "p" / f"{name}.parquet.partial"
        assert salvage_episode(partial)[0].steps == STEPS
        ended = collector.end_episode(episode=handle)
        assert list(read_parquet(tmp_path / "p" / f"{name}.parquet")) == [ended]
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["a.parquet", "b.parquet"]
    collector.close()


def test_an_episode_that_failed_in_reset_has_a_file(tmp_path: Path) -> None:
    collector = ParquetTrajectoryCollector(tmp_path)
    collector.begin_episode(task_name="t", episode_id="e")
    ended = collector.end_episode(outcome=Outcome.CONTAINER_ERROR, error=ErrorInfo("ContainerStartError", "no image"))
    assert list(read_parquet(tmp_path / "e.parquet")) == [ended]
    collector.close()


def test_a_finished_file_that_cannot_be_written_leaves_the_partial_one(tmp_path: Path) -> None:
    collector = ParquetTrajectoryCollector(tmp_path)
    collector.begin_episode(task_name="t", episode_id="e")
    for step in STEPS:
        collector.record_step(step)
    (tmp_path / "e.parquet").mkdir()
    with pytest.raises(OSError, match=r"e\.parquet"):
        collector.end_episode()
    assert salvage_episode(tmp_path / "e.parquet.partial")[0].steps == STEPS
    collector.close()


def test_a_missing_package_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'ares-exp\[parquet\]'"):
        ParquetTrajectoryCollector(tmp_path)
