"""Progress: the counts, the plain lines, the bar on a real pseudo-terminal, and the cleanup."""

import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TextIO

import pytest
from rich.console import Console

from ares_exp.records.results import EpisodeResult, EpisodeUsage, ErrorInfo, Outcome
from ares_exp.records.terminal_text import format_duration, format_number
from ares_exp.runs.control.status import Held, LiveStatus, Progress
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import Scheduler, plan_episodes

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines(io.StringIO):
    """A stream on which a test can wait for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Semaphore(0)

    def flush(self) -> None:
        super().flush()
        self.written.release()


def _result(task_name: str, reward: float | None) -> EpisodeResult:
    outcome = Outcome.AGENT_ERROR if reward is None else Outcome.COMPLETED
    return EpisodeResult("id", task_name, 0, 0, outcome, reward)


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s in vain"
        time.sleep(0.01)


class State:
    """The state of a run that a test changes.

    Attributes:
        live: Counts of finished episodes.
        running: The running episodes.
    """

    def __init__(self, expected: int, *running: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = [self.episode(task) for task in running]
        self.scheduler = Scheduler(1, None)  # type: ignore[arg-type]
        self.live = LiveStatus(lambda: list(self.running), self.scheduler, clock=clock, now=clock)
        self.live.expected = expected
        self.read = self.live.read

    @staticmethod
    def episode(task: str, **state: Any) -> RunningEpisode:
        return RunningEpisode(planned=plan_episodes([task], attempts=1, seed=0)[0], **state)

    def end(self, reward: float | None, outcome: Outcome | None = None) -> None:
        del self.running[0]
        result = _result("task", reward)
        self.live.add(result if outcome is None else replace(result, outcome=outcome))


def _line(state: State, stream: TextIO, clock: Callable[[], float]) -> str:
    return Progress(state.read, stream=stream, clock=clock).line(state.read())


def test_line_shows_only_known_values() -> None:
    clock, stream = Clock(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    state = State(4, "a", "a", "b", clock=clock)
    progress = Progress(state.read, stream=stream, clock=clock)
    assert progress.line(state.read()) == "0/4 done · 3 running · 0.0 s"
    clock.now += 6.0
    state.end(None)
    assert progress.line(state.read()) == "1/4 done · 2 running · ETA 18 s"
    state.live.held = Held(0.0, now=False, until=None, by="me", reason=None)
    assert progress.line(state.read()) == "1/4 done · 2 running · paused · 6.0 s"
    state.live.held = None
    state.scheduler.pause("engine", "The engine does not answer.")
    assert progress.line(state.read()) == "1/4 done · 2 running · paused (The engine does not answer) · 6.0 s"
    assert "paused: The engine does not answer." in state.read().lines()
    state.scheduler.resume("engine")
    state.end(1.0)
    state.end(0.5)
    assert progress.line(state.read()) == "3/4 done · reward 0.75 · ETA 2.0 s"
    state.live.add(_result("never started", 0.5))
    assert progress.line(state.read()) == "4/4 done · reward 0.67 · 6.0 s"


def test_cancelled_episode_is_not_done() -> None:
    clock = Clock()
    state = State(4, "a", "b", "c", clock=clock)
    state.end(1.0)
    state.end(None, Outcome.CANCELLED)
    assert _line(state, io.StringIO(), clock) == "1/4 done | 1 interrupted | 1 running | reward 1.00 | 0.0 s"


def test_job_prints_no_last_line() -> None:
    stream = Lines()
    with Progress(State(1).read, stream=stream, is_tty=False, interval_sec=60.0, is_kept=False):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("expected", "line"), [(2, "0/2 done | 3 done before | 0.0 s"), (0, "3 done before | 0.0 s")])
def test_attempts_of_earlier_sessions_are_counted_separately(expected: int, line: str) -> None:
    clock = Clock()
    state = State(expected, clock=clock)
    state.live.done_before = 3
    assert _line(state, io.StringIO(), clock) == line


def test_plain_lines_appear_at_intervals() -> None:
    stream, clock = Lines(), Clock()
    with Progress(State(2, "a", clock=clock).read, stream=stream, interval_sec=0.02, clock=clock):
        for _ in range(3):
            assert stream.written.acquire(timeout=60.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 4
    assert set(lines) == {"0/2 done | 1 running | 0.0 s"}


def test_thread_ends_with_the_context() -> None:
    with Progress(State(1).read, stream=io.StringIO()):
        pass
    assert "progress" not in _threads()


def test_closed_stream_does_not_end_the_run() -> None:
    stream = io.StringIO()
    stream.close()
    with Progress(State(1).read, stream=stream, is_tty=False, interval_sec=0.01):
        _wait_for(lambda: "progress" not in _threads())


class Terminal:
    """A pseudo-terminal: its stream, and the text written to it so far."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.stream: IO[str] = os.fdopen(slave, "w", encoding="utf-8")
        self._seen = b""

    def text(self) -> str:
        try:
            while data := os.read(self._master, 65536):
                self._seen += data
        except OSError:
            pass
        return self._seen.decode(errors="replace")

    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text())

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    opened = Terminal()
    yield opened
    opened.close()


