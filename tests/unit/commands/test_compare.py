import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ares_exp.commands.cli.run_command import run_command
from ares_exp.commands.compared_runs import adjust
from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome
from ares_exp.records.run_dir import dump_json
from ares_exp.tasks.task_files import with_files

main = partial(run_command, "compare", program="ares-exp compare")

Rewards = Mapping[str, Sequence[float | None]]


def _run(path: Path, rewards: Rewards, *overrides: str, planned: int | None = None, tokens: int = 1000) -> Path:
    (path / ".hydra").mkdir(parents=True)
    rows = [
        EpisodeResult(
            f"{task}-{attempt}",
            task,
            attempt,
            0,
            Outcome.COMPLETED if reward is not None else Outcome.CONTAINER_ERROR,
            reward,
            error=None if reward is not None else ErrorInfo("ContainerDiedError", "gone"),
            prompt_tokens=tokens,
            cost=tokens / 1e5,
            started_at=1.0,
            finished_at=3.0,
        )
        for task, own in rewards.items()
        for attempt, reward in enumerate(own)
    ]
    (path / "episodes.jsonl").write_text("".join(dump_json(row.to_dict()) + "\n" for row in rows))
    (path / "summary.json").write_text(json.dumps({"planned": len(rows) if planned is None else planned}))
    (path / ".hydra" / "overrides.yaml").write_text("".join(f"- {one}\n" for one in overrides) or "[]\n")
    values = [one.split("=", 1) for one in overrides]
    (path / "config.yaml").write_text(
        "".join(f"{key}: {value}\n" for key, value in values) + f"collector:\n  json: {{output_dir: {path}}}\nseed: 0\n"
    )
    return path


def _tasks(passed: Sequence[int], attempts: int = 4) -> dict[str, list[float | None]]:
    return {f"t{number}": [1.0] * count + [0.0] * (attempts - count) for number, count in enumerate(passed)}


def _compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return code, " ".join(out.replace("─", "").split()), err


