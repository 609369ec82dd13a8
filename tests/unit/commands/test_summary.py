import io
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ares_exp.records.results import EnvironmentUsage, EpisodeResult, ErrorInfo, Outcome, RunSummary
from ares_exp.reports.summary import render_job, render_summary


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def _result(
    task_name: str, reward: float | None, *, attempt: int = 0, steps: int = 2, sec: float = 1.5, message: str = "boom"
) -> EpisodeResult:
    return EpisodeResult(
        episode_id=f"{task_name}-{attempt}",
        task_name=task_name,
        attempt=attempt,
        seed=0,
        outcome=Outcome.COMPLETED if reward is not None else Outcome.AGENT_ERROR,
        reward=reward,
        error=ErrorInfo("AgentError", message) if reward is None else None,
        num_steps=steps,
        started_at=0.0,
        finished_at=sec,
    )


class ColourTerminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def _render(summary: RunSummary, run_dir: Path, encoding: str = "utf-8") -> str:
    buffer = io.BytesIO()
    with io.TextIOWrapper(buffer, encoding=encoding) as stream:
        render_summary(summary, run_dir=run_dir, stream=stream)
        return buffer.getvalue().decode(encoding)


def _cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith(("│", "|", "┃")) and "--" not in line]
    return [[cell.strip() for cell in row.strip("│|┃").replace("┃", "│").replace("|", "│").split("│")] for row in rows]


def test_tasks_have_rows_before_the_totals(tmp_path: Path) -> None:
    results = (_result("write-file", 1.0), _result("count-words", 0.5, steps=7, sec=0.26))
    text = _render(RunSummary(2, results, wall_sec=2.34), tmp_path)
    assert _cells(text) == [
        ["task", "attempts", "reward", "outcome", "steps", "seconds"],
        ["count-words", "1", "0.50", "completed", "7", "0.3"],
        ["write-file", "1", "1.00", "completed", "2", "1.5"],
    ]
    assert "mean reward 0.75 [0.20, 0.97] over 2 scored · 2 of 2 episodes finished · 2.3 s\n" in text
    assert "Without a reward" not in text
    for told_of_more in ("means over the attempts", "pass@k", "flaky", "retried", "errors"):
        assert told_of_more not in text


LOST = replace(_result("c", None), error=ErrorInfo("ContainerDiedError", "gone"))
PAID = EpisodeResult("e", "a", 0, 0, Outcome.COMPLETED, 1.0, prompt_tokens=1500, generated_tokens=34, cost=0.0125)
JUDGED = EpisodeResult("e", "a", 0, 0, Outcome.COMPLETED, 1.0, environment_usage=EnvironmentUsage(10, 5))
CLOSED = replace(_result("a", None), outcome=Outcome.TRUNCATED, error=ErrorInfo.of_limit("steps"), note="it is so")
SENTENCES = [
    (RunSummary(3, (_result("a", 1.0), _result("b", 1.0), _result("c", None))),
     "mean reward 1.00 [0.34, 1.00] over 2 scored · 0.67 [0.21, 0.94] over all 3, errors as zero · 3 of 3"),
    (RunSummary(4, tuple(_result("a", 1.0, attempt=n) for n in range(4))), "over 4 scored attempts at one task ·"),
    (RunSummary(3, (_result("a", None), _result("b", None), LOST)), "\nerrors: 2 AgentError, 1 ContainerDiedError\n"),
    (RunSummary(2, (_result("a", 1.0),), ended_by="it is spent"), "1 of 2 episodes finished · 0.0 s · it is spent"),
    (RunSummary(3, (PAID,), interrupted=True, wall_sec=61.0),
     "1 of 3 episodes finished · 1,534 tokens (34 generated) · $0.0125 · 1 min 01 s · interrupted"),
    (RunSummary(1, (JUDGED,), spenders=("the oracle", "the judge `style`")),
     "· the oracle and the judge `style`: 15 tokens ·"),
    (RunSummary(1, (CLOSED,)), "a (attempt 0): truncated: limit: limit reached: steps; it is so\n"),
    (RunSummary(1, (_result("a", None, message="AgentError"),)), "a (attempt 0): agent_error: AgentError\n"),
]  # fmt: skip


