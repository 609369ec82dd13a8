"""The command `diff`: where two recorded episodes part.

What counts is what was said and done: requests, replies, commands with their exit codes, rewards, discounts, and how
the episode ended. Ids (of episodes and of tool calls), times, seconds, tokens, prices, log-probabilities, reasoning and
the model's name do not: two playings of the same thing have others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ares_exp.containers.activity import CommandRecord
from ares_exp.records.latest_run import run_path
from ares_exp.terminal.terminal import collapsed, count_of, make_console, one_line, printable
from ares_exp.trajectories.commands.chosen_episodes import HELP, chosen_episode
from ares_exp.trajectories.commands.episode_printer import (
    EpisodePrinter,
    is_text,
    is_thinking,
    number,
    piece_text,
    seconds,
)
from ares_exp.trajectories.commands.episode_totals import EpisodeTotals
from ares_exp.trajectories.commands.request_change import is_request
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord
from ares_exp.trajectories.request_diff import Difference, compared_messages, first_difference
from ares_exp.trajectories.stored_episodes import StoredEpisode

if TYPE_CHECKING:
    from rich.console import Console

MEASURED = frozenset(
    {
        "cost", "usage", "latency_sec", "model", "sampling", "policy_version", "logprobs", "prompt_token_ids",
        "completion_token_ids", "activations",
    }
)  # fmt: skip
"""What of a response does not count."""
MARK_CHARS = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place in which two episodes differ.

    Attributes:
        step: How many steps they have in common.
        difference: What is different in the next step, or in how they ended.
    """

    step: int
    difference: Difference


def find_divergence(old: EpisodeTrajectory, new: EpisodeTrajectory) -> Divergence | None:
    """Finds the first difference of two episodes; `None` if they are equal."""
    same_ids = _CallNames(), _CallNames()
    for step, (was, has) in enumerate(zip_longest(old.steps, new.steps)):
        if was is None or has is None:
            counts = (count_of(len(steps), "time step") for steps in (old.steps, new.steps))
            return Divergence(step, Difference("number of time steps", *counts))
        if (difference := _between(was, has, *same_ids)) is not None:
            return Divergence(step, difference)
    for name, tell in _ENDS.items():
        if tell(old) != tell(new):
            return Divergence(len(old.steps), Difference(name, str(tell(old)), str(tell(new))))
    return None


def step_marks(episode: EpisodeTrajectory) -> list[list[str]]:
    """Returns marks of what counts at each step: reply, commands, outcome, observation.

    Two marks are equal where `find_divergence` finds no difference between what they stand for, so that any two
    episodes can be aligned by their marks alone.
    """
    names, known = _CallNames(), _Marks()
    return [_marks_of(step, names, known) for step in episode.steps]


def _marks_of(step: StepRecord, names: _CallNames, known: _Marks) -> list[str]:
    reply = _mark(_said(names, step))
    commands = _mark([_command(command) for command in step.commands])
    outcome = _mark([step.step_type, step.reward, step.discount])
    observed = names.plain(step.observation)
    return [reply, commands, outcome, known.of_request(observed) if is_request(observed) else _mark(observed)]


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:MARK_CHARS]


class _Marks:
    """Marks of the requests of one episode: a message that is in many of them is read once."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[Any, str]] = {}

    def of_request(self, request: Mapping[str, Any]) -> str:
        """Returns the mark of a request whose messages come from one `_CallNames`."""
        rest = {name: value for name, value in request.items() if name not in ("messages", "origin")}
        return _mark([[self._of_message(message) for message in request["messages"]], rest])

    def _of_message(self, message: Any) -> str:
        if (found := self._messages.get(id(message))) is None:
            (counts,) = compared_messages({"messages": [message]})
            found = self._messages[id(message)] = message, _mark(counts)
        return found[1]


_ENDS: dict[str, Callable[[EpisodeTrajectory], Any]] = {
    "task": lambda episode: episode.task_name,
    "outcome": lambda episode: episode.outcome.value,
    "total reward": lambda episode: episode.total_reward,
    "error": lambda episode: episode.error and episode.error.type,
}


def _between(was: StepRecord, has: StepRecord, old_names: _CallNames, new_names: _CallNames) -> Difference | None:
    """Compares two steps in the order of events: reply, commands, outcome."""
    if (difference := _between_actions(_said(old_names, was), _said(new_names, has))) is not None:
        return difference
    for index, (ran, runs) in enumerate(zip_longest(was.commands, has.commands)):
        if (old := _command(ran)) != (new := _command(runs)):
            return Difference(f"command {index}", old, new)
    for name in ("step_type", "reward", "discount"):
        if (before := getattr(was, name)) != (now := getattr(has, name)):
            return Difference(name, str(before), str(now))
    observed, observes = old_names.plain(was.observation), new_names.plain(has.observation)
    if is_request(observed) and is_request(observes):
        return first_difference(observed, observes)
    return None if observed == observes else Difference("observation", _text(observed), _text(observes))


def _said(names: _CallNames, step: StepRecord) -> Any:
    """Returns the parts of a step's action that count."""
    if not step.action:
        return step.action
    said = {name: value for name, value in step.action.items() if name not in MEASURED}
    if isinstance(pieces := said.get("data"), tuple):
        said["data"] = tuple(piece for piece in pieces if not is_thinking(piece))
    return names.plain(said)


