"""A run that is killed at a chosen moment and resumed until it is complete, and the checks of its records."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp.trajectories import load
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.e2e.counting_endpoint import STAGE, CountingEndpoint
from tests.leaks import processes, wait_until
from tests.warm_start import WarmProcess

ATTEMPTS, CONCURRENCY = 2, 3
STATE_OF_START_UP = (
    ".hydra",
    "run.log",
    "episodes.jsonl",
    "config.yaml",
    "provenance.json",
    "sessions.jsonl",
    "responses",
)
"""What appears in the run directory, one after the other, before the first request."""

TASK = """
schema_version = "1.4"
artifacts = ["/work/state"]
[task]
name = "test/{name}"
[environment]
docker_image = "debian:bookworm-slim"
network_mode = "no-network"
"""
PLAIN, OWN_VERIFIER, TWO_STEPS = KINDS = (
    "",
    "[verifier]\nenvironment_mode = 'separate'\n",
    "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n",
)
"""What each of the tasks has in its `task.toml` besides."""
TEST = """#!/bin/sh
sum=$(cksum < /work/state | cut -d' ' -f1)
echo "0.$((sum % 900 + 100))" > /logs/verifier/reward.txt
"""
"""The reward shows the actions of the episode."""

ENDED = (-signal.SIGKILL, 130)
"""Exit codes of a process that was killed, or interrupted."""

Slot = tuple[str, int]


class Moment(NamedTuple):
    """When a process is killed: so many requests after its start, and so many seconds after that.

    Without a number of requests: when a file of the run exists. `None` for both: never.
    """

    requests: int | None = None
    file: str | None = None
    seconds: float = 0.0
    number: signal.Signals = signal.SIGKILL


def make_tasks(directory: Path, kinds: Sequence[str] = KINDS) -> None:
    for number, kind in enumerate(kinds):
        task = directory / "tasks" / f"task-{number}"
        for folder in ("environment", "tests"):
            (task / folder).mkdir(parents=True)
        (task / "task.toml").write_text(TASK.format(name=task.name) + kind)
        for stage, folder in enumerate(("steps/one", "steps/two") if "steps" in kind else (".",)):
            (task / folder).mkdir(parents=True, exist_ok=True)
            instruction = f"Do what task {number} asks, {STAGE.format(stage)}.\n"
            (task / folder / "instruction.md").write_text(instruction)
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
        (task / "tests" / "test.sh").write_text(TEST)


def make_run(directory: Path, endpoint: CountingEndpoint, *overrides: str, backend: str = "local") -> KilledRun:
    """Makes the tasks in a directory, and a run of them whose processes are forks."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tasks(directory)
    return KilledRun(directory, endpoint, backend, overrides, is_warm=True)


