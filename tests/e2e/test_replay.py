"""`replay=<run>[/<episode>]`: recorded episodes run again in fresh containers, and what the report says of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import rows
from tests.warm_start import warm_command

pytestmark = [pytest.mark.local, pytest.mark.once]

QUIET = "tracker=none"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def script(*commands: str) -> str:
    replies = ",".join(f'"```bash\n{command}\n```"' for command in commands)
    return f"policy.replies=[{replies}]"


def report_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "replay.json").read_text())  # type: ignore[no-any-return]


def matches(episode: dict[str, Any]) -> list[str]:
    return [step["match"] for step in episode["steps"]]


def test_replay_finds_random_output_and_ignores_times(cli: Any, tmp_path: Path) -> None:
    done = cli(
        QUIET,
        "env.tasks=write-greeting",
        "policy=scripted",
        script("date --iso-8601=ns", "head -c 20 /dev/urandom | od -An -tu1", "echo same", "mktemp -u", SUBMIT),
        "seed=3",
        "attempts=2",
        "hydra.run.dir=runs/first",
    )
    assert done.returncode == 0, done.stderr
    done = cli("replay=runs/first", "hydra.run.dir=runs/second")
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path / "runs/second")
    assert (report["score"], report["matching_steps"], report["compared_steps"]) == (0.8, 8, 10)
    assert report["tasks"]["write-greeting"]["score"] == 0.8
    for episode in report["episodes"]:
        assert matches(episode) == ["exact", "normalised", "different", "exact", "normalised"]
        assert episode["steps"][1]["normalisers"] == ["timestamps"]
        different = episode["steps"][2]
        assert different["where"] == "message 4 (user)"
        assert {line[0] for line in different["diff"]} >= {"+", "-"}
        assert episode["reward"]["recorded"] == episode["reward"]["now"]
    assert "Determinism 0.80: 8 of 10 steps match." in done.stdout
    assert "step 0 exact, 1 normalised (timestamps), 2 different, 3 exact, 4 normalised (temp_paths)" in done.stdout
    assert "replay.json" in done.stdout
    runs = (rows(tmp_path / run) for run in ("runs/first", "runs/second"))
    then, now = (sorted((row["attempt"], row["seed"]) for row in ran) for ran in runs)
    assert then == now


@pytest.mark.nightly
def test_solutions_of_the_samples_are_deterministic(cli: Any, tmp_path: Path) -> None:
    assert cli(QUIET, "env.limit=3", "hydra.run.dir=first").returncode == 0
    done = cli("replay=first", "policy.normalise=[]", "hydra.run.dir=second")
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path / "second")
    assert len(report["tasks"]) == len(report["episodes"]) == 3
    assert report["score"] == 1.0
    assert {episode["reward"]["now"] for episode in report["episodes"]} == {1.0}
    done = cli("resume=second")
    assert done.returncode == 0, done.stderr
    assert "no step could be compared" not in done.stdout
    assert report_of(tmp_path / "second") == report, "a session that runs nothing leaves the report as it is"


@pytest.mark.nightly
def test_episode_of_a_sweep_uses_custom_options(cli: Any, tmp_path: Path) -> None:
    options = tmp_path / "options" / "policy"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("# as the oracle\n_target_: ares_exp.policies.oracle.OraclePolicy\n")
    sweep = (
        "-m",
        "--config-dir",
        "options",
        QUIET,
        "policy=mine",
        "env.limit=1",
        "limits.steps=5,7",
        "hydra.sweep.dir=s",
    )
    assert cli(*sweep).returncode == 0
    [recorded] = rows(tmp_path / "s/1")
    done = cli("-m", f"replay=s/1/{recorded['episode_id'][:-3]}", "attempts=1,2", "hydra.sweep.dir=again")
    assert done.returncode == 0, done.stderr
    for number, attempts in enumerate((1, 2)):
        report = report_of(tmp_path / "again" / str(number))
        assert [one["episode_id"]["recorded"] for one in report["episodes"]] == [recorded["episode_id"]] * attempts
        assert "  steps: 7" in (tmp_path / "again" / str(number) / "config.yaml").read_text()
    done = cli("replay=again/1", "hydra.run.dir=third")
    assert done.returncode == 0, done.stderr
    assert len(report_of(tmp_path / "third")["episodes"]) == 2


def test_strict_replay_fails_at_a_difference(cli: Any, tmp_path: Path) -> None:
    random = script("head -c 20 /dev/urandom | od -An -tu1", SUBMIT)
    first = cli(QUIET, "env.limit=1", "policy=scripted", random, "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    done = cli("replay=first", "policy.strict=normalised", "hydra.run.dir=second")
    assert done.returncode == 1
    assert "ReplayDivergenceError" in done.stdout
    [episode] = report_of(tmp_path / "second")["episodes"]
    assert matches(episode) == ["exact", "different"]
    assert (episode["outcome"], episode["reward"]["now"]) == ({"recorded": "completed", "now": "policy_error"}, None)


def test_early_ends_and_extra_requests_are_reported(cli: Any, tmp_path: Path) -> None:
    """The recording is changed: the agent acts differently from the recording."""
    submit = f"{SUBMIT} # now"  # the agent's prompt has the plain one
    three = script("echo one", "echo two", submit)
    first = cli(QUIET, "env.limit=1", "policy=scripted", three, "attempts=2", "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    early, late = sorted((tmp_path / "first" / "trajectories").glob("*.json"))
    early.write_text(early.read_text().replace("echo one", submit))
    late.write_text(late.read_text().replace(submit, "echo three"))
    done = cli("replay=first", "hydra.run.dir=second")
    assert done.returncode == 1, done.stderr
    report = report_of(tmp_path / "second")
    assert [matches(episode) for episode in report["episodes"]] == [
        ["exact", "not reached", "not reached"],
        ["exact", "exact", "exact", "extra"],
    ]
    assert (report["matching_steps"], report["compared_steps"]) == (4, 7)
    assert "1-2 not reached" in done.stdout


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("replay=frist", "Did you mean `first`"),
        ("replay=first container.no_such=1", "The overrides recorded in first also apply."),
    ],
)
def test_mistakes_are_explained(cli: Any, tmp_path: Path, recorded: Path, argument: str, expected: str) -> None:
    shutil.copytree(recorded, tmp_path / "first")
    done = cli(*argument.split(), "hydra.run.dir=second")
    assert done.returncode == 2, done.stdout
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "second" / "episodes.jsonl").exists()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import subprocess

    place = tmp_path_factory.mktemp("recorded")
    command = [*warm_command(), QUIET, "env.tasks=write-greeting", "hydra.run.dir=first"]
    subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=60)
    return place / "first"
