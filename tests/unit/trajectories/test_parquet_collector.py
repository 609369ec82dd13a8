import sys
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors.parquet_collector import ParquetTrajectoryCollector
from ares_exp.trajectories.exports.parquet_export import read_parquet
from ares_exp.trajectories.files.episode_file import read_episodes
from ares_exp.trajectories.records import EpisodeTrajectory

STEPS = next(read_episodes(Path(__file__).parent / "golden" / "version_3.jsonl")).steps


def test_each_episode_is_a_record_and_a_file_for_queries(tmp_path: Path) -> None:
    collector = ParquetTrajectoryCollector(tmp_path / "p")
    assert isinstance(collector, TrajectoryCollector)
    assert not collector.output_dir.exists()
    for name in ("a", "b"):
        handle = collector.begin_episode(task_name="t", episode_id=name)
        for step in STEPS:
            collector.record_step(step, episode=handle)
        assert EpisodeTrajectory.load(tmp_path / "p" / f"{name}.json").steps == STEPS
        ended = collector.end_episode(episode=handle)
        assert EpisodeTrajectory.load(tmp_path / "p" / f"{name}.json") == ended
        assert list(read_parquet(tmp_path / "p" / f"{name}.parquet")) == [ended]
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["a.json", "a.parquet", "b.json", "b.parquet"]
    collector.close()


def test_an_export_that_cannot_be_written_leaves_the_record(tmp_path: Path) -> None:
    collector = ParquetTrajectoryCollector(tmp_path)
    collector.begin_episode(task_name="t", episode_id="e")
    for step in STEPS:
        collector.record_step(step)
    (tmp_path / "e.parquet").mkdir()
    with pytest.raises(OSError, match=r"e\.parquet"):
        collector.end_episode()
    assert EpisodeTrajectory.load(tmp_path / "e.json").steps == STEPS
    collector.close()


def test_the_id_of_an_export_is_taken(tmp_path: Path) -> None:
    (tmp_path / "e.parquet").write_bytes(b"of another run")
    with pytest.raises(FileExistsError, match=r"e\.parquet is there already"):
        ParquetTrajectoryCollector(tmp_path).begin_episode(task_name="t", episode_id="e")


def test_a_missing_package_is_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install 'ares-exp\[parquet\]'"):
        ParquetTrajectoryCollector(tmp_path)
