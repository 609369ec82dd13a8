"""The command `show`: shows a recorded episode, or lists the episodes of a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.errors import UserError
from ares_exp.records.latest_run import run_path
from ares_exp.records.recorded_results import added_rewards, with_added
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import RUN_FOLDERS, RunDir
from ares_exp.records.terminal_text import count_of, make_console, one_line, print_table, printable
from ares_exp.trajectories.episode_printer import EpisodePrinter, moment, number, seconds
from ares_exp.trajectories.stored_episodes import HELP as HELP_OF_PATH
from ares_exp.trajectories.stored_episodes import StoredEpisode, StoredEpisodes, chosen_episodes, path_of_one

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_PROBLEMS = 5
SUCCESS = 1.0
"""Minimum reward of a successful episode. Episodes with a lower reward count as failures."""
CAUSE_CHARS = 80
VERIFIER_OUTPUT = "verifier/test-stdout.txt"
LEFT_OUT_WHERE_NARROW = ("started", "task", "seconds", "steps")
"""Columns to drop if the terminal is too narrow, in this order. Most episode ids also contain the task's name."""

HELP = """\
Prints an episode: for each step, the response of the policy, the commands that ran, and the text that was added to the
conversation (+) or removed from it (-), then the reward and the output of the verifier. The middle of long texts is
left out. If the path contains several episodes, the command lists them.
On a terminal, an episode is shown page by page with `less`, or with the program in PAGER (set PAGER= for no pager).
[arguments]
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first --failed --task 'fix-*'
  %(prog)s outputs/first/fix-bug__1 --fold
  %(prog)s outputs/first/3f2a --steps 5:8 --full
  %(prog)s outputs/first/trajectories/3f2a….json --step -1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("episode", type=run_path, metavar="EPISODE", help=HELP_OF_PATH)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="show only this step; the first is 0, the last is -1")
    which.add_argument(
        "--steps",
        type=_slice,
        metavar="A:B",
        help="show steps A up to, but not including, B (`--steps=-3:` shows the last three)",
    )
    parser.add_argument(
        "--fold", action="store_true", help="show one or two lines per step: the response and the commands"
    )
    parser.add_argument("--no-pager", action="store_true", help="do not use a pager")
    parser.add_argument("--full", action="store_true", help="show long texts completely")
    parser.add_argument("--list", action="store_true", help="list the episodes, even if there is only one")
    chosen = parser.add_argument_group("which episodes of a run", "Only episodes that meet all conditions.")
    chosen.add_argument("--failed", action="store_true", help=f"no reward, or a reward below {SUCCESS:g}; lists causes")
    chosen.add_argument("--outcome", action="append", choices=[*Outcome], metavar="OUTCOME",
                        help=f"{', '.join(Outcome)}; repeatable")  # fmt: skip
    chosen.add_argument("--task", action="append", metavar="PATTERN", help="a task's name, or e.g. 'fix-*'; repeatable")


def run(arguments: argparse.Namespace) -> None:
    found = chosen_episodes(arguments.episode)
    episodes = found.filter(outcome=arguments.outcome, where=lambda episode: _is_wanted(episode, arguments))
    has_steps = arguments.step is not None or arguments.steps is not None
    is_list = arguments.list or (arguments.failed and not (has_steps or arguments.fold or arguments.full))
    if len(episodes) == 1 and not is_list:
        _show(episodes[0], arguments)
    elif has_steps:
        example = f" Name one, such as {path_of_one(arguments.episode, episodes)}." if episodes else ""
        raise UserError(
            f"`--step` and `--steps` require one episode, but found {len(episodes)} in {arguments.episode}.{example}"
        )
    else:
        _list(episodes, count_of(len(found), "episode"), has_causes=arguments.failed)
    for problem in episodes.left_out[:SHOWN_PROBLEMS]:
        sys.stderr.write(f"left out: {printable(problem)}\n")
    if (more := len(episodes.left_out) - SHOWN_PROBLEMS) > 0:
        sys.stderr.write(f"left out: {more} more\n")


def _is_wanted(episode: StoredEpisode, arguments: argparse.Namespace) -> bool:
    if arguments.task and not any(fnmatchcase(episode.task_name, task) for task in arguments.task):
        return False
    reward = episode.total_reward
    return not arguments.failed or (episode.outcome is not None and (reward is None or reward < SUCCESS))


def _slice(text: str) -> slice:
    found = re.fullmatch(r"(-?\d*):(-?\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected A:B, such as 5:8, 5: or :8, got {text!r}")
    return slice(*(int(part) if part not in ("", "-") else None for part in found.groups()))


def _show(stored: StoredEpisode, arguments: argparse.Namespace) -> None:
    episode = stored.load()
    added = _added_rewards([stored]).get(stored.episode_id, {})
    episode = replace(episode, rewards=with_added(episode.rewards, added))
    positions = range(len(episode.steps))
    if arguments.step is not None:
        if not -len(positions) <= arguments.step < len(positions):
            raise UserError(
                f"The episode has no step {arguments.step}, because it has only {count_of(len(positions), 'step')}."
            )
        positions = positions[arguments.step :][:1]
    elif arguments.steps is not None:
        positions = positions[arguments.steps]
        if not positions:
            raise UserError(f"`--steps` selects no steps. The episode has the steps 0 to {len(episode.steps) - 1}.")
    with paged_console(is_wanted=not arguments.no_pager) as console:
        printer = EpisodePrinter(console, episode, full=arguments.full)
        printer.header(stored.path, stored.outcome)
        for position in positions:
            (printer.folded_step if arguments.fold else printer.step)(position)
        if positions[-1:] == range(len(episode.steps))[-1:]:
            printer.unfinished_step()
            if stored.outcome is not None:
                printer.result(_verifier_output(stored))


def _verifier_output(stored: StoredEpisode) -> dict[str, str]:
    """Returns the output of an episode's verifier: the text of each output file, by file name."""
    from ares_exp.reports.episode_payload import episode_files

    files = episode_files(_run_of(stored), stored.episode_id)
    return {one["name"]: one["text"] for one in files if one["name"].endswith(VERIFIER_OUTPUT) and one.get("text")}