@pytest.mark.parametrize(("summary", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_sentences_explain_the_summary(tmp_path: Path, summary: RunSummary, sentence: str) -> None:
    assert sentence in _render(summary, tmp_path)


def test_several_attempts_show_pass_rates_and_flaky_tasks(tmp_path: Path) -> None:
    results = tuple(
        _result(task, reward, attempt=attempt)
        for task, rewards in (("a", (1.0, 1.0, 0.0)), ("b", (0.0, 0.0, 0.0)), ("c", (1.0, 1.0, 1.0)))
        for attempt, reward in enumerate(rewards)
    )
    lines = _render(RunSummary(9, results), tmp_path).splitlines()
    start = lines.index("k   pass@k              pass^k")
    assert [line.split()[:2] for line in lines[start + 1 : start + 4]] == [["1", "0.56"], ["2", "0.67"], ["3", "0.67"]]
    assert lines[start + 3].endswith("0.33 [0.06, 0.79]")
    assert lines[start + 4 : start + 7] == ["", "1 of 3 tasks flaky: a 2/3", ""]


def test_pass_rates_show_the_number_of_tasks(tmp_path: Path) -> None:
    results = (
        *(_result("a", reward, attempt=attempt) for attempt, reward in enumerate((0.5, 1.0))),
        *(_result("b", reward, attempt=attempt) for attempt, reward in enumerate((1.0, None))),
    )
    text = _render(RunSummary(4, results), tmp_path)
    assert "\n\n\n" not in text
    lines = text.splitlines()
    assert "k   pass@k, errors as zero   pass^k, errors as zero" in lines, "another table: four columns are too wide"
    assert next(line for line in lines if line.startswith("2 ")).count("(of 1 task)") == 2
    assert "pass: a reward of 1.00 or more\n" in text


def test_many_flaky_tasks_are_cut_with_a_note(tmp_path: Path) -> None:
    results = tuple(_result(f"t{n:02}", float(attempt), attempt=attempt) for n in range(12) for attempt in range(2))
    text = _render(RunSummary(24, results), tmp_path)
    assert "12 of 12 tasks flaky: t00 1/2, t01 1/2," in text
    assert "t07 1/2 and 4 more\n" in text


def test_last_retry_is_the_result(tmp_path: Path) -> None:
    first, last = _result("a", None, steps=9), replace(_result("a", 1.0), retry=1)
    text = _render(RunSummary(1, (first, last)), tmp_path)
    assert _cells(text)[1:] == [["a", "1", "1.00", "completed", "2", "1.5"]]
    assert "over 1 scored · 1 of 1 episodes finished" in text
    assert "\n1 of 1 attempt ran again; earlier episodes: 1 AgentError\n" in text
    assert "Without a reward" not in text


def test_attempts_are_averaged_in_one_row(tmp_path: Path) -> None:
    results = (
        _result("a", 1.0, attempt=0, steps=2, sec=1.0),
        _result("a", None, attempt=1, steps=3, sec=2.0),
        _result("a", 0.0, attempt=2, steps=2, sec=6.0),
    )
    text = _render(RunSummary(3, results), tmp_path)
    assert _cells(text)[1] == ["a", "3", "0.50", "2 completed, 1", "2.3", "3.0"] or _cells(text)[1] == [
        *("a", "3", "0.50", "2 completed, 1 agent_error", "2.3", "3.0")
    ]
    assert "means over the attempts" in text


def test_environment_usage_is_shown_separately(tmp_path: Path) -> None:
    nothing, some = EnvironmentUsage(), EnvironmentUsage(1500, 34, 0.0125)
    results = [
        EpisodeResult(str(number), "a", number, 0, Outcome.COMPLETED, 1.0, environment_usage=used)
        for number, used in enumerate((None, nothing, some, some))
    ]
    assert "own:" not in _render(RunSummary(2, tuple(results[:2])), tmp_path)
    summary = RunSummary(4, tuple(results))
    assert "4 of 4 episodes finished · the environment's own: 3,068 tokens, $0.0250" in _render(summary, tmp_path)
    totals = {"prompt_tokens": 3000, "generated_tokens": 68, "cost": 0.025}
    assert (summary.to_dict()["environment_usage"], summary.to_dict()["prompt_tokens"]) == (totals, 0)
    assert RunSummary(1, tuple(results[:1])).to_dict()["environment_usage"] is None


def test_named_rewards_are_columns(tmp_path: Path) -> None:
    scored = [
        replace(_result("a", 0.9), rewards={"reward": 1.0, "style": 0.8}),
        replace(_result("a", 0.5, attempt=1), rewards={"reward": 0.5, "style": 0.5}),
        replace(_result("b", 0.0), rewards={"reward": 0.0}),
    ]
    assert _cells(_render(RunSummary(3, tuple(scored)), tmp_path)) == [
        ["task", "attempts", "reward", "verifier", "style", "outcome", "steps", "seconds"],
        ["a", "2", "0.70", "0.75", "0.65", "2 completed", "2", "1.5"],
        ["b", "1", "0.00", "0.00", "-", "completed", "2", "1.5"],
    ]
    alone = replace(_result("a", 1.0), rewards={"reward": 1.0})
    assert "verifier" not in _render(RunSummary(1, (alone,)), tmp_path), "it is the reward"
    many = replace(_result("a", 1.0), rewards={"reward": 1.0} | {f"r{n}": 0.5 for n in range(6)})
    assert "episodes.jsonl has 2 more named rewards" in _render(RunSummary(1, (many,)), tmp_path)
    rare = replace(_result("a", 1.0), rewards={"style": 1.0})
    assert "named rewards" not in _render(RunSummary(3, (rare, _result("b", 1.0), _result("c", 1.0))), tmp_path)


def test_equal_reasons_are_shown_once(tmp_path: Path) -> None:
    results = (*(_result(f"t{n}", None) for n in range(5)), _result("u", None, message="other"))
    lines = _render(RunSummary(6, results), tmp_path).splitlines()
    at = lines.index("Without a reward:")
    assert lines[at + 1 : at + 3] == [
        "  t0 (attempt 0), t1 (attempt 0), t2 (attempt 0) and 2 more: agent_error: AgentError: boom",
        "  u (attempt 0): agent_error: AgentError: other",
    ]


def test_snapshots_are_shown_if_any(tmp_path: Path) -> None:
    results = (
        EpisodeResult("e", "a", 0, 0, Outcome.COMPLETED, 1.0, snapshots=3, snapshot_failures=1),
        EpisodeResult("f", "a", 1, 0, Outcome.COMPLETED, 1.0, snapshots=1),
    )
    text = _render(RunSummary(2, results, snapshot_dir=tmp_path / "snapshots"), tmp_path)
    assert f"\n4 snapshots in {tmp_path}/snapshots\n1 snapshot failed, see run.log\n\nWritten to" in text
    text = _render(RunSummary(1, (_result("a", 1.0),), snapshot_dir=tmp_path / "snapshots"), tmp_path)
    assert "snapshots in" not in text
    assert "failed" not in text


def test_run_without_results_has_no_table(tmp_path: Path) -> None:
    text = _render(RunSummary(2, (), interrupted=True), tmp_path)
    assert _cells(text) == []
    assert text.startswith("no reward · 0 of 2 episodes finished")


def test_last_lines_show_directory_and_next_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "outputs" / "my run"
    (run_dir / "trajectories").mkdir(parents=True)
    (run_dir / "episodes.jsonl").touch()
    (run_dir / "sessions.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    show = "Written to outputs/my run; show: ares-exp show 'outputs/my run'"
    done, started = (_render(RunSummary(planned, (_result("a", 1.0),)), run_dir) for planned in (1, 2))
    assert done.splitlines()[-2:] == ["", show]
    assert started.splitlines()[-2:] == ["", f"{show}; continue: ares-exp resume='outputs/my run'"]
    lost = tuple(
        replace(_result(name, None), outcome=outcome, error=ErrorInfo(name, "gone"))
        for name, outcome in (
            ("EndpointUnreachableError", Outcome.POLICY_ERROR),
            ("ContainerServiceUnavailableError", Outcome.CONTAINER_ERROR),
            ("ContainerNotFoundError", Outcome.CONTAINER_ERROR),
            ("VerifierTimeoutError", Outcome.VERIFIER_ERROR),
        )
    )
    command = (
        "retry infrastructure errors: ares-exp resume='outputs/my run' 'resume_redo=[container_error,policy_error]'"
    )
    assert _render(RunSummary(4, lost), run_dir).splitlines()[-1] == f"{show}; {command}"
    assert _render(RunSummary(2, lost[2:]), run_dir).splitlines()[-1] == show
    (run_dir / "trajectories").rmdir()
    (run_dir / "sessions.jsonl").unlink()  # merged runs have none
    assert _render(RunSummary(1, ()), run_dir).endswith("\n\nWritten to outputs/my run\n")
    (run_dir / "provenance.json").write_text('{"choices": {"tracker": "none", "env": "harbor", "agent": "shell"}}')
    assert _render(RunSummary(1, ()), run_dir).endswith("\n\nenv=harbor agent=shell\nWritten to outputs/my run\n")
    assert "Written" not in _render(RunSummary(0, ()), tmp_path / "missing")


def test_sweep_job_is_one_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    summary = RunSummary(3, (_result("a", 1.0), _result("b", None)), wall_sec=2.0)
    render_job(summary, name="#1 seed=2", run_dir=tmp_path, stream=stream)
    [line] = stream.getvalue().splitlines()
    assert line.startswith("#1 seed=2: mean reward 1.00 [")
    assert line.endswith(f" | 2 of 3 episodes finished | 2.0 s | errors: 1 AgentError | {tmp_path}")


def test_limits_and_format_errors_are_counted(tmp_path: Path) -> None:
    results = (
        *(replace(_result(f"s{n}", 0.0), outcome=Outcome.TRUNCATED, error=ErrorInfo.of_limit("steps")) for n in (1, 2)),
        replace(_result("t", 0.0), outcome=Outcome.TRUNCATED, error=ErrorInfo.of_limit("time"), length_stops=2),
        replace(_result("f", 1.0), format_errors=3, container_image="host"),
        replace(_result("g", 1.0), format_errors=1),
    )
    lines = _render(RunSummary(5, results), tmp_path).splitlines()
    assert "truncated: 2 by steps, 1 by time" in lines
    assert "format errors: 4 in 2 episodes" in lines
    assert "responses cut off at the limit on output tokens (finish_reason=length): 2 in 1 episode" in lines
    assert "container=local ignores the FROM image: commands use the programs of this machine" in lines
    quiet = _render(RunSummary(1, (_result("a", 1.0),)), tmp_path)
    assert not any(word in quiet for word in ("truncated", "format errors", "cut off", "container=local"))


def test_cancelled_attempts_are_not_errors(tmp_path: Path) -> None:
    cancelled = replace(_result("a", None), outcome=Outcome.CANCELLED, error=ErrorInfo("CancelledError", "x"))
    summary = RunSummary(4, (cancelled, replace(cancelled, task_name="b"), _result("c", None)), interrupted=True)
    lines = _render(summary, tmp_path).splitlines()
    assert "no reward · 1 of 4 episodes finished · 0.0 s · interrupted" in lines
    assert not any(line.startswith("errors") for line in lines), "there is one, listed below"
    at = lines.index("Without a reward:")
    assert lines[at + 1 : at + 4] == [
        "  c (attempt 0): agent_error: AgentError: boom", "  2 attempts interrupted", "  1 attempt never started",
    ]  # fmt: skip


def test_episodes_without_a_reward_are_listed_and_bounded(tmp_path: Path) -> None:
    results = tuple(_result(f"task-{i:02}", None, attempt=i, message=f"line one\nline {i}") for i in range(12))
    lines = _render(RunSummary(12, results), tmp_path).splitlines()
    listed = lines[lines.index("Without a reward:") + 1 : -2]
    assert listed[:2] == ["  task-00 (attempt 0): agent_error: AgentError: line one", "    line 0"]
    assert len(listed) == 21
    assert listed[-1] == "  and 2 more, in episodes.jsonl"


def test_long_error_is_cut_at_its_end(tmp_path: Path) -> None:
    message = f"It failed: {'x' * 800} and this was said last"
    text = _render(RunSummary(1, (_result("a", None, message=message),)), tmp_path)
    assert f"AgentError: {message}\n" in text
    text = _render(RunSummary(1, (_result("a", None, message=5 * message),)), tmp_path)
    [line] = [line for line in text.splitlines() if "It failed" in line]
    assert line.endswith("… (complete in episodes.jsonl)")
    assert len(line) < 1100


def test_summary_shows_worst_of_many_tasks(tmp_path: Path) -> None:
    rewards = [1.0] * 47 + [0.5, 0.0, None]
    text = _render(RunSummary(50, tuple(_result(f"t{i:03}", reward) for i, reward in enumerate(rewards))), tmp_path)
    assert [row[0] for row in _cells(text)[1:]] == ["t049", "t048", "t047", *(f"t{i:03}" for i in range(37))]
    assert "40 of 50 tasks with the lowest rewards" in " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_summary_fits_the_terminal(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    message = f"Dockerfile, line 2: {'words ' * 30}\n{'printed ' * 30}"
    results = tuple(
        replace(_result(f"access-log-report-{task}", reward, attempt=attempt, message=message), rewards=rewards)
        for task in range(12)
        for attempt, reward in enumerate((1.0, 0.0, 1.0, None))
        if (rewards := {"reward": 1.0, "style": 0.5, "judge": 0.5} if reward is not None else {}) is not None
    )
    stream = ColourTerminal()
    render_summary(RunSummary(48, results), run_dir=tmp_path / "run", stream=stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    table = [line for line in lines if line.startswith(("┏", "┃", "┡", "│", "└"))]
    assert len({len(line) for line in table}) == 1
    assert all(line.endswith(("┓", "┃", "┩", "│", "┘")) for line in table)
    shown = _cells(stream.getvalue())[0]
    assert shown[-1] == {60: "outcome", 80: "outcome", 120: "seconds"}[columns]
    assert {"verifier", "style", "judge"} <= {*shown} or columns == 60
    broken = [word for line in lines for word in line.split() if "[" in word and "]" not in word and "…" not in word]
    assert all(word.endswith(",") for word in broken), "an interval is on one line"


def test_summary_shows_cause_then_last_lines(tmp_path: Path) -> None:
    printed = "\n".join(f"printed {number}" for number in range(20))
    text = _render(RunSummary(1, (_result("a", None, message=f"It failed. Set x.\n{printed}\x1b[2J"),)), tmp_path)
    lines = text.splitlines()
    at = lines.index("  a (attempt 0): agent_error: AgentError: It failed. Set x.")
    assert lines[at + 1 : at + 3] == ["    [… 12 lines …]", "    printed 12"]
    assert lines[at + 9] == "    printed 19\\x1b[2J"


def test_wide_task_name_is_wrapped() -> None:
    name = "a-task-with-a-very-long-name-" * 5
    text = _render(RunSummary(1, (_result(name, 1.0),)), Path("out"))
    assert "".join(row[0] for row in _cells(text)[1:]) == name
    assert max(map(len, text.splitlines())) <= 80


def test_markup_in_a_name_is_text(tmp_path: Path) -> None:
    assert _cells(_render(RunSummary(1, (_result("[red]a[/red]", 1.0),)), tmp_path))[1][0] == "[red]a[/red]"


def test_limited_encoding_replaces_characters(tmp_path: Path) -> None:
    text = _render(RunSummary(1, (_result("tâche", None, message="étape"),)), tmp_path, encoding="ascii")
    assert "t?che" in text
    assert "no reward | 1 of 1 episodes finished" in text


@pytest.mark.parametrize(("no_color", "escapes"), [("", True), ("1", False)])
def test_escape_codes_need_a_colour_terminal(
    no_color: str, escapes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = ColourTerminal()
    summary = RunSummary(1, (_result("a", 1.0),))
    render_summary(summary, run_dir=tmp_path, stream=stream)
    assert ("\x1b[" in stream.getvalue()) is escapes
    assert "\x1b[" not in _render(summary, tmp_path)
    assert os.environ["TERM"] == "xterm-256color"