def _document(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_significant_difference_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _run(tmp_path / "a", _tasks([0, 1, 0, 2, 1, 0, 2, 4]), "policy.temperature=0")
    b = _run(tmp_path / "b", _tasks([3, 4, 2, 4, 3, 1, 4, 4]), "policy.temperature=1", tokens=1500)
    code, text, err = _compare(capsys, a, b)
    assert (code, err) == (0, "")
    assert "A policy.temperature=0 8 32 0.31 [0.11, 0.62]" in text
    assert "key A B policy.temperature 0 1 B against A" in text
    assert "output_dir" not in text
    assert "B against A, on 8 tasks in both runs mean reward" in text
    assert "mean reward +0.47 [+0.26, +0.68], p = 0.016 (sign-flip test)" in text
    assert "per attempt: tokens 1,000 -> 1,500 (+50%), $ 0.01 -> 0.01 (+50%), seconds 2.00 -> 2.00 (+0%)" in text
    assert "B is better than A (p = 0.016)." in text
    assert "To detect" not in text
    assert "t0 0/4 3/4 t1 1/4 4/4 t2 0/4 2/4 t3 2/4 4/4 t4 1/4 3/4 t6 2/4 4/4 t5 0/4 1/4 attempts that passed" in text
    assert "scored" not in text


def test_baseline_can_be_the_better_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _run(tmp_path / "a", _tasks([4] * 6)), _run(tmp_path / "b", _tasks([1] * 6))
    text = _compare(capsys, a, b)[1]
    assert "mean reward -0.75 [" in text
    assert "A is better than B (p = 0.031)." in text


def test_advice_shows_the_needed_attempts_or_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _run(tmp_path / "a", _tasks([1, 2, 2, 3, 1, 2, 2, 3, 2, 1]))
    b = _run(tmp_path / "b", _tasks([3, 2, 3, 2, 2, 1, 3, 3, 2, 3]))
    code, text, _ = _compare(capsys, a, b)
    assert code == 0
    assert "): chance can explain a difference of this size." in text
    pair = _document(capsys, a, b)["pairs"][0]
    attempts, tasks = pair["remedy"]["attempts"], pair["remedy"]["tasks"]
    assert attempts > 4
    assert tasks > 10
    assert (
        f"To detect a difference of this size (power 80%), run {attempts} attempts at each of these 10 tasks in both "
        f"runs, or about {tasks} similar tasks with as many attempts as now."
    ) in text


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([0, 4, 0, 4, 0, 2, 0], [4, 0, 4, 0, 4, 2, 2], "because it varies too much from task to task. To detect a"),
        ([0, 1, 0], [2, 3, 4], "these 3 tasks cannot make the difference significant. Compare at least 6 tasks."),
        ([2, 2, 2], [2, 2, 2], "No difference was observed."),
        (
            [2, 4, 0, 1, 2, 2],
            [4, 2, 1, 0, 2, 2],
            "No difference was observed. These 6 tasks can detect a difference of 0.50 or more (power 80%).",
        ),
        ([2], [3], "More attempts at this task cannot make the difference significant. Compare at least 6 tasks."),
    ],
)
def test_advice_explains_if_attempts_cannot_settle_it(
    a: Sequence[int], b: Sequence[int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _compare(capsys, _run(tmp_path / "a", _tasks(a)), _run(tmp_path / "b", _tasks(b)))[1]
    few = len(a) < 6
    assert ("no p-value can be below" in text, "chance can explain" in text) == (few, not few)
    assert said in text


def test_single_attempts_get_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        _run(tmp_path / "a", _tasks([0, 1, 0, 1, 0, 1, 0], 1)),
        _run(tmp_path / "b", _tasks([1, 1, 0, 0, 1, 1, 0], 1)),
    )
    assert (
        "whether more attempts at these 7 tasks would also be enough, run at least two attempts"
        in _compare(capsys, a, b)[1]
    )


def test_tasks_of_only_one_run_are_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _run(tmp_path / "a", {**_tasks([1, 2]), "mine": [1.0] * 4})
    b = _run(tmp_path / "b", {**_tasks([1, 2]), **{f"own{n}": [0.0] * 4 for n in range(7)}})
    code, text, _ = _compare(capsys, a, b)
    assert code == 0
    assert "on 2 tasks in both runs only in A, so left out: mine" in text
    assert "only in B, so left out: own0, own1, own2, own3, own4 and 2 more" in text
    c = _run(tmp_path / "c", {"other": [1.0]})
    text = _compare(capsys, a, c)[1]
    assert "on 0 tasks in both runs" in text
    assert "A and B have no task in common, so they cannot be compared." in text


def test_changed_tasks_are_compared_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests: dict[str, dict[str, str | None]] = {
        "a": {"t0": "sha256:1", "t1": "sha256:2", "t2": None, "t3": with_files("sha256:6", {"hint.md": "a"})},
        "b": {"t0": "sha256:1", "t1": "sha256:9", "t2": "sha256:3", "t3": with_files("sha256:6", {"hint.md": "b"})},
    }
    digests["a"]["t0"] = with_files("sha256:1", {"mine/hint.md": "a"})  # what the config says, and not the task
    runs = [_run(tmp_path / name, _tasks([1, 2, 3, 4])) for name in digests]
    for run in runs:
        (run / "provenance.json").write_text(json.dumps({"tasks": digests[run.name]}))
    code, out, _ = _compare(capsys, *runs)
    assert code == 0
    assert "on 4 tasks in both runs compared, although the task changed between the runs: t1, t3 mean reward" in out
    document = _document(capsys, *runs)
    assert [pair["changed_tasks"] for pair in document["pairs"]] == [["t1", "t3"]]


def test_runs_without_digests_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / name, _tasks([1, 2, 3])) for name in "abc"]
    for run, tasks in zip(runs, (["t0", "t1"], {"t0": 7}, {"t0": "sha256:1"}), strict=True):
        (run / "provenance.json").write_text(json.dumps({"tasks": tasks}))
    code, out, _ = _compare(capsys, *runs, "--all-pairs")
    assert code == 0
    assert "not the same task" not in out


