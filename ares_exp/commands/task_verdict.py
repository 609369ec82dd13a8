"""The verdict on a task: whether its tests accept the solution and reject an agent that does nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ares_exp.commands.task_runs import NOTHING, SOLUTION, Candidate, CheckedRun
from ares_exp.errors import AresExpError
from ares_exp.llms.response import TextData
from ares_exp.policies.oracle import SOLVING
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_dir import RunDir, open_regular
from ares_exp.records.terminal_text import format_number
from ares_exp.tasks.verification.verification import TEST_OUTPUT
from ares_exp.trajectories.records import EpisodeTrajectory, deserialize_llm_request, deserialize_llm_response

TAIL_LINES = 15
TAIL_BYTES = 4096
SHOWN_OUTPUT = re.compile(r"<exit_code>(-?\d+)</exit_code>\s*<output>\n(.*)\n</output>\s*", re.DOTALL)
"""Pattern of the shell agent's message with the complete output of a command."""


class Fault(StrEnum):
    """The kind of a task's problem."""

    INVALID = "invalid"
    SOLUTION_FAILS = "solution_fails"
    FLAKY = "flaky"
    TESTS_DO_NOT_TEST = "tests_do_not_test"
    TESTS_FAIL = "tests_fail"
    AGENT_FAILS = "agent_fails"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a task.

    Attributes:
        fault: Kind of the problem.
        message: Description of the problem for people.
        outputs: Ends of the printed outputs, by heading; an empty text if the heading reports that nothing was printed.
        files: Folder of the verifier's files; `None` if it does not exist.
        episode: Argument for `ares-exp show`; `None` if the task was not run.
    """

    fault: Fault
    message: str
    outputs: Mapping[str, str]
    files: Path | None = None
    episode: Path | None = None


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """The verdict on a task.

    Attributes:
        candidate: The task.
        solution: Rewards of the solution, one per attempt; `None` for an attempt without a reward.
        nothing: Rewards of an agent that does nothing, one per attempt; `None` for an attempt without a reward.
        problems: Problems of the task; empty if its tests accept the solution and reject the agent that does nothing.
    """

    candidate: Candidate
    solution: tuple[float | None, ...]
    nothing: tuple[float | None, ...]
    problems: tuple[Problem, ...]

    @property
    def is_good(self) -> bool:
        """Whether the task has no problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form, except for paths."""
        about = {"name": self.candidate.name, "path": self.candidate.path, "good": self.is_good}
        return {
            **about,
            "solution": self.solution,
            "nothing": self.nothing,
            "problems": list(map(asdict, self.problems)),
        }


def judge(candidate: Candidate, ran: Mapping[str, CheckedRun], *, threshold: float) -> TaskVerdict:
    """Returns the verdict on a task.

    Args:
        candidate: The task.
        ran: The two runs, by name; empty if the task cannot be run.
        threshold: Lowest reward with which an attempt passes.
    """
    if candidate.problem is not None:
        return TaskVerdict(candidate, (), (), (Problem(Fault.INVALID, candidate.problem, {}),))
    attempts = {name: ran[name].attempts.get(candidate.name, ()) for name in (SOLUTION, NOTHING)}
    rewards = {name: tuple(result.reward for result in attempts[name]) for name in attempts}
    problems = [
        _problem(*objection, result, RunDir(ran[name].path), of_solution=name == SOLUTION)
        for name, object_to in ((SOLUTION, _of_solution), (NOTHING, _of_nothing))
        for result in attempts[name]
        if (objection := _of_agent(result) or object_to(result.reward, rewards[name], threshold)) is not None
    ]
    return TaskVerdict(candidate, rewards[SOLUTION], rewards[NOTHING], tuple(_once(problems)))


def _of_agent(result: EpisodeResult) -> tuple[Fault, str] | None:
    """Returns the fault if the agent failed before the tests ran."""
    if result.reward is not None or result.outcome is not Outcome.AGENT_ERROR:
        return None
    said = "the agent failed, so the tests did not run (`task check` sends it one fenced bash block per response)"
    return Fault.AGENT_FAILS, said


def _of_solution(reward: float | None, rewards: Sequence[float | None], threshold: float) -> tuple[Fault, str] | None:
    """Returns the fault if the solution's attempt did not pass."""
    if reward is not None and reward >= threshold:
        return None
    needed = f"at least {format_number(threshold)} is required"
    has = "no reward" if reward is None else f"reward {format_number(reward)}, and {needed}"
    passed = sum(one is not None and one >= threshold for one in rewards)
    if passed:
        return Fault.FLAKY, f"the solution passes in {passed} of {len(rewards)} attempts; another attempt has {has}"
    return Fault.SOLUTION_FAILS, f"the solution has {has}"


