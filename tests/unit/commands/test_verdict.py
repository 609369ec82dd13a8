"""What the verdict on a task says of the attempts at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ares_exp.commands.task import _rewards
from ares_exp.commands.task_runs import NOTHING, SOLUTION, Candidate, CheckedRun
from ares_exp.commands.task_verdict import Fault, TaskVerdict, _printed, judge
from ares_exp.records.results import EpisodeResult, ErrorInfo, Outcome

ERROR = ErrorInfo("AgentError", "ShellAgent failed: JSONDecodeError: Expecting value")


def ran(path: Path, *rewards: float | None, **fields: Any) -> CheckedRun:
    """A run whose attempts at the task have these rewards."""
    fields = {"outcome": Outcome.COMPLETED, **fields}
    return CheckedRun(
        path, {"t": [EpisodeResult(f"e{n}", "t", n, 0, reward=one, **fields) for n, one in enumerate(rewards)]}
    )


def verdict(solution: CheckedRun, nothing: CheckedRun) -> TaskVerdict:
    return judge(Candidate(Path("t")), {SOLUTION: solution, NOTHING: nothing}, threshold=1.0)


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [([], "-"), ([1.0, None], "1.00, -"), ([1.0] * 6, "1.00 x6"), ([1, 1, 0, 1], "1.00 x2, 0.00, 1.00")],
)
def test_equal_rewards_are_written_together(rewards: list[float | None], shown: str) -> None:
    assert _rewards(rewards) == shown


@pytest.mark.parametrize("reward", [0.0, None])
def test_a_solution_that_passes_only_some_attempts_is_flaky(tmp_path: Path, reward: float | None) -> None:
    [problem] = verdict(ran(tmp_path, reward, reward, 1.0, reward), ran(tmp_path, 0.0)).problems
    assert problem.fault is Fault.FLAKY
    assert problem.message.startswith("the solution passes in 1 of 4 attempts; another attempt has ")
    assert problem.episode == tmp_path / "e0"


def test_one_that_never_passes_is_not(tmp_path: Path) -> None:
    [problem] = verdict(ran(tmp_path, 0.0, 0.0), ran(tmp_path, 0.0)).problems
    assert (problem.fault, problem.message) == (
        Fault.SOLUTION_FAILS,
        "the solution has reward 0.00, and at least 1.00 is required",
    )


def test_an_error_of_the_agent_is_not_one_of_the_tests(tmp_path: Path) -> None:
    failed = ran(tmp_path, None, outcome=Outcome.AGENT_ERROR, error=ERROR)
    [problem] = verdict(failed, failed).problems
    assert problem.fault is Fault.AGENT_FAILS
    assert "the agent failed, so the tests did not run" in problem.message
    assert problem.message.endswith("AgentError: ShellAgent failed: JSONDecodeError: Expecting value")
    other = ran(tmp_path, None, outcome=Outcome.VERIFIER_ERROR, error=ERROR)
    assert [one.fault for one in verdict(other, other).problems] == [Fault.SOLUTION_FAILS, Fault.TESTS_FAIL]


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("<exit_code>0</exit_code>\n<output>\n\n</output>", ("it printed nothing (exit code 0)", "")),
        ("<exit_code>3</exit_code>\n<output>\na\nb\n\n</output>\n", ("it printed (exit code 3)", "a\nb")),
        ("another agent's words", ("it printed", "another agent's words")),
        ("", ("it printed nothing", "")),
    ],
)
def test_what_a_solution_printed_is_told_without_what_the_agent_puts_around_it(
    shown: str, said: tuple[str, str]
) -> None:
    assert _printed("it", shown) == said