def test_errors_count_as_zero_or_are_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _run(tmp_path / "a", {"t0": [1.0, None], "t1": [0.0, 1.0], "t2": [None, None]})
    b = _run(tmp_path / "b", {"t0": [1.0, 1.0], "t1": [0.0, 1.0], "t2": [1.0, 1.0]})
    text = _compare(capsys, a, b)[1]
    assert "mean reward +0.50 [" in text
    assert "scored only +0.00 [" in text
    assert ", on 2 of them" in text
    assert "t0 1/2 (1 error) 2/2" in text
    assert "t2 0/2 (2 errors) 2/2" in text


def test_sweep_jobs_are_compared_by_their_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    for job in range(11):
        _run(sweep / str(job), _tasks([job % 3, 4, 2, 1]), f"agent.style={job}", "attempts=4")
    (sweep / "multirun.yaml").touch()
    document = _document(capsys, *sorted(sweep.iterdir(), key=lambda job: (len(job.name), job.name))[:11])
    assert [run["name"] for run in document["runs"]] == [f"agent.style={job}" for job in range(11)]
    assert [(pair["a"], pair["b"]) for pair in document["pairs"][:2]] == [("A", "B"), ("A", "C")]
    assert document["differing_config"] == {"agent.style": [str(job) for job in range(11)]}
    code, text, _ = _compare(capsys, sweep, "--all-pairs")
    assert code == 0
    assert "p-values of verdicts are adjusted for 55 comparisons (Holm); intervals are not adjusted." in text
    assert "K against J, on 4 tasks" in text
    assert "task A B C D E F G H I J K" in text


def test_duplicate_and_empty_runs_are_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    jobs = [_run(sweep / str(job), _tasks([job, 2])) for job in range(3)]
    (jobs[1] / "episodes.jsonl").write_text("")
    assert main([str(jobs[2]), str(sweep), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [run["path"] for run in json.loads(out)["runs"]] == [str(jobs[2]), str(jobs[0])]
    assert err == f"warning: These jobs of {sweep} are left out, because none of their episodes has ended: 1\n"


def test_arguments_of_replaced_components_are_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("{_target_: chat, model: m, seed: 1}", "{_target_: oracle, seed: 2}")
    runs = [_run(tmp_path / name, _tasks([1, 2])) for name in ("a", "b")]
    for run, policy in zip(runs, policies, strict=True):
        (run / "config.yaml").write_text(f"policy: {policy}\n")
    differing = _document(capsys, *runs)["differing_config"]
    assert differing == {"policy._target_": ["chat", "oracle"], "policy.seed": ["1", "2"]}


def test_resumed_run_shows_its_final_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (_run(tmp_path / name, _tasks([1, 2]), f"attempts={count}") for name, count in (("a", 1), ("b", 4)))
    assert _document(capsys, a, b)["differing_config"] == {"attempts": ["1", "4"]}
    sessions = ({"started": 1.0, "attempts": 1}, {"ended": 2.0}, {"started": 3.0, "attempts": 4}, {"ended": 4.0})
    (a / "sessions.jsonl").write_text("".join(dump_json(line) + "\n" for line in sessions))
    assert _document(capsys, a, b)["differing_config"] == {}


def test_run_without_overrides_is_named_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / name, _tasks([1, 2]), *own) for name, own in (("a", ()), ("b", ("seed=1",)), ("c", ()))]
    (runs[2] / ".hydra" / "overrides.yaml").unlink()
    (runs[2] / "config.yaml").write_bytes(b"\xff\x00: [")
    (runs[1] / "config.yaml").write_text("a: " + "[" * 400_000)
    assert [run["name"] for run in _document(capsys, *runs)["runs"]] == ["defaults", "seed=1", str(runs[2])]