def _run_of(stored: StoredEpisode) -> Path:
    return stored.path.parent.parent if stored.path.parent.name in RUN_FOLDERS else stored.path.parent


def _added_rewards(episodes: Iterable[StoredEpisode]) -> dict[str, dict[str, float]]:
    """Returns the rewards that `ares-exp score` added to the runs of these episodes, by episode id and reward name."""
    runs = dict.fromkeys(map(_run_of, episodes))
    return {episode_id: rewards for run in runs for episode_id, rewards in added_rewards(RunDir(run)).items()}


def _list(episodes: StoredEpisodes, found: str, *, has_causes: bool) -> None:
    console = make_console()
    if episodes:
        columns = list_columns(episodes)
        if has_causes:
            columns["cause"] = [one_line(_cause(episode), CAUSE_CHARS) for episode in episodes]
        print_table(console, columns, texts=_TEXTS, leave_out=LEFT_OUT_WHERE_NARROW)
    listed = count_of(len(episodes), "episode")
    console.print(listed if listed == found else f"{len(episodes)} of {found}")


def _cause(episode: StoredEpisode) -> str:
    """Returns a likely cause of a failed episode: its error, or the last line of the verifier's output."""
    if episode.error is not None:
        return f"{episode.error.type}: {episode.error.message}"
    lines = [line for text in _verifier_output(episode).values() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def list_columns(episodes: StoredEpisodes) -> dict[str, list[str]]:
    """Returns the columns of the table of episodes, by name. Rewards from `ares-exp score` are the last columns."""
    added = _added_rewards(episodes)
    columns = {name: [cell(episode) for episode in episodes] for name, cell in _CELLS.items()}
    for name in dict.fromkeys(name for one in episodes for name in added.get(one.episode_id, ())):
        columns[one_line(name)] = [number(added.get(one.episode_id, {}).get(name)) for one in episodes]
    return columns


_CELLS: Mapping[str, Callable[[StoredEpisode], str]] = {
    "episode": lambda episode: one_line(episode.episode_id),
    "task": lambda episode: one_line(episode.task_name),
    "outcome": lambda episode: episode.outcome or "running",
    "reward": lambda episode: number(episode.total_reward),
    "steps": lambda episode: str(episode.step_count),
    "seconds": lambda episode: seconds(episode.end_time - episode.start_time).removesuffix(" s"),
    "started": lambda episode: moment(episode.start_time),
}
_TEXTS = ("episode", "task", "outcome", "cause")


LESS = "-RFX"
"""Options of `less` if LESS is not set: show colours, exit if the text fits on the screen, and leave it visible."""


@contextlib.contextmanager
def paged_console(*, is_wanted: bool = True) -> Iterator[Console]:
    """Yields a console whose output the user can read page by page, with a pager such as `less`.

    If `is_wanted` is false, no pager exists, or stdin or stdout is not a terminal, the console writes to stdout. At the
    end, the function waits until the user has closed the pager. If the user closes the pager before the end of the
    output, the rest is discarded.
    """
    command = _pager() if is_wanted and sys.stdout.isatty() and sys.stdin.isatty() else None
    if command is None:
        yield make_console()
        return
    environment = {**os.environ, "LESS": os.environ.get("LESS", LESS)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, text=True, errors="backslashreplace"
    ) as pager:
        assert pager.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                yield make_console(pager.stdin)
        finally:
            with contextlib.suppress(BrokenPipeError):
                pager.stdin.close()
            while True:  # the pager handles Ctrl-C while it runs
                with contextlib.suppress(KeyboardInterrupt):
                    pager.wait()
                    break


def _pager() -> list[str] | None:
    """Returns the command in PAGER, by default `less`. Returns `None` if PAGER is empty or the program is missing."""
    try:
        words = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    return words if words and shutil.which(words[0]) is not None else None