def test_panel_shows_only_known_values() -> None:
    clock = Clock()
    state = State(4, clock=clock)
    live = state.live
    assert [*live.read().lines()] == []
    for task, waits_for, since, tokens in (("quick", "policy", 109.0, 100), ("slow", "environment", 100.0, 900)):
        usage = EpisodeUsage(num_steps=7, generated_tokens=tokens, cost=0.25)
        state.running.append(State.episode(task, waits_for=waits_for, since=since, started_at=since - 30, usage=usage))
    clock.now += 10.0
    assert [*live.read().lines()] == [
        "waiting for the policy: 1, for the environment: 1",
        "$0.5000; 1,000 tokens, 100/s",
        "slow (attempt 0): step 7, has waited 10 s for the environment, running for 40 s",
    ]
    state.running.clear()
    for reward in (1.0, 0.0, None):
        live.add(
            replace(_result("a", reward), error=ErrorInfo("Trouble", "it\x1b[2J broke") if reward is None else None)
        )
    live.add(EpisodeResult("id", "b", 0, 0, Outcome.CANCELLED, None, error=ErrorInfo("CancelledError", "x")))
    reward, error = live.read().lines()
    assert reward.startswith("reward 0.50 [")
    assert error == "error: Trouble (a): it\x1b[2J broke"


def test_terminal_shows_the_panel_below_the_bar(terminal: Terminal) -> None:
    state = State(2)
    state.running.append(State.episode("fix-tests", waits_for="policy"))
    with Progress(state.read, stream=terminal.stream):
        _wait_for(lambda: "waiting for the policy: 1" in terminal.plain())
        state.live.add(replace(_result("x", None), error=ErrorInfo("Trouble", "it\x1b[2J broke")))
        _wait_for(lambda: "error: Trouble (x): it\\x1b[2J broke" in terminal.plain())
        state.live.held = Held(0.0, now=False, until=None, by="me", reason="a reason")
        _wait_for(lambda: "1/2 done · 1 running · paused" in terminal.plain())
        _wait_for(lambda: "(by me: a reason)" in terminal.plain())
    assert "waiting" not in terminal.plain().splitlines()[-1]
    assert "1/2 done" in terminal.plain().splitlines()[-1]


@pytest.mark.parametrize("columns", [60, 80, 120, 180])
@pytest.mark.parametrize("running", [8, 40])
def test_bar_fits_line_before_names(columns: int, running: int) -> None:
    clock, stream = Clock(), io.StringIO()
    state = State(240, *(f"access-log-report-{number}" for number in range(running)), clock=clock)
    for _ in range(2):
        state.end(0.5)
    clock.now += 100.0
    state.running += [State.episode("slow-task " * 9, waits_for="policy", since=1.0, started_at=1.0)] * 3
    state.live.add(replace(_result("x", None), error=ErrorInfo("Trouble", "it broke " * 40)))
    console = Console(file=stream, width=columns)
    progress = Progress(state.read, stream=stream, clock=clock)
    clock.now += 50.0
    console.print(progress._bar(columns))
    first, *panel = stream.getvalue().splitlines()
    assert f"3/240 done | {running + 1} running | reward 0.50 | ETA 1 h 05 min" in progress.line(state.read())
    assert progress.line(state.read()) in first
    assert ("access-log-report-2" in first) == (columns >= 120)
    assert max(map(len, (first, *panel))) <= columns
    assert {word for line in panel for word in line.split() if "tas" in word} <= {"slow-task", "(attempt"}
    assert sum("it broke" in line for line in panel) == 2, "an error has two lines"


def test_log_lines_appear_above_the_bar(terminal: Terminal) -> None:
    handler = logging.StreamHandler(terminal.stream)
    logging.getLogger().addHandler(handler)
    try:
        with Progress(State(2).read, stream=terminal.stream):
            _wait_for(lambda: "0/2 done" in terminal.plain())
            logging.getLogger("x").warning("a limit is not enforced")
            _wait_for(lambda: "a limit is not enforced" in terminal.plain())
        assert handler.stream is terminal.stream
    finally:
        logging.getLogger().removeHandler(handler)
    lines = terminal.plain().replace("\r", "\n").splitlines()
    assert "a limit is not enforced" in lines, "the line must stand alone"


def test_redirected_output_remains_in_its_file(terminal: Terminal, capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(State(1).read, stream=terminal.stream):
        _wait_for(lambda: "0/1 done" in terminal.plain())
        print("to standard output")
        print("to standard error", file=sys.stderr)
    assert capfd.readouterr() == ("to standard output\n", "to standard error\n")


def test_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress(State(1).read, stream=terminal.stream, clock=Clock()):
        pass
    assert terminal.text() == "0/1 done · 0.0 s\r\n"


SCRIPT = """
import sys, time
from ares_exp.runs.control.status import Progress
from tests.unit.runs.control.test_status import State
with Progress(State(2).read):
    time.sleep(100)
"""


def test_ctrl_c_leaves_the_terminal_in_order(terminal: Terminal) -> None:
    command = [sys.executable, "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, stderr=terminal.stream, env=environment) as process:
        try:
            _wait_for(lambda: "0/2 done" in terminal.plain())
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60.0) != 0
        finally:
            process.kill()
    assert terminal.text().rfind(SHOW) > terminal.text().rfind(HIDE)
    assert "KeyboardInterrupt" in terminal.plain()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.666, "0.67"),
        (-1.5, "-1.50"),
        (0.00123, "0.0012"),
        (5.31e-07, "0.0000"),
        (123456.0, "1.23e+05"),
    ],
)
def test_numbers_are_formatted(value: float, text: str) -> None:
    assert format_number(value) == text