def test_killed_run_is_compared_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _run(tmp_path / "a", _tasks([1, 2])), _run(tmp_path / "b", _tasks([1, 2]), planned=12)
    (a / "summary.json").unlink()
    with (a / "episodes.jsonl").open("a") as file:
        file.write('{"episode_id": "half')
    code, text, _ = _compare(capsys, a, b)
    assert code == 0
    assert "A: the last line of its episodes.jsonl is incomplete, and is ignored" in text
    assert "A: it has no summary: it is running, or was killed" in text
    assert "B: only 8 of its 12 attempts have ended" in text


def test_threshold_defines_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _run(tmp_path / "a", {"t": [0.4, 0.6]}), _run(tmp_path / "b", {"t": [0.6, 0.7]})
    assert _document(capsys, a, b)["pairs"][0]["flips"] == []
    flips = _document(capsys, a, b, "--threshold", "0.5")["pairs"][0]["flips"]
    assert [(one["a_passed"], one["b_passed"]) for one in flips] == [(1, 2)]


def test_alpha_widens_the_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / name, _tasks(passed)) for name, passed in (("a", [0, 1, 0, 2]), ("b", [3, 4, 2, 4]))]
    wide, narrow = (_document(capsys, *runs, "--alpha", alpha)["pairs"][0] for alpha in (0.01, 0.2))
    assert wide["errors_as_zero"]["low"] < narrow["errors_as_zero"]["low"]
    assert "no p-value can be below" in wide["verdict"]
    assert "B is better" in narrow["verdict"]


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "no episode of this run has ended"), ("{}\n", "line 1: cannot read the result of an episode")],
)
def test_invalid_run_is_refused(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _run(tmp_path / "runs" / "first", _tasks([1])), _run(tmp_path / "runs" / "second", _tasks([1]))
    (b / "episodes.jsonl").write_text(content)
    for arguments, expected in (
        ((a, b), said),
        ((a,), "Expected 2 to 100 runs to compare, got 1"),
        ((a, a), f"all 2 paths name the same run: {a}"),
        ((a, tmp_path / "nowhere"), "There is no run"),
        ((a, tmp_path / "runs"), "is a folder of runs (first, second)"),
        ((a, tmp_path / ("x" * 5000)), "File name too long"),
    ):
        code, out, err = _compare(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert expected in err
        assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--alpha", "0"], ["--alpha", "x"], ["--threshold", "nan"], ["--alp", "0.1"]])
def test_wrong_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["a", "b", *arguments])
    assert caught.value.code == 2
    assert "usage: ares-exp compare" in capsys.readouterr().err


def test_control_characters_in_task_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (_run(tmp_path / name, {"\x1b[2Jred": [reward]}) for name, reward in (("a", 0.0), ("b", 1.0)))
    text = _compare(capsys, a, b)[1]
    assert "\x1b" not in text
    assert "\\x1b[2Jred 0/1 1/1" in text


def test_p_values_have_holm_adjustment() -> None:
    """The worked example of R's `p.adjust(c(0.01, 0.04, 0.03), "holm")`."""
    assert adjust({0: 0.01, 1: 0.04, 2: 0.03}) == pytest.approx({0: 0.03, 1: 0.06, 2: 0.06})
    assert adjust({0: 0.9, 1: 0.8}) == {1: 1.0, 0: 1.0}


@pytest.mark.once
def test_compare_imports_neither_wandb_nor_scipy_stats(tmp_path: Path) -> None:
    a, b = _run(tmp_path / "a", _tasks([1, 2])), _run(tmp_path / "b", _tasks([2, 2]))
    code = (
        "import sys; from ares_exp.commands.cli.main import run_word; code = run_word(sys.argv[1:], 'ares-exp'); "
        "sys.exit(code or ('wandb' in sys.modules or 'scipy.stats' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", a, b], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
