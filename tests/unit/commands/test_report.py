import contextlib
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ares_exp.commands.cli.run_command import run_command
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.records.secrets import MASK
from ares_exp.reports.run_payload import ShownRun
from ares_exp.reports.written_report import in_order
from ares_exp.runs.sweeps.sweep_report import SweepReport
from tests.unit.commands.recorded import data_of, row, run_of
from tests.unit.trajectories.chats import chat, with_response

compare = partial(run_command, "compare", program="ares-exp compare")

main = partial(run_command, "report", program="ares-exp report")

ROWS = [
    row("easy", 0, 1.0),
    row("easy", 1, 1.0),
    row("flaky", 0, 0.0),
    row("flaky", 1, 1.0),
    row("broken", 0, None),
    row("lost", 0, None, outcome=Outcome.LOST),
]


def test_errors_come_first_then_flaky_tasks(tmp_path: Path) -> None:
    summary = ShownRun(run_of(tmp_path / "run", ROWS)).summary
    recorded = {one.episode_id for one in ROWS}
    order = ["broken-0", "flaky-0", "flaky-1", "easy-0", "easy-1", "lost-0"]
    assert in_order(summary, recorded) == order
    assert in_order(summary, recorded, first_tasks=["easy"])[:2] == ["easy-0", "easy-1"]
    assert in_order(summary, {*recorded, "under-way"})[:2] == ["under-way", "broken-0"]


def test_file_size_is_bounded_and_omissions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = os.urandom(240_000).hex()
    episodes = [with_response(chat(one.episode_id, one.task_name), LLMResponse.from_text(noise)) for one in ROWS]
    run, out = run_of(tmp_path / "a run", ROWS, *episodes), tmp_path / "out.html"
    assert main([str(run), "-o", str(out), "--max-mb", "1"]) == 0
    payload, found = data_of(out)
    assert out.stat().st_size <= 10**6
    assert [*found] == ["broken-0", "flaky-0"]
    told = payload["runs"][0]["left_out"]
    assert [one["id"] for one in told] == ["flaky-1", "easy-0", "easy-1", "lost-0"]
    assert told[0]["command"] == f"ares-exp show '{run}/flaky-1'"
    assert len(payload["runs"][0]["episodes"]) == 6
    assert "6 episodes, 2 trajectories, 4 left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "ids"), [("failed", {"flaky-0", "broken-0", "lost-0"}), ("none", set()), ("all", {*range(6)})]
)
def test_option_episodes_selects_trajectories(tmp_path: Path, which: str, ids: set[str]) -> None:
    run = run_of(tmp_path / "run", ROWS)
    assert main([str(run), "--episodes", which]) == 0
    payload, found = data_of(run / "report.html")
    assert len(found) == 6 if which == "all" else found.keys() == ids
    assert len(payload["runs"][0]["left_out"]) == 6 - len(found)


def test_secrets_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = with_response(chat("easy-0", "easy"), LLMResponse.from_text("the key is swordfish-and-chips"))
    run = run_of(tmp_path / "run", ROWS[:1], episode)
    (run / "run.log").write_text("asked with swordfish-and-chips\n")
    monkeypatch.setenv("SOME_API_KEY", "swordfish-and-chips")
    assert main([str(run)]) == 0
    payload, found = data_of(run / "report.html")
    assert "swordfish" not in json.dumps([payload, found])
    assert MASK in json.dumps(found)


def test_paths_and_environment_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("TEAM_SERVER", "machine.example.org")
    text = f"see {tmp_path}/run/x and /home/someone/y and /home/other/z on machine.example.org\nSHELL_LEVEL=seventeen"
    run = run_of(tmp_path / "run", ROWS[:1], with_response(chat("easy-0", "easy"), LLMResponse.from_text(text)))
    provenance = {"hostname": "vm-17", "seed": 3, "argv": ["ares-exp", "name=argued"], "choices": {"env": "harbor"}}
    (run / "provenance.json").write_text(json.dumps(provenance))
    out = tmp_path / "out.html"
    assert main([str(run), "-o", str(out), "--redact", "paths,env"]) == 0
    told = json.dumps([*data_of(out)])
    for hidden in (str(tmp_path / "run"), "someone", "/home/other", "machine.example", "seventeen", "vm-17", "argued"):
        assert hidden not in told, hidden
    assert "env=harbor" in told
    assert "see RUN/x and ~/y and /home/***/z on ***" in told


def test_two_runs_show_the_numbers_of_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_of(tmp_path / "first", ROWS[:4])
    second = run_of(tmp_path / "second", [replace(one, reward=1.0) for one in ROWS[:4]])
    out = tmp_path / "pair.html"
    assert main([str(first), str(second), "-o", str(out)]) == 0
    payload, found = data_of(out)
    assert [*found][:2] == ["flaky-0", "flaky-1"]  # what flipped goes first; the other run's have the same ids here
    capsys.readouterr()
    assert compare([str(first), str(second), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["pairs"][0]
    assert {key: payload["pair"][key] for key in told} == told
    assert [task["task_name"] for task in payload["pair"]["tasks"] if task["flipped"]] == ["flaky"]


def test_sweep_shows_the_numbers_of_its_summary(tmp_path: Path) -> None:
    for number, reward in enumerate((0.0, 1.0)):
        job = run_of(tmp_path / "sweep" / str(number), [row("task", 0, reward)])
        (job / ".hydra").mkdir()
        (job / ".hydra" / "overrides.yaml").write_text(f"- seed={number}\n")
    (tmp_path / "sweep" / "multirun.yaml").write_text("hydra: {}\n")
    assert main([str(tmp_path / "sweep")]) == 0
    payload, _ = data_of(tmp_path / "sweep" / "report.html")
    told, sweep = SweepReport.read(tmp_path / "sweep").to_dict(), payload["sweep"]
    assert sweep["best"] == told["best"] == "1"
    assert [{key: job[key] for key in job if key != "run"} for job in sweep["jobs"]] == told["jobs"]
    assert [job["run"] for job in sweep["jobs"]] == [0, 1]
    assert sweep["settings"] == told["settings"]
    assert [(one["jobs"], one["objective"]) for one in sweep["settings"]] == [(["0", "1"], 0.5)]
    assert len(payload["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-here"], "Expected a run directory"),
        (["run", "-o", "out.txt"], "ends with .html"),
        (["run", "--redact", "names"], "expected paths, env"),
        (["run", "--max-mb", "0"], "expected a number from 1"),
        (["run", "run"], "the same run"),
    ],
)
def test_mistakes_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    run_of(tmp_path / "run", ROWS[:1])
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # of what the parser refuses
        assert main(arguments) == 2
    assert said in capsys.readouterr().err