def _of_nothing(reward: float | None, _: Sequence[float | None], threshold: float) -> tuple[Fault, str] | None:
    """Returns the fault if an agent that does nothing passed or has no reward."""
    if reward is None:
        return Fault.TESTS_FAIL, "the tests write no reward for an agent that does nothing (expected 0)"
    if reward >= threshold:
        had = f"an agent that does nothing has reward {format_number(reward)}"
        return Fault.TESTS_DO_NOT_TEST, f"{had}, so the tests do not check the work"
    return None


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Removes duplicate problems and keeps the first attempt with each problem."""
    return list({(problem.fault, problem.message): problem for problem in reversed(problems)}.values())[::-1]


def _problem(fault: Fault, message: str, result: EpisodeResult, run: RunDir, *, of_solution: bool) -> Problem:
    files = run.files / result.episode_id
    said = _of_solve_scripts(run, result) if of_solution else {}
    tests = {f"the tests printed ({path.relative_to(files)})": _tail(path) for path in sorted(files.rglob(TEST_OUTPUT))}
    return Problem(
        fault,
        f"{message}: {_why(result)}" if result.reward is None else message,
        said | {what: text for what, text in tests.items() if text},
        files=files if files.is_dir() else None,
        episode=run.path / result.episode_id,
    )


def _why(result: EpisodeResult) -> str:
    error = result.error
    return result.outcome.value if error is None else f"{error.type}: {' '.join(error.message.split())}"


def _of_solve_scripts(run: RunDir, result: EpisodeResult) -> dict[str, str]:
    """Returns the ends of the solution outputs that the agent got, one per stage; empty if they were not recorded."""
    try:
        episode = EpisodeTrajectory.load(run.trajectories / f"{result.episode_id}.json")
    except (OSError, AresExpError):
        return {}
    shown = [
        deserialize_llm_request(step.observation).messages[-1]["content"]
        for step in episode.steps
        if step.action is not None and step.observation is not None and _says(step.action, SOLVING)
    ]
    names = [stage.name for stage in result.stages] or [""]
    return dict(
        _printed(f"the solution of step {name}" if name else "the solution", str(text))
        for name, text in zip(names, shown, strict=False)  # a step without a response has no output
    )


def _printed(what: str, shown: str) -> tuple[str, str]:
    """Returns a heading for the output and the end of the output, without the frame that the shell agent adds."""
    found = SHOWN_OUTPUT.fullmatch(shown)
    text = _last_lines(shown if found is None else found[2])
    code = "" if found is None else f" (exit code {found[1]})"
    return f"{what} printed{'' if text else ' nothing'}{code}", text


def _says(action: Mapping[str, Any], text: str) -> bool:
    piece = deserialize_llm_response(action).data[0]
    return isinstance(piece, TextData) and text in piece.content


def _tail(path: Path) -> str:
    """Returns the end of a file that a container wrote."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return _last_lines(file.read(TAIL_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _last_lines(text: str) -> str:
    return "\n".join(text[-TAIL_BYTES:].rstrip().splitlines()[-TAIL_LINES:])