def _between_actions(was: Any, has: Any) -> Difference | None:
    if was == has:
        return None
    replies = _reply(was), _reply(has)
    if None in replies or replies[0] == replies[1]:
        return Difference("reply", _text(was), _text(has))
    return Difference("reply", *replies)


def _reply(action: Any) -> str | None:
    """Returns the text of an action that is nothing else."""
    pieces = action.get("data") if action else None
    if isinstance(pieces, tuple) and all(is_text(piece) for piece in pieces):
        return "".join(piece_text(piece) for piece in pieces)
    return None


def _command(command: CommandRecord | None) -> str | None:
    if command is None:
        return None
    ended = "timed out" if command.timed_out else f"exit {command.exit_code}"
    return f"{command.command}\n[{ended}]"


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, indent=2)


class _CallNames:
    """Names the tool calls of one episode by the order in which they appear, so that those of two can be compared."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._plain: dict[int, tuple[Any, Any]] = {}

    def plain(self, value: Any) -> Any:
        """Returns `value` with the names in place of the calls' ids."""
        if isinstance(value, tuple | list):
            return tuple([self.plain(item) for item in value])
        if not isinstance(value, Mapping):
            return value
        if (known := self._plain.get(id(value))) is None:  # the same message is in many requests
            known = self._plain[id(value)] = value, self._without_ids(value)
        return known[1]

    def _without_ids(self, value: Mapping[str, Any]) -> dict[str, Any]:
        is_call = isinstance(value.get("function"), Mapping) or value.keys() == {"id", "name", "arguments"}
        return {
            key: self._name(item)
            if isinstance(item, str) and (key == "tool_call_id" or (is_call and key == "id"))
            else self.plain(item)
            for key, item in value.items()
        }

    def _name(self, call_id: str) -> str:
        return self._names.setdefault(call_id, f"call {len(self._names)}")


EXIT_EQUAL, EXIT_DIFFERENT = 0, 1
CONTEXT_LINES = 3
HEAD, TAIL = 30, 10
STYLES = {"+": "green", "-": "red", "@": "cyan"}

DESCRIPTION = """\
Aligns two episodes at the first thing that was said or done differently, and shows it, how each went on, and what both
add up to. Ids, times, seconds, tokens, prices, reasoning and the model's name are no differences.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first/3f2a outputs/second/91bc
  %(prog)s a.json b.json --after 0

Exit codes: 0 equal; 1 different; 2 the command line is wrong, or an episode cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("old", type=run_path, metavar="A", help=HELP)
    parser.add_argument("new", type=run_path, metavar="B", help="likewise")
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
        _say(console, f"equal: all {count_of(len(old.steps), 'time step')}", "green")
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
    _say(
        console,
        f"{count_of(divergence.step, 'time step')} in common; then: {one_line(divergence.difference.where)}",
        "bold",
    )
    lines = collapsed("\n".join(_diff_lines(divergence.difference)), full=full, head=HEAD, tail=TAIL)
    for line in lines:
        _say(console, f"  {line}", STYLES.get(line[:1], ""))


def _diff_lines(difference: Difference) -> list[str]:
    """Returns both texts as a unified diff, without the lines that name files."""
    old, new = ((text or "").split("\n") if text is not None else [] for text in difference[1:])
    return [line.rstrip("\n") for line in unified_diff(old, new, n=CONTEXT_LINES, lineterm="")][2:]


def _print_continuation(
    console: Console, name: str, episode: EpisodeTrajectory, divergence: Divergence, arguments: argparse.Namespace
) -> None:
    left = range(divergence.step, len(episode.steps))
    if not left or not arguments.after:
        return
    _say(console, "")
    _say(console, f"{name} continues for {count_of(len(left), 'time step')}", "bold reverse")
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
        ("steps", str(episode.step_count)),
        ("commands", str(totals.commands)),
        ("prompt tokens", number(totals.prompt_tokens)),
        ("generated tokens", number(totals.generated_tokens)),
        ("cost, US dollars", number(totals.cost)),
        *((name, "–" if value is None else seconds(value).removesuffix(" s")) for name, value in times),
    ]


def _say(console: Console, line: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(line), style=style), soft_wrap=True)
