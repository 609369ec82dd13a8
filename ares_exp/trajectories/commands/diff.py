"""Tells where two recorded episodes part."""

from __future__ import annotations

import argparse
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.command_line.terminal import collapsed, make_console, one_line, printable
from ares_exp.trajectories.commands.chosen_episodes import HELP, chosen_episode
from ares_exp.trajectories.commands.divergence import Divergence, find_divergence
from ares_exp.trajectories.commands.episode_printer import EpisodePrinter, number, seconds
from ares_exp.trajectories.commands.episode_totals import EpisodeTotals
from ares_exp.trajectories.first_difference import Difference
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episode import StoredEpisode

if TYPE_CHECKING:
    from rich.console import Console

EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
CONTEXT_LINES = 3
HEAD, TAIL = 30, 10
STYLES = {"+": "green", "-": "red", "@": "cyan"}

DESCRIPTION = """\
Aligns two episodes at the first thing that was said or done differently, and shows it, how each went on, and what both
add up to. Ids, times, seconds, tokens, prices and the model's name are no differences.
"""
EPILOG = """\
Examples:
  python -m ares_exp.trajectories diff outputs/first/3f2a outputs/second/91bc
  python -m ares_exp.trajectories diff a.json b.json --after 0

Exit codes: 0 equal; 1 different; 2 the command line is wrong, or an episode cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("old", type=Path, metavar="A", help=HELP)
    parser.add_argument("new", type=Path, metavar="B", help="likewise")
    parser.add_argument(
        "--after", type=_count, default=2, metavar="N", help="how many steps of each to show from there on (2)"
    )
    parser.add_argument("--full", action="store_true", help="leave nothing out of long texts")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    stored = chosen_episode(arguments.old), chosen_episode(arguments.new)
    old, new = (one.load() for one in stored)
    console = make_console()
    for name, one in zip("AB", stored, strict=True):
        _say(console, f"{name}  {one_line(one.episode_id)}  {one_line(one.task_name)}  {one.path}", "bold")
    divergence = find_divergence(old, new)
    if divergence is None:
        _say(console, f"equal: all {len(old.steps)} steps", "green")
    else:
        _print_divergence(console, divergence, full=arguments.full)
        for name, episode in zip("AB", (old, new), strict=True):
            _print_continuation(console, name, episode, divergence, arguments)
    _print_totals(console, stored, (old, new))
    return EXIT_EQUAL if divergence is None else EXIT_DIFFERENT


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of steps, 0 or more, got {text!r}")
    return int(text)


def _print_divergence(console: Console, divergence: Divergence, *, full: bool) -> None:
    _say(console, f"{divergence.step} steps in common; then: {one_line(divergence.difference.where)}", "bold")
    lines = collapsed("\n".join(_diff_lines(divergence.difference)), full=full, head=HEAD, tail=TAIL)
    for line in lines:
        _say(console, f"  {line}", STYLES.get(line[:1], ""))


def _diff_lines(difference: Difference) -> list[str]:
    """Both texts as a unified diff, without the lines that name files."""
    old, new = ((text or "").split("\n") if text is not None else [] for text in difference[1:])
    return [line.rstrip("\n") for line in unified_diff(old, new, n=CONTEXT_LINES, lineterm="")][2:]


def _print_continuation(
    console: Console, name: str, episode: EpisodeTrajectory, divergence: Divergence, arguments: argparse.Namespace
) -> None:
    left = range(divergence.step, len(episode.steps))
    if not left or not arguments.after:
        return
    _say(console, "")
    _say(console, f"{name} goes on for {len(left)} steps", "bold reverse")
    printer = EpisodePrinter(console, episode, full=arguments.full)
    for position in left[: arguments.after]:
        printer.step(position)


def _print_totals(
    console: Console, stored: tuple[StoredEpisode, StoredEpisode], episodes: tuple[EpisodeTrajectory, EpisodeTrajectory]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("", "A", "B", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in zip(*(_totals(*one) for one in zip(stored, episodes, strict=True)), strict=True):
        name, was, has = row[0][0], row[0][1], row[1][1]
        table.add_row(name, Text(was), Text(has, style="" if was == has else "bold"))
    console.print(table)


def _totals(stored: StoredEpisode, episode: EpisodeTrajectory) -> list[tuple[str, str]]:
    totals = EpisodeTotals.of(episode)
    times = [("seconds", totals.duration_sec)]
    times += [(f"{name} seconds", getattr(totals, f"{name}_sec")) for name in ("policy", "environment", "container")]
    return [
        ("outcome", stored.outcome or "being played"),
        ("error", "–" if episode.error is None else one_line(episode.error.type)),
        ("reward", number(episode.total_reward)),
        ("steps", str(episode.num_steps)),
        ("commands", str(totals.commands)),
        ("prompt tokens", number(totals.prompt_tokens)),
        ("generated tokens", number(totals.generated_tokens)),
        ("cost, US dollars", number(totals.cost)),
        *((name, "–" if value is None else seconds(value).removesuffix(" s")) for name, value in times),
    ]


def _say(console: Console, line: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(line), style=style), soft_wrap=True)
