"""Scorers from the command line: functions and a judge, for tasks and for a custom environment."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.records.recorded_results import read_results
from ares_exp.records.run_dir import RunDir
from ares_exp.reports.run_payload import ShownRun
from ares_exp.trajectories import load
from tests.conftest import SECRET_FREE, Cli, rows
from tests.loopback_endpoint import LoopbackEndpoint, respond, slow
from tests.warm_start import WarmProcess

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

SCORERS = """
from pathlib import Path


async def greeting(episode, container, *, path="/app/greeting.txt"):
    return {"reward": 0.5, "chars": len((await container.exec(f"cat {path}")).output)}


def brief(episode, container):
    assert container is None or episode.reward == 1.0
    return 1 / len(episode.responses)


async def bad(episode, container):
    if not Path("good").exists():
        raise KeyError("lines")
    return 1.0
"""
TASK = ("env=harbor", "env.tasks=[write-greeting]")
AT = ("tracker=none", "hydra.run.dir=run")
JUDGE = ("scorer=judge", "scorer.policy.api_key_env=null", "scorer.policy.model=grades")


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path) -> None:
    (tmp_path / "my_scorers.py").write_text(SCORERS)
    (tmp_path / "options" / "scorer").mkdir(parents=True)
    (tmp_path / "options" / "scorer" / "bad.yaml").write_text("# fails\n_target_: my_scorers.bad\nweight: 0.25\n")


@pytest.fixture
def grader() -> Iterator[LoopbackEndpoint]:
    with LoopbackEndpoint(otherwise=respond("It greets.\nScore: 8")) as server:
        yield server


HERE = {"PYTHONPATH": "."}


def test_functions_and_a_judge_score_a_task(cli: Cli, tmp_path: Path, grader: LoopbackEndpoint) -> None:
    functions = (
        "+env.scorers.greeting={_target_: my_scorers.greeting, weight: 2}",
        "+env.scorers.brief={_target_: my_scorers.brief, weight: 0}",
    )
    url = f"scorer.policy.base_url={grader.url}"
    done = cli(*TASK, *AT, *JUDGE, url, *functions, "env.verifier_weight=0.5", env=HERE)
    assert done.returncode == 0, done.stderr
    [row] = rows(tmp_path / "run")
    named = {"reward": 1.0, "judge": 0.8, "greeting": 0.5, "greeting.chars": 15.0, "brief": 0.5}
    assert row["rewards"] == {**named, "greeting.chars": row["rewards"]["greeting.chars"]}
    assert row["reward"] == pytest.approx(0.5 * 1.0 + 0.8 + 2 * 0.5)
    assert row["environment_usage"] == {"prompt_tokens": 10, "generated_tokens": 5, "cost": 0.0}
    assert "the judge `judge`: 15 tokens" in done.stdout
    [episode] = load(tmp_path / "run").trajectories()
    assert (dict(episode.rewards), episode.total_reward) == (row["rewards"], row["reward"])
    assert cli("export", "run", "atif", "--to", "atif").returncode == 0
    [exported] = (tmp_path / "atif").iterdir()
    assert json.loads(exported.read_text())["extra"]["ares_exp"]["rewards"] == row["rewards"]
    [asked] = [one.body for one in grader.requests]
    assert "Hello, harbor!" in json.dumps(asked), "what the task asks for"

    again = cli("replay=run", "hydra.run.dir=again", *functions, env=HERE)
    assert again.returncode == 0, again.stderr
    [replayed] = rows(tmp_path / "again")
    assert (replayed["reward"], replayed["rewards"]) == (row["reward"], row["rewards"])
    assert (len(grader.requests), replayed["environment_usage"]["prompt_tokens"]) == (1, 0), "paid for once"


def test_failed_scorer_is_an_outcome_and_repeatable(cli: Cli, tmp_path: Path) -> None:
    done = cli("--config-dir", "options", *TASK, *AT, "scorer=bad", "attempts=2", env=HERE)
    assert done.returncode == 1
    assert "verifier_error: ScorerError: The scorer `bad` raised KeyError: 'lines'" in done.stdout
    assert "Traceback" not in done.stderr
    assert {row["outcome"] for row in rows(tmp_path / "run")} == {"verifier_error"}
    (tmp_path / "good").touch()
    again = cli("resume=run", "resume_redo=[verifier_error]", env=HERE)
    assert again.returncode == 0, again.stderr
    assert [row["reward"] for row in rows(tmp_path / "run")[2:]] == [1.25, 1.25]


def test_recorded_scorer_function_needs_confirmation(cli: Cli, tmp_path: Path) -> None:
    scorers = "env.scorers=[my_scorers.brief]"
    done = cli(*TASK, *AT, scorers, env=HERE)
    assert done.returncode == 0, done.stderr
    (tmp_path / "run").chmod(0o777)  # now another user may have written it
    rejected = cli("resume=run", "attempts=2", "resume_force=true", env=HERE)
    assert rejected.returncode == 2
    assert "`env.scorers=my_scorers.brief`" in rejected.stderr
    assert cli("resume=run", "attempts=2", "resume_force=true", scorers, env=HERE).returncode == 0
    assert [row["reward"] for row in rows(tmp_path / "run")] == [1.5, 1.5]


def test_score_adds_scores_to_a_finished_run(cli: Cli, tmp_path: Path, grader: LoopbackEndpoint) -> None:
    started = cli(*TASK, *AT, "attempts=2", "snapshot=every_step")
    assert started.returncode == 0, started.stderr
    before = (tmp_path / "run" / "episodes.jsonl").read_bytes()
    judge = ("score", "run", *JUDGE, f"scorer.policy.base_url={grader.url}")
    done = cli(*judge)
    assert (done.returncode, len(grader.requests)) == (0, 2), done.stderr
    assert re.search(r"judge: 0\.80 \[.*\] over 2 scored\nSpent on scoring: 30 tokens\n", done.stdout), done.stdout
    assert "Hello, harbor!" in json.dumps(grader.requests[0].body), "what the task asks for"

    for arguments, said in (
        ((), "All finished episodes already have scores named `judge`. Use another name: `scorer.name=NAME`"),
        (("scorer.highest=20",), "named `judge` from a scorer with another config. Use another name"),
        (("scorer.name=first", "policy=noop"), "got `policy`"),
    ):
        rejected = cli(*judge, *arguments)
        assert rejected.returncode == 2
        assert said in rejected.stderr
    (tmp_path / "run").chmod(0o777)
    assert "Copy it, and score the copy" in cli(*judge, "scorer.name=strict").stderr
    (tmp_path / "run").chmod(0o700)
    assert cli(*judge, "scorer.name=strict", "scorer.highest=16").returncode == 0
    in_containers = cli("score", "run", "env.scorers=[my_scorers.greeting,my_scorers.brief]", env=HERE)
    assert in_containers.returncode == 0, in_containers.stderr

    assert (tmp_path / "run" / "episodes.jsonl").read_bytes() == before
    recorded = read_results(tmp_path / "run" / "episodes.jsonl").results
    own = {"judge": 0.8, "strict": 0.5, "greeting": 0.5, "greeting.chars": 15.0, "brief": 0.5}
    assert [(row.reward, row.rewards) for row in recorded] == 2 * [(1.0, {"reward": 1.0, **own})]
    assert "judge   strict" in " ".join(cli("show", "run").stdout.split("\n"))
    assert "brief 0.5" in cli("show", "run/write-greeting__1").stdout
    [first, _] = ShownRun(tmp_path / "run").payload()["about"][:2]
    assert re.fullmatch(r"scored again: brief 0\.50 \[.*\] over 2 attempts", first)
    assert ShownRun(tmp_path / "run").episode(recorded[0].episode_id)["rewards"]["judge"] == 0.8


def test_score_continues_failed_and_interrupted_episodes(cli: Cli, tmp_path: Path, grader: LoopbackEndpoint) -> None:
    started = cli(
        "env.tasks=[write-greeting,count-records,publish-release]", *AT, "scorer=bad", "--config-dir", "options"
    )
    assert started.returncode == 1, "the scorer of the run fails"
    episodes = tmp_path / "run" / "episodes.jsonl"
    kept = episodes.read_text().splitlines(keepends=True)[:2]
    episodes.write_text("".join(kept))  # killed before the third row
    container = cli("score", "run", "env.scorers=[my_scorers.greeting]", env=HERE)
    assert container.returncode == 1
    assert "no snapshot of its last step exists. Use `replay=RUN` with this scorer" in container.stderr
    with RunDir(tmp_path / "run").owned(resume=True):
        running = cli("score", "run", "env.scorers=[my_scorers.greeting]", env=HERE)
    assert (running.returncode, "is running in another process" in running.stderr) == (2, True)

    command = ["score", "run", *JUDGE, f"scorer.policy.base_url={grader.url}", "concurrency=1"]
    grader.then(respond("Score: 3"), slow(60))
    grader.arrived.clear()
    with WarmProcess(command, cwd=tmp_path, env=SECRET_FREE) as process:
        while len(grader.requests) < 2 and process.poll() is None:
            grader.arrived.wait(5)
            grader.arrived.clear()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, "1 of 2 episodes done. Run the command again" in said) == (130, True), said
    with (tmp_path / "run" / "scores" / "judge.jsonl").open("a") as scores:
        scores.write('{"episode_id": ')  # a crash of the machine
    again = cli(*command)
    assert again.returncode == 0, again.stderr
    assert "Left out: 1 lost" in again.stdout
    assert len(grader.requests) == 3
    assert {row.rewards["judge"] for row in read_results(episodes).results} == {0.3, 0.8}
