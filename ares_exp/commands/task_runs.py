"""The two runs of a check: the tasks' own solutions, and an agent that does nothing. Each is a run like any other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ares_exp.commands.task_candidates import Candidate
from ares_exp.config.overrides import quoted
from ares_exp.errors import UserError
from ares_exp.records import exit_codes
from ares_exp.records.recorded_results import read_results
from ares_exp.records.results import EpisodeResult, final_results
from ares_exp.records.run_dir import RunDir, write_atomically
from ares_exp.records.terminal_text import count_of

TASK_LIST = "tasks.json"
DATASET = "checked"
SOLUTION, NOTHING = "solution", "nothing"
"""The names of the runs' directories."""
POLICIES = {SOLUTION: "oracle", NOTHING: "noop"}
TERMINATED = 143


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """A run that has ended.

    Attributes:
        path: Its directory.
        attempts: The attempts at each task, by name.
    """

    path: Path
    attempts: Mapping[str, Sequence[EpisodeResult]]

    @property
    def results(self) -> list[EpisodeResult]:
        """Every attempt."""
        return [result for attempts in self.attempts.values() for result in attempts]


def play_both(
    tasks: Sequence[Candidate], folder: Path, *, overrides: Sequence[str], flags: Sequence[str] = ()
) -> dict[str, PlayedRun]:
    """Plays the tasks' solutions, then an agent that does nothing.

    Args:
        tasks: The tasks; they can be played.
        folder: Where the runs are recorded, in `solution` and `nothing`.
        overrides: Of both runs.
        flags: Of both commands.

    Returns:
        The runs, by these names.

    Raises:
        UserError: A run was refused; the message is its own.
        KeyboardInterrupt: One was interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / TASK_LIST
    rows = [{"name": one.name, "path": str(one.path.resolve())} for one in tasks]
    row = {"name": DATASET, "version": "1", "description": "What ares-exp task check has run.", "tasks": rows}
    write_atomically(listed, json.dumps([row], indent=2))
    words = [*flags, "env=harbor", f"env.registry={quoted(str(listed))}", f"env.dataset={DATASET}"]
    words += [f"env.path={quoted(str(shared.resolve()))}" for shared in {one.shared for one in tasks} if shared]
    words += ["name=task-check", *overrides]
    words += [] if any(one.startswith("tracker=") for one in overrides) else ["tracker=none"]
    played: dict[str, PlayedRun] = {}
    try:
        for name, what in ((SOLUTION, "the solutions of"), (NOTHING, "an agent that does nothing, on")):
            _tell(f"Playing {what} {count_of(len(tasks), 'task')}")
            run = folder / name
            _play([*words, f"policy={POLICIES[name]}", f"hydra.run.dir={quoted(str(run))}"])
            played[name] = PlayedRun(run, _attempts(run))
    except BaseException:
        if not (folder / SOLUTION).exists():  # refused, or interrupted before it started
            listed.unlink()
            with suppress(OSError):  # somebody else's folder
                folder.rmdir()
        raise
    return played


def _play(words: Sequence[str]) -> None:
    """Runs `python -m ares_exp`; passes on what it says, but for why it fails."""
    command = [sys.executable, "-m", "ares_exp", *words]
    complaint: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        with _ended_with_us(process):
            for line in process.stderr:
                if complaint or line.startswith("error: "):
                    complaint.append(line)
                else:
                    _tell(line.rstrip("\n"))
            code = process.wait()
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code not in (exit_codes.COMPLETE, exit_codes.INCOMPLETE):
        said = "".join(complaint).removeprefix("error: ").strip()
        raise UserError(said or f"`{' '.join(command)}` ended with exit code {code}.")


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Has a run end when this process is to: Ctrl-C reaches both, SIGTERM only this one. Waits for its end."""

    def end(*_: object) -> None:
        process.terminate()
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        process.communicate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempts(run: Path) -> dict[str, list[EpisodeResult]]:
    results = sorted(
        final_results(read_results(RunDir(run).episodes).results), key=lambda result: (result.task_name, result.attempt)
    )
    return {name: list(attempts) for name, attempts in groupby(results, key=lambda result: result.task_name)}


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