@dataclass
class KilledRun:
    """One run, whatever the number of its processes.

    Attributes:
        directory: Folder with the tasks; the run is in its `run`, and temporary files are in its `tmp`.
        endpoint: Answers.
        backend: `local` or `docker`.
        overrides: Overrides of its first command.
        is_warm: Whether its processes are forks, not new interpreters.
        patience_sec: How long a process may take that is not killed.
        kills: How many processes were killed, or interrupted.
        tries: Episodes that had a log of responses when a process was killed.
        rows: Whole rows, as the last process has left them.
        pids: Process numbers of all its processes.
    """

    directory: Path
    endpoint: CountingEndpoint
    backend: str = "local"
    overrides: Sequence[str] = ()
    is_warm: bool = False
    patience_sec: float = 100
    kills: int = 0
    tries: set[str] = field(default_factory=set)
    rows: list[bytes] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.directory / "tmp").mkdir(exist_ok=True)

    @property
    def path(self) -> Path:
        return self.directory / "run"

    def start(self, moment: Moment = Moment()) -> int:  # noqa: B008
        """Starts the run, kills it at that moment and returns the exit code."""
        return self.execute(
            moment,
            f"container={self.backend}",
            "env.path=tasks",
            f"attempts={ATTEMPTS}",
            f"concurrency={CONCURRENCY}",
            "tracker=none",
            "policy=openai",
            "policy.model=m",
            f"policy.base_url={self.endpoint.url}",
            "policy.api_key_env=null",
            "policy.seed=episode",
            "policy.prices={m:{input_per_million_usd:1000,output_per_million_usd:3000}}",
            "hydra.run.dir=run",
            *self.overrides,
        )

    def resume(self, moment: Moment = Moment(), *overrides: str) -> int:  # noqa: B008
        return self.execute(moment, "resume=run", *overrides)

    @property
    def said(self) -> str:
        return (self.directory / "said").read_text()

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "episodes.jsonl").read_text().splitlines()]

    @property
    def final(self) -> dict[Slot, dict[str, Any]]:
        """The row of the last try of every attempt."""
        return {slot(row): row for row in sorted(self.all_rows, key=lambda row: row["retry"])}

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())  # type: ignore[no-any-return]

    def trajectories(self) -> dict[str, EpisodeTrajectory]:
        return {one.episode_id: one for one in load(self.path).trajectories()}

    def left(self) -> list[str]:
        marks = [str(self.directory / "tmp"), *(f"ares_exp-box-{pid}-" for pid in self.pids)]
        lines = [words for _, _, _, words in processes()] + Path("/proc/self/mountinfo").read_text().splitlines()
        found = [line for line in lines if any(mark in line for mark in marks)]
        return found + (containers_of(*self.pids) if self.backend == "docker" else [])

    def execute(self, moment: Moment, *words: str, cwd: str = "") -> int:
        """Runs a command, kills it at that moment and returns the exit code."""
        self.rows = _whole_lines(self.path / "episodes.jsonl")
        asked = self.endpoint.asked.total()
        reached = self.endpoint.when(asked + moment.requests) if moment.requests is not None else None
        with (self.directory / "said").open("wb") as said:
            streams: dict[str, Any] = {
                "cwd": self.directory / cwd,
                "env": {**os.environ, "TMPDIR": str(self.directory / "tmp")},
                "stdout": said,
                "stderr": subprocess.STDOUT,
            }
            process = (
                WarmProcess(words, **streams)
                if self.is_warm
                else subprocess.Popen([sys.executable, "-m", "ares_exp", *words], start_new_session=True, **streams)
            )
        self.pids.append(process.pid)
        try:
            if reached is not None or moment.file is not None:
                there = (self.path / moment.file).exists if moment.file is not None else None
                while process.poll() is None and not (reached.wait(0.02) if reached is not None else there()):
                    time.sleep(0.0 if reached is not None else 0.001)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moment.seconds)
                if process.poll() is None:
                    os.killpg(process.pid, moment.number)
            code = process.wait(self.patience_sec)
        finally:
            process.kill()
            process.wait()
        if code in ENDED:
            self.kills += 1
            self.tries |= {path.stem for path in (self.path / "responses").glob("*.jsonl")}
        now = _whole_lines(self.path / "episodes.jsonl")
        assert now[: len(self.rows)] == self.rows, "a row has changed"
        self.rows = now
        return code


def slot(row: Mapping[str, Any]) -> Slot:
    return row["task_name"], row["attempt"]


