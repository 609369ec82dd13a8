"""The main job as a user meets it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import Outcome
from ares_exp.tasks.task_set import SAMPLES
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.conftest import rows

QUIET = ("tracker=none",)


def only_run(tmp_path: Path) -> Path:
    [run_dir] = [path.parent for path in tmp_path.glob("outputs/*/*/episodes.jsonl")]
    return run_dir


def essence(run_dir: Path) -> dict[str, Any]:
    """The fields that must be equal between two runs of the same experiment: all except ids and clocks."""
    episodes = {}
    for path in (run_dir / "trajectories").glob("*.json"):
        episode = EpisodeTrajectory.load(path)
        steps = [(s.step_type, s.observation, s.action, s.reward, s.discount) for s in episode.steps]
        episodes[episode.task_name] = (steps, episode.total_reward, episode.outcome)
    return episodes


@pytest.mark.local
def test_oracle_solves_the_samples(cli: Any, tmp_path: Path) -> None:
    done = cli()
    assert done.returncode == 0, done.stderr
    run_dir = only_run(tmp_path)
    results = rows(run_dir)
    assert len(results) >= 6
    assert {row["task_name"]: row["reward"] for row in results} == {row["task_name"]: 1.0 for row in results}
    assert all(row["outcome"] == "completed" for row in results)
    assert all(row["container_image"] == "host" for row in results)
    for row in results:
        episode = EpisodeTrajectory.load(run_dir / "trajectories" / f"{row['episode_id']}.json")
        assert (episode.outcome, episode.total_reward) == (Outcome.COMPLETED, 1.0)
        assert row["task_name"] in done.stdout
    for name in ("config.yaml", "provenance.json", "summary.json", "run.log"):
        assert (run_dir / name).stat().st_size > 0, name
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert str(run_dir.relative_to(tmp_path)) in done.stdout
    assert "done" in done.stderr  # the plain progress line


@pytest.mark.slow
@pytest.mark.local
def test_failed_solution_is_an_error(cli: Any, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path / "tasks")
    (tmp_path / "tasks" / "write-greeting" / "solution" / "solve.sh").write_text("echo something else\n")
    done = cli(*QUIET, "env.path=tasks", "env.tasks=[write-greeting,count-records]", "hydra.run.dir=run")
    assert done.returncode == 1
    assert "error: The tasks' own solutions do not reach reward_threshold=1 in 1 of 2" in done.stderr
    assert "write-greeting (0)" in done.stderr
    swept = cli("-m", *QUIET, "env.path=tasks", "env.tasks=write-greeting", "seed=1,2", "hydra.sweep.dir=sweep")
    assert (swept.returncode, swept.stderr.count("error: The tasks' own solutions do not reach")) == (1, 2)
    low = cli(*QUIET, "env.path=tasks", "env.tasks=write-greeting", "reward_threshold=0")
    assert (low.returncode, "error" in low.stderr) == (0, False)


@pytest.mark.slow
@pytest.mark.local
def test_three_wrappers_give_the_same_trajectories(cli: Any, tmp_path: Path) -> None:
    found = []
    for wrapper in ("none", "async", "sync"):
        done = cli(*QUIET, "env.limit=2", f"wrapper={wrapper}", f"hydra.run.dir={wrapper}")
        assert done.returncode == 0, done.stderr
        found.append(essence(tmp_path / wrapper))
    assert found[0]
    assert found[0] == found[1] == found[2]


@pytest.mark.once
@pytest.mark.docker
def test_docker_solves_the_same_samples(cli: Any, tmp_path: Path) -> None:
    done = cli(*QUIET, "container=docker", "hydra.run.dir=run", timeout=100)
    assert done.returncode == 0, done.stderr
    results = rows(tmp_path / "run")
    assert len(results) >= 6
    assert all(row["reward"] == 1.0 for row in results)
    assert all(row["container_image"].startswith("ares-exp/") for row in results)


@pytest.mark.once
@pytest.mark.local
def test_sweep_runs_four_jobs(cli: Any, tmp_path: Path) -> None:
    done = cli("-m", *QUIET, "seed=1,2", "agent.max_output_chars=1000,2000", "env.limit=1")
    assert done.returncode == 0, done.stderr
    run_dirs = sorted(path.parent for path in tmp_path.glob("outputs/default/*/*/episodes.jsonl"))
    assert [path.name for path in run_dirs] == ["0", "1", "2", "3"]
    seeds = {rows(path)[0]["seed"] for path in run_dirs}
    assert len(seeds) == 2


@pytest.mark.local
def test_episode_without_reward_exits_with_1(cli: Any, tmp_path: Path) -> None:
    done = cli(*QUIET, "policy=scripted", "policy.replies=['no block']", "env.limit=1")
    assert done.returncode == 1, done.stderr
    [row] = rows(only_run(tmp_path))
    assert (row["outcome"], row["reward"]) == ("policy_error", None)
    assert row["task_name"] in done.stdout


@pytest.mark.once
@pytest.mark.local
@pytest.mark.parametrize(("limit", "steps", "ended_by"), [("3", 3, "format_errors"), ("null", 5, "steps")])
def test_replies_without_a_command_end_the_episode(
    cli: Any, tmp_path: Path, limit: str, steps: int, ended_by: str
) -> None:
    replies = ("policy=scripted", "policy.replies=['no block']", "policy.repeat_last=true", "limits.steps=5")
    done = cli(*QUIET, *replies, "env.limit=1", f"agent.format_errors_in_a_row={limit}", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    [row] = rows(tmp_path / "run")
    assert (row["outcome"], row["reward"], row["num_steps"]) == ("truncated", 0.0, steps)
    assert row["error"]["limit"] == ended_by
    [trajectory] = (tmp_path / "run" / "trajectories").iterdir()
    assert EpisodeTrajectory.load(trajectory).limit == ended_by
