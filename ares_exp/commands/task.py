"""`ares-exp check-task`: whether the tests of tasks tell their solutions from nothing."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path

from ares_exp.authoring.candidates import find_candidates, with_problems
from ares_exp.authoring.two_runs import NOTHING, SOLUTION, PlayedRun, play_both
from ares_exp.authoring.verdict import Problem, TaskVerdict, judge
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.schema import keys, validate
from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import CHECKS
from ares_exp.records.results import HOST_IMAGE
from ares_exp.records.run_dir import fresh_dir
from ares_exp.terminal import exit_codes
from ares_exp.terminal.table import make_table
from ares_exp.terminal.terminal import count_of, draw, format_number, one_line, printable, write

DESCRIPTION = """\
Plays each task twice, with its own solution and with an agent that does nothing, and says whether the tests tell them
apart: the solution has to pass, and nothing must not. Both are ordinary runs, recorded as such.
"""
EPILOG = """\
Examples:
  %(prog)s tasks/my-task
  %(prog)s tasks --container docker concurrency=4
  %(prog)s tasks/my-task attempts=5           tests that pass only sometimes
  %(prog)s tasks --json | jq '.tasks[] | select(.good | not) | .name'

Exit codes: 0 the tests of all tasks do; 1 those of some do not, or a task is invalid; 2 the command line is wrong, or
nothing can be played here; 130 interrupted.
"""
SCHEMA_VERSION = 1
OURS = ("policy", "tracker.path", "resume", "replay", "branch_from", "hydra.run.dir", "hydra.sweep.dir", "env", "name")
TASKS_OF_ENV = ("path", "registry", "dataset", "git_url", "git_commit", "repo", "tasks", "exclude", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command line takes."""
    parser.add_argument(
        "arguments", nargs="+", metavar="PATH", help="a task, or a folder of tasks; overrides (key=value) as for a run"
    )
    parser.add_argument("--container", metavar="NAME", help="where to play: local, docker, daytona (local)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where both runs go (outputs/check-task/<date>_<time>)")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="options of your own, as for a run")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Checks the tasks, prints the verdicts and returns the exit code."""
    paths, overrides = _taken_apart(arguments.arguments)
    if arguments.container is not None:
        overrides = [f"container={arguments.container}", *overrides]
    folders = [] if arguments.config_dir is None else [arguments.config_dir]
    config = compose_config(["env=harbor", "policy=oracle", "tracker=none", *overrides], config_dirs=folders)
    validate({item.name: config[item.name] for item in keys()})
    candidates = with_problems(find_candidates(paths), config)
    playable = [one for one in candidates if one.problem is None]
    played: dict[str, PlayedRun] = {}
    if playable:
        out = _place(arguments.out)
        flags = [f"--config-dir={folder}" for folder in folders]
        played = play_both(playable, out, overrides=overrides, flags=flags)
    verdicts = [judge(one, played, threshold=config.reward_threshold) for one in candidates]
    _print(verdicts, played, as_json=arguments.json)
    return exit_codes.COMPLETE if all(verdict.is_good for verdict in verdicts) else exit_codes.INCOMPLETE


def _taken_apart(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Takes paths and overrides apart; what is there is a path."""
    overrides = [one for one in arguments if "=" in one and not Path(one).exists()]
    paths = [Path(one) for one in arguments if one not in overrides]
    refused = (*OURS, *(f"env.{key}" for key in TASKS_OF_ENV))
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in refused or key.startswith("policy."):
            raise ConfigError(
                f"Expected no `{key}=`: the check says itself what is played, by whom, and where it is recorded. Name "
                "tasks by their paths, and the place with `--out`."
            )
    if not paths:
        raise ConfigError("Expected the path of a task, or of a folder of tasks: ares-exp check-task tasks/my-task.")
    return paths, overrides


def _place(out: Path | None) -> Path:
    if out is None:
        return Path(fresh_dir(str(CHECKS / f"{datetime.now():%Y-%m-%d_%H-%M-%S}")))
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"Expected `--out` to be a new or an empty folder, but {out} has files. Choose another one.")
    return out


def _print(verdicts: Sequence[TaskVerdict], played: dict[str, PlayedRun], *, as_json: bool) -> None:
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "good": all(verdict.is_good for verdict in verdicts),
            "runs": {name: str(run.path) for name, run in played.items()},
            "tasks": [verdict.to_dict() for verdict in verdicts],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    columns = {
        "task": [one_line(verdict.candidate.name) for verdict in verdicts],
        SOLUTION: [_rewards(verdict.solution) for verdict in verdicts],
        NOTHING: [_rewards(verdict.nothing) for verdict in verdicts],
        "verdict": [_word(verdict) for verdict in verdicts],
    }
    write(sys.stdout, draw(make_table(columns, texts=("task", "verdict")), sys.stdout))
    for verdict in verdicts:
        for problem in verdict.problems:
            write(sys.stdout, f"{_told(verdict, problem)}\n\n")
    good = sum(verdict.is_good for verdict in verdicts)
    write(sys.stdout, f"The tests of {good} of {count_of(len(verdicts), 'task')} tell the solution from nothing.\n")
    if any(result.container_image == HOST_IMAGE for run in played.values() for result in run.results):
        write(sys.stdout, "container=local: FROM means this host; --container docker plays the image.\n")
    if played:
        write(sys.stdout, f"Recorded in {played[SOLUTION].path} and {played[NOTHING].path}\n")


def _rewards(rewards: Sequence[float | None]) -> str:
    """Writes the rewards of the attempts, equal ones in a row together: `1.00 x4, 0.00 x2`."""
    shown = ["-" if reward is None else format_number(reward) for reward in rewards]
    together = [(one, len(list(same))) for one, same in groupby(shown)]
    return ", ".join(one if count == 1 else f"{one} x{count}" for one, count in together) or "-"


def _word(verdict: TaskVerdict) -> str:
    faults = dict.fromkeys(problem.fault.value.replace("_", " ") for problem in verdict.problems)
    return ", ".join(faults) or "good"


def _told(verdict: TaskVerdict, problem: Problem) -> str:
    """A paragraph on what is wrong with a task, what was printed, and where to look."""
    lines = [f"{verdict.candidate.name}: {problem.message.rstrip('.')}."]
    for what, text in problem.outputs.items():
        lines += [f"  {what}:", textwrap.indent(printable(text), "    | ", lambda _: True)] if text else [f"  {what}"]
    if problem.files is not None:
        lines.append(f"  files: {problem.files}")
    if problem.episode is not None:
        lines.append(f"  show:  ares-exp show {shlex.quote(str(problem.episode))}")
    return "\n".join(lines)