def result(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What a row must say in whatever way the run came to its end."""
    names = ("outcome", "reward", "num_steps", "prompt_tokens", "generated_tokens", "stages")
    return *(row[name] for name in names), round(row["cost"], 9)


def content(episode: EpisodeTrajectory) -> list[object]:
    """What an episode was asked, answered and rewarded, without the clock."""
    steps = []
    for step in episode.steps:
        action = {name: value for name, value in (step.action or {}).items() if name != "latency_sec"}
        steps.append((step.step_type, step.observation, action, step.reward, step.discount))
    return [episode.outcome, episode.total_reward, *steps]


def check(run: KilledRun, whole: KilledRun, *, concurrency: int = CONCURRENCY) -> None:
    """Checks a run that was resumed to its end against a run that was not interrupted."""
    rows, final = run.all_rows, run.final
    assert {slot: result(row) for slot, row in final.items()} == {
        slot: result(row) for slot, row in whole.final.items()
    }
    assert len({row["episode_id"] for row in rows}) == len(rows)
    ended = Counter(slot(row) for row in rows if row["reward"] is not None)
    assert ended == Counter(final.keys()), "a finished attempt was run again"
    assert run.tries <= {row["episode_id"] for row in rows}, "a try has no row"
    check_asked(run, whole, concurrency=concurrency)
    if "collector=none" not in run.overrides:
        check_trajectories(run, whole)
    assert not (run.path / "responses").exists()
    assert list(run.path.rglob("*.tmp")) == []
    assert wait_until(lambda: not run.left()), run.left()


def check_asked(run: KilledRun, whole: KilledRun, *, concurrency: int = CONCURRENCY) -> None:
    """The paid turns: every turn once, except one lost call for each episode and kill."""
    asked, episodes = run.endpoint.asked, Counter()
    assert asked.keys() == whole.endpoint.asked.keys()
    for turn, times in asked.items():
        episodes[turn.seed] += times - 1
    assert max(episodes.values(), default=0) <= run.kills, episodes
    assert episodes.total() <= run.kills * concurrency
    summary = run.summary
    assert (summary["prompt_tokens"], summary["generated_tokens"]) == run.endpoint.tokens()
    assert round(summary["cost"], 9) == round(whole.summary["cost"], 9)
    assert summary["scored"] == summary["planned"] == whole.summary["planned"] > 0


def check_stopped(run: KilledRun, asked: int, cause: str) -> None:
    """Checks that a run whose disk failed reported once where and why it stopped, and left episodes for a resume.

    Args:
        run: The run.
        asked: Number of requests when the disk failed.
        cause: The error that the run reports.
    """
    assert asked <= run.endpoint.asked.total() <= asked + CONCURRENCY, "a request was sent after a failed write"
    warnings = [line for line in run.said.splitlines() if line.startswith(("warning:", "error:"))]
    warnings = [line for line in warnings if not line.startswith("warning: The artifact")]  # of an episode that ended
    assert len(warnings) == 1, run.said
    assert str(run.path) in warnings[0]
    assert cause in warnings[0]
    assert f"ares-exp resume={run.path}" in warnings[0]
    assert "Traceback" not in run.said
    assert "episodes finished" in run.said
    assert f"{len(KINDS) * ATTEMPTS} of {len(KINDS) * ATTEMPTS} episodes finished" not in run.said


def check_trajectories(run: KilledRun, whole: KilledRun) -> None:
    """All load, all have a row, and the final trajectories match the run that was not interrupted."""
    found, expected = run.trajectories(), whole.trajectories()
    assert found.keys() <= {row["episode_id"] for row in run.all_rows}
    for attempt, row in run.final.items():
        assert content(found[row["episode_id"]]) == content(expected[whole.final[attempt]["episode_id"]])


def records(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted((path / ".hydra").glob("*"))}


def moments(count: int, requests: int, rng: random.Random) -> list[Moment]:
    """Moments spread over a run with so many requests: before the first, between them, and after the last."""
    before, after = max(1, count // 6), max(1, count // 6)
    during = count - before - after
    chosen = [Moment(file=rng.choice(STATE_OF_START_UP), seconds=rng.uniform(0, 0.05)) for _ in range(before)]
    for number in range(during):
        at = 1 + (number + rng.random()) * (requests - 1) / during
        chosen.append(Moment(requests=int(at), seconds=rng.uniform(0, 0.06)))
    return [*chosen, *(Moment(requests=requests, seconds=rng.uniform(0, 0.4)) for _ in range(after))]


def kill_and_resume(run: KilledRun, whole: KilledRun, moment: Moment, rng: random.Random) -> str:
    """Kills the run, resumes it, sometimes kills it again in that, until it is complete. Says what happened."""
    code = run.start(moment)
    words = ["killed" if code in ENDED else f"ended with {code}"]
    started, kept = (run.path / "config.yaml").exists(), records(run.path)
    if not started:
        assert run.resume() == 2
        assert "nothing to resume" in run.said, run.said
        assert run.endpoint.asked.total() == 0
        return "killed before there was anything to resume"
    while True:
        again = Moment(requests=rng.randint(1, 8), seconds=rng.uniform(0, 0.05)) if rng.random() < 0.3 else Moment()
        code = run.resume(again)
        if code != -signal.SIGKILL:
            break
        words.append("killed")
    assert code == 0, run.said
    assert "Traceback" not in run.said
    assert records(run.path) == kept, "Hydra's records have changed"
    check(run, whole)
    lost = run.endpoint.asked.total() - len(run.endpoint.asked)
    resumed = sum(row["replayed"] is not None for row in run.all_rows)
    return f"{', '.join(words)}; {len(run.all_rows)} rows, {resumed} gone on with, {lost} calls lost"


def _whole_lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def containers_of(*pids: int) -> list[str]:
    import docker

    with contextlib.closing(docker.from_env()) as client:
        found: Iterator[Any] = (
            one for pid in pids for one in client.api.containers(all=True, filters={"label": f"ares_exp.pid={pid}"})
        )
        return [str(one["Names"]) for one in found]
