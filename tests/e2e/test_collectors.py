"""Collectors as a user chooses them: one, several, his own."""

import json
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import Outcome
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.unit.trajectories.chats import read_episodes

pytestmark = pytest.mark.local

MINE = '''
class Mine:
    """Knows only what the protocol asks for, and keeps lines of text."""

    def __init__(self, path):
        self.path = path

    def begin_episode(self, *, task_name):
        self.lines = [task_name]

    def record_step(self, record):
        self.lines.append(record.step_type)

    def end_episode(self, *, truncated=False):
        with open(self.path, "a") as file:
            file.write(" ".join(self.lines) + "\\n")
'''
POLICY = """\
_target_: ares_exp.policies.scripted.ScriptedPolicy
_convert_: all
replies:
  - "```bash\\necho looking; exit 3\\n```"
  - "```bash\\nsleep 30\\n```"
  - "```bash\\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n```"
"""


def test_several_collectors_keep_the_same_episodes(cli: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cli(
        "tracker=none",
        "collector=[json,jsonl,memory]",
        "collector.json.compression=zstd",
        "env.tasks=[0,1]",
        "attempts=2",
        f"hydra.run.dir={run}",
    )
    assert done.returncode == 0, done.stderr
    files = {path.name: EpisodeTrajectory.load(path) for path in (run / "trajectories").iterdir()}
    assert all(name.endswith(".json.zst") for name in files)
    appended = list(read_episodes(run / "trajectories.jsonl"))
    assert sorted(appended, key=lambda e: e.episode_id) == sorted(files.values(), key=lambda e: e.episode_id)
    assert len(appended) == 4
    assert sorted(episode.metadata["attempt"] for episode in appended) == [0, 0, 1, 1]
    rows = {row["episode_id"]: row for row in map(json.loads, (run / "episodes.jsonl").read_text().splitlines())}
    for episode in appended:
        assert rows[episode.episode_id]["seed"] == episode.metadata["seed"]
        assert episode.metadata["agent"] == "ShellAgent"
        assert episode.metadata["container_image"] == "host"


@pytest.mark.parametrize(
    ("header", "chosen", "overrides"),
    [
        pytest.param("", "collector=mine", ["collector.path=lines"], marks=pytest.mark.nightly),
        ("# @package collector.mine\n", "collector=[json,mine]", ["collector.mine.path=lines"]),
    ],
)
def test_custom_collector_gets_every_step(
    cli: Any, tmp_path: Path, header: str, chosen: str, overrides: list[str]
) -> None:
    (tmp_path / "my_collector.py").write_text(MINE)
    (tmp_path / "options" / "collector").mkdir(parents=True)
    (tmp_path / "options" / "collector" / "mine.yaml").write_text(f"{header}_target_: my_collector.Mine\npath: ???\n")
    arguments = ["tracker=none", "--config-dir", "options", chosen, *overrides, "env.tasks=[0,1]"]
    refused = cli(*arguments, env={"PYTHONPATH": str(tmp_path)})
    assert refused.returncode == 2
    assert "concurrency=1" in refused.stderr
    done = cli(*arguments, "concurrency=1", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert [line.split()[1:] for line in (tmp_path / "lines").read_text().splitlines()] == [
        ["FIRST", "MID", "LAST"]
    ] * 2


def test_step_records_commands_and_durations(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "fixed.yaml").write_text(POLICY)
    run = tmp_path / "run"
    cli(
        "tracker=none",
        "--config-dir",
        "options",
        "policy=fixed",
        "agent.command_timeout_sec=1",
        "env.tasks=write-greeting",
        f"hydra.run.dir={run}",
    )
    [path] = (run / "trajectories").iterdir()
    episode = EpisodeTrajectory.load(path)
    assert episode.outcome is Outcome.COMPLETED
    first, looked, slept, last = episode.steps
    assert first.commands == ()
    assert first.policy_sec is None
    assert first.container_sec is not None
    assert first.container_sec > 0
    [looking], [sleeping], [submitting] = looked.commands, slept.commands, last.commands
    assert (looking.command, looking.exit_code, looking.timed_out) == ("echo looking; exit 3", 3, False)
    assert (sleeping.exit_code, sleeping.timed_out) == (None, True)
    assert 0.9 < sleeping.duration_sec < 50
    assert submitting.exit_code == 0
    for step in (looked, slept, last):
        assert step.policy_sec is not None
        assert step.container_sec is not None
        assert step.environment_sec is not None
        assert step.environment_sec >= step.commands[0].duration_sec
        assert step.container_sec >= step.commands[0].duration_sec
