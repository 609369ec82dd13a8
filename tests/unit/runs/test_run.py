"""Runs from Python: the same records as the command's, results, errors, and interruption."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.errors import ConfigError, UserError
from ares_exp.records.results import Outcome
from tests.conftest import rows
from tests.leaks import wait_until
from tests.warm_start import WarmProcess, warm_command

pytestmark = [pytest.mark.local, pytest.mark.usefixtures("here")]
TWO = ["env.tasks=[write-greeting,count-records]", "tracker=none"]
SLOW = ["env.tasks=write-greeting", "tracker=none", "policy=scripted"]
SLOW += ['policy.replies=["```bash\nsleep 60\n```"]']


def test_run_writes_the_files_of_the_command(here: Path) -> None:
    results = ares_exp.run([*TWO, "hydra.run.dir=mine"], quiet=True)
    command = [*warm_command(), *TWO, "hydra.run.dir=theirs"]
    assert subprocess.run(command, cwd=here, capture_output=True, check=False).returncode == results.exit_code == 0
    assert results.run_dir == here / "mine"
    mine, theirs = ({path.name for path in Path(name).rglob("*.*")} for name in ("mine", "theirs"))
    assert {name for name in mine ^ theirs if "__" not in name} == set()  # names of episodes are drawn
    assert Path("mine/.hydra/overrides.yaml").read_text() == Path("theirs/.hydra/overrides.yaml").read_text()
    assert Path("mine/config.yaml").read_text() == Path("theirs/config.yaml").read_text().replace("theirs", "mine")
    assert "INFO ares_exp" in Path("mine/run.log").read_text()
    lines = rows(Path("mine"))
    assert {line["episode_id"] for line in lines} == {row.episode_id for row in results.rows}


def test_results_contain_all_episodes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = ares_exp.run([*TWO, "attempts=2"], quiet=True)
    assert [(row.task_name, row.attempt) for row in results.rows] == [
        (task, attempt) for task in ("count-records", "write-greeting") for attempt in (0, 1)
    ]
    assert {row.outcome for row in results.rows} == {Outcome.COMPLETED}
    assert (results.mean_reward, results.complete, results.exit_code) == (1.0, True, 0)
    frame = results.to_frame()
    assert frame["reward"].tolist() == [1.0] * 4
    assert {"task_name", "outcome", "error_type", "limit", "rewards.reward", "phase_sec.agent"} <= set(frame)
    assert len(results.to_frame(tries=True)) == 4
    assert len(results.trajectories()) == 4
    assert "mean reward 1.00" in str(results)
    assert results._repr_html_().startswith("<pre>")
    assert repr(results) == f"RunResults(run_dir={str(results.run_dir)!r}, episodes=4, mean_reward=1.0)"
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"ares-exp\[pandas\]"):
        results.to_frame()


def test_run_prints_the_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    ares_exp.run(["env.tasks=write-greeting", "tracker=none"])
    said = capsys.readouterr()
    assert "mean reward 1.00" in said.out
    assert "1/1 done" in said.err


def test_attempts_without_reward_set_the_exit_code() -> None:
    results = ares_exp.run([*TWO, "policy=scripted", "policy.replies=[]"], quiet=True)
    assert {row.outcome for row in results.rows} == {Outcome.POLICY_ERROR}
    assert (results.mean_reward, results.complete, results.exit_code) == (None, False, 1)
    frame = results.to_frame()
    assert frame["reward"].isna().all()
    assert frame["error_type"].tolist() == ["PolicyError"] * 2


def test_python_and_command_resume_each_others_runs() -> None:
    mine = ["env.tasks=write-greeting", "tracker=none", "hydra.run.dir=mine"]
    ares_exp.run(mine, quiet=True)
    with pytest.raises(ConfigError, match="contains another run"):
        ares_exp.run(mine, quiet=True)
    command = [*warm_command(), "resume=mine", "attempts=2"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    results = ares_exp.run(["resume=mine", "attempts=3"], quiet=True)
    assert len(results.rows) == 3
    assert len(Path("mine/episodes.jsonl").read_text().splitlines()) == 3


def test_custom_options_are_found(here: Path) -> None:
    (here / "options" / "policy").mkdir(parents=True)
    (here / "options" / "policy" / "mine.yaml").write_text(
        "# mine\n_target_: ares_exp.policies.scripted.ScriptedPolicy\nreplies: []\n"
    )
    results = ares_exp.run([*TWO, "policy=mine"], config_dirs=["options"], quiet=True)
    assert {row.outcome for row in results.rows} == {Outcome.POLICY_ERROR}
    with pytest.raises(ConfigError, match="mine"):
        ares_exp.run([*TWO, "policy=mine"], quiet=True)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("env=harbor", r"Expected a list of overrides, got 'env=harbor'"),
        (["-m", "seed=0,1"], r"Sweeps .* loop over runs"),
        (["seed=0,1"], "got `0,1`. Loop over runs for a sweep"),
        (["--help"], "got `--help`"),
        (["show"], "got `show`"),
        (["polcy=oracle"], "Did you mean `policy`"),
        (["policy=openai", "policy.temperature=x"], r"`policy\.temperature`: "),
        (["attempts=0"], "Expected `attempts` to be at least 1"),
        (["resume=nowhere"], "There is no run"),
        (["resume=true"], "is not set"),
        (["env.path=/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_raised_without_leftovers(overrides: Any, said: str, here: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        ares_exp.run(overrides, quiet=True)
    assert "/hydra/" not in "".join(traceback.format_exception(caught.value))
    assert [path for path in here.rglob("*") if path.is_file()] == []


def test_script_logging_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    root, ours = logging.getLogger(), logging.getLogger("ares_exp")
    before = list(root.handlers), root.level, list(ours.handlers), ours.level, ours.propagate
    ares_exp.run([*TWO, "policy=scripted", "policy.replies=[]", "hydra.run.dir=mine"], quiet=True)
    assert (list(root.handlers), root.level, list(ours.handlers), ours.level, ours.propagate) == before
    assert [record for record in caplog.records if record.levelno < logging.WARNING] == []
    assert "INFO ares_exp.runs.experiment" in Path("mine/run.log").read_text()


async def test_runs_in_a_running_loop_have_separate_directories() -> None:
    one = ["env.tasks=write-greeting", "tracker=none"]
    results = [ares_exp.run(one, quiet=True), await ares_exp.arun(one, quiet=True)]  # in the same second, maybe
    assert [result.mean_reward for result in results] == [1.0, 1.0]
    assert len({result.run_dir for result in results}) == 2


async def test_cancelling_ends_the_run_which_can_be_resumed(here: Path) -> None:
    running = asyncio.create_task(ares_exp.arun([*SLOW, "hydra.run.dir=mine"], quiet=True))
    assert await asyncio.to_thread(wait_until, lambda: list(here.glob("mine/responses/*")))
    with pytest.raises(ConfigError, match="one run at a time"):
        await ares_exp.arun(SLOW, quiet=True)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    [row] = rows(Path("mine"))
    assert row["outcome"] == "cancelled"
    assert json.loads(Path("mine/sessions.jsonl").read_text().splitlines()[-1])["interrupted"]
    assert (await ares_exp.arun(["env.tasks=write-greeting", "tracker=none"], quiet=True)).complete


def test_ctrl_c_ends_the_run_and_is_raised(here: Path) -> None:
    script = here / "script.py"
    script.write_text(f"""
import ares_exp
try:
    ares_exp.run({[*SLOW, "hydra.run.dir=mine"]!r}, quiet=True)
except KeyboardInterrupt:
    print("interrupted")
""")
    with WarmProcess([], cwd=here, module=str(script)) as process:
        assert wait_until(lambda: list(here.glob("mine/responses/*")))
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("interrupted\n", 0)
    [row] = rows(Path("mine"))
    assert row["outcome"] == "cancelled"
