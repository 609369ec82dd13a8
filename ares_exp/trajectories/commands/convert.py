"""The command `convert`: recorded episodes in another format, or as rows for trainers."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import dump_json
from ares_exp.terminal.terminal import count_of
from ares_exp.trajectories.collectors.json_collector import SAFE_NAME
from ares_exp.trajectories.commands.selected_episodes import SUCCESS, SelectedEpisodes, Wanted
from ares_exp.trajectories.exports.parquet_export import import_parquet
from ares_exp.trajectories.exports.preference_export import preference_rows
from ares_exp.trajectories.exports.sft_export import sft_rows
from ares_exp.trajectories.files.formats import FORMATS, Dropped, suffix_of
from ares_exp.trajectories.files.line_file import ZSTD, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory

T = TypeVar("T")

EXIT_OK, EXIT_SOME_UNREADABLE = 0, 1

EXPORTS = ("sft", "preference")
EXPORT_SUFFIXES = (".jsonl", f".jsonl{ZSTD}")
OPTIONS_OF = {
    "failed": ("sft",),
    "oracle": EXPORTS,
    "columns": EXPORTS,
    "tool_arguments": EXPORTS,
    "reasoning": EXPORTS,
    "completion": ("preference",),
    "min_margin": ("preference",),
    "pairs_per_task": ("preference",),
}
"""Options that only some targets have."""

CHOOSING = ("failed", "oracle")
"""Those of them that choose episodes."""
DESCRIPTION = f"""\
IN is an episode file of any format, a folder of them, a run directory, or a folder of runs. OUT is a file, or a folder
that gets one file an episode. The formats:

{chr(10).join(f"  {item.name:<11} {item.about} ({', '.join(item.suffixes)})" for item in FORMATS.values())}
  {"sft":<11} chat messages for supervised training, a row a conversation ({", ".join(EXPORT_SUFFIXES)}); of the
              episodes of a model with a reward of 1 or more, if no other bounds are given
  {"preference":<11} pairs of a better and a worse attempt of a model at a task ({", ".join(EXPORT_SUFFIXES)})

json, jsonl and parquet hold everything, atif what other tools read; what it cannot hold is named. Runs are resumed,
replayed and shown from json and jsonl alone: convert makes those of the others.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first episodes.parquet
  %(prog)s outputs/first outputs/second folder --to json --zstd --outcome completed
  %(prog)s outputs/first good.jsonl --to sft

Exit codes: 0 all was read; 1 something could not be (the rest is written); 2 the command line is wrong, or nothing can
be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "inputs", nargs="+", type=run_path, metavar="IN", help=f"files, folders or run directories; {MEANING}"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a file, or a folder that gets one file an episode")
    parser.add_argument("--to", choices=(*FORMATS, *EXPORTS), help="by default what the name of OUT says")
    parser.add_argument("--zstd", action="store_true", help="compress files of JSON (parquet is compressed anyway)")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    chosen = parser.add_argument_group("which episodes", "All must hold; an option given again adds to itself.")
    chosen.add_argument("--task", action="append", default=[], metavar="PATTERN", help="a task's name, or e.g. 'fix-*'")
    chosen.add_argument("--outcome", action="append", default=[], choices=[*Outcome], metavar="OUTCOME",
                        help=", ".join(Outcome))  # fmt: skip
    chosen.add_argument("--min-reward", type=float, metavar="X", help="at least this total reward")
    chosen.add_argument("--max-reward", type=float, metavar="X", help="at most this total reward")
    rows = parser.add_argument_group("rows for trainers")
    rows.add_argument("--failed", action="store_true", help="sft: also episodes with a reward below 1")
    rows.add_argument("--oracle", action="store_true", help="sft, preference: also episodes of the oracle")
    rows.add_argument("--columns", action="store_true", help="also task, lane, episode_id and reward")
    rows.add_argument("--tool-arguments", choices=("text", "object"), help="form of tool calls' arguments [text]")
    rows.add_argument("--reasoning", choices=("field", "think"),
                      help="keep reasoning: as `reasoning_content`, or in the text as <think>…</think>")  # fmt: skip
    rows.add_argument("--completion", choices=("episode", "turn"),
                      help="preference: compare how episodes went on to their end, or one reply [episode]")  # fmt: skip
    rows.add_argument("--min-margin", type=float, metavar="X", help="preference: least difference of rewards [0]")
    rows.add_argument("--pairs-per-task", type=int, metavar="N", help="preference: at most so many [4]")


def run(arguments: argparse.Namespace) -> int:
    """Converts, and prints a summary."""
    target = _target(arguments)
    episodes = SelectedEpisodes(
        arguments.inputs, _wanted(target, arguments), lambda problem: _say(f"error: {problem}", sys.stderr)
    )
    try:
        if target.name in EXPORTS:
            said = _export(target, episodes, _export_options(arguments))
        else:
            said = _convert(target, episodes)
    except OSError as error:
        raise UserError(f"Cannot write {error.filename or target.path}: {error.strerror or error}.") from error
    if not episodes.read and not episodes.problems and not episodes.left_out:
        raise UserError(
            f"Expected episodes in {', '.join(map(str, arguments.inputs))}, found none. Name a run directory, or files"
            f" that end with one of {', '.join(suffix for item in FORMATS.values() for suffix in item.suffixes)}."
        )
    for sentence in (*said, *(f"Left out: {count} {reason}." for reason, count in sorted(episodes.left_out.items()))):
        _say(sentence, sys.stdout)
    return EXIT_SOME_UNREADABLE if episodes.problems else EXIT_OK


@dataclass(frozen=True, slots=True)
class _Target:
    """What is written where.

    Attributes:
        name: Of the format or export.
        path: The file, or the folder of one file an episode.
        suffix: Of the file, or of those in the folder.
        one_file: Whether `path` is a file.
    """

    name: str
    path: Path
    suffix: str
    one_file: bool


def _target(arguments: argparse.Namespace) -> _Target:
    """Checks the arguments and returns the target, before anything is read."""
    out, said = arguments.out, None if arguments.out.is_dir() else suffix_of(arguments.out)
    name = arguments.to or next((item.name for item in FORMATS.values() if said in item.suffixes), None)
    if name is None:
        raise UserError(f"Expected `--to FORMAT`, as the name {out} tells none of {', '.join((*FORMATS, *EXPORTS))}.")
    suffixes = EXPORT_SUFFIXES if name in EXPORTS else FORMATS[name].suffixes
    if said is not None and said not in suffixes:
        raise UserError(f"Expected the name of a file of {name} to end with {' or '.join(suffixes)}, got {out}.")
    if said is None and name in EXPORTS:
        raise UserError(f"Expected OUT to be a file that ends with {' or '.join(suffixes)}, got {out}.")
    suffix = said or suffixes[-1 if arguments.zstd else 0]
    if arguments.zstd and name != "parquet" and not suffix.endswith(ZSTD):
        raise UserError(
            f"Expected the name of a compressed file to end with {suffixes[-1]}, got {out}."
            if suffixes[-1].endswith(ZSTD)
            else f"Expected no `--zstd` with `--to {name}`: its files are not compressed."
        )
    for option, targets in OPTIONS_OF.items():
        if getattr(arguments, option) not in (None, False) and name not in targets:
            raise UserError(f"Expected `--{option.replace('_', '-')}` only with `--to {' or '.join(targets)}`.")
    _refuse_overwriting(out, suffix, one_file=said is not None, force=arguments.force)
    if name == "parquet":
        import_parquet()
    return _Target(name, out, suffix, said is not None)


def _refuse_overwriting(out: Path, suffix: str, *, one_file: bool, force: bool) -> None:
    if not one_file and out.exists() and not out.is_dir():
        raise UserError(f"Expected OUT to be a folder, or a file whose name tells its format; {out} is neither.")
    if force:
        return
    if one_file and out.exists():
        raise UserError(f"Expected a new file, but {out} is there already. `--force` overwrites it.")
    if not one_file and out.is_dir() and any(suffix_of(path) == suffix for path in out.iterdir()):
        raise UserError(f"Expected a folder without {suffix} files, but {out} has some. `--force` overwrites them.")


def _wanted(target: _Target, arguments: argparse.Namespace) -> Wanted:
    """Returns which episodes are meant: for training those of a model, and for supervised training its successes."""
    bounds = arguments.min_reward, arguments.max_reward
    return Wanted(
        arguments.task,
        arguments.outcome,
        *bounds,
        oracle=arguments.oracle or target.name not in EXPORTS,
        failed=arguments.failed or target.name != "sft",
    )


def _export_options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {option: getattr(arguments, option) for option in OPTIONS_OF if option not in CHOOSING}
    return {option: value for option, value in given.items() if value not in (None, False)}


def _export(target: _Target, episodes: SelectedEpisodes, options: dict[str, Any]) -> Iterator[str]:
    """Writes rows; returns what to say of it."""
    make_rows, taken = sft_rows if target.name == "sft" else preference_rows, Counter[str]()
    try:
        rows, report = make_rows(_counted(episodes, taken), **options)
    except ValueError as error:
        raise UserError(str(error)) from error
    if (lines := _unless_empty(f"{dump_json(row)}\n" for row in rows)) is not None:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(target.path, lines)
    return chain(
        [f"{_read(episodes)}, wrote {count_of(report.rows, 'row')} to {target.path} ({target.name})."],
        (f"Among them: {count_of(count, 'episode')} {what}." for what, count in sorted(taken.items())),
        report.sentences()[1:],
        _not_held("a trajectory", episodes.dropped),
    )


def _read(episodes: SelectedEpisodes) -> str:
    return f"Read {count_of(episodes.read, 'episode')}"


def _counted(episodes: Iterable[EpisodeTrajectory], kinds: Counter[str]) -> Iterator[EpisodeTrajectory]:
    """Yields the episodes; counts those that are no success of a model."""
    for episode in episodes:
        if episode.is_of_oracle:
            kinds["of the oracle"] += 1
        elif episode.total_reward is not None and episode.total_reward < SUCCESS:
            kinds[f"with a reward below {SUCCESS:g}"] += 1
        yield episode


def _convert(target: _Target, episodes: SelectedEpisodes) -> Iterator[str]:
    """Writes episodes; returns what to say of it."""
    write, dropped, written = FORMATS[target.name].write, Counter[str](), 0

    def counted() -> Iterator[EpisodeTrajectory]:
        nonlocal written
        for episode in episodes:
            written += 1
            yield episode

    if (chosen := _unless_empty(counted())) is not None:
        (target.path.parent if target.one_file else target.path).mkdir(parents=True, exist_ok=True)
        if target.one_file:
            dropped = write(target.path, chosen)
        else:
            for episode in chosen:
                dropped += write(target.path / f"{_file_name(episode.episode_id)}{target.suffix}", [episode])
    return chain(
        [f"{_read(episodes)}, wrote {written} to {target.path} ({target.name})."],
        _not_held("a trajectory", episodes.dropped),
        _not_held(target.name, dropped),
    )


def _unless_empty(items: Iterable[T]) -> Iterator[T] | None:
    """Returns `items`, or `None` if there are none: no file is made of nothing."""
    iterator = iter(items)
    for first in iterator:
        return chain([first], iterator)
    return None


def _not_held(holder: str, dropped: Dropped) -> Iterator[str]:
    for what, count in sorted(dropped.items()):
        yield f"Not held by {holder}, in {count_of(count, 'episode')}: {what.rstrip('.')}."


def _say(sentence: str, stream: TextIO) -> None:
    stream.write(f"{sentence}\n")


def _file_name(episode_id: str) -> str:
    """Returns the id, or a safe file name like it where a foreign id is none."""
    if SAFE_NAME.fullmatch(episode_id) and not episode_id.startswith("."):
        return episode_id
    like_it = re.sub(r"[^A-Za-z0-9_-]+", "_", episode_id)[:100]
    return f"{like_it}-{hashlib.sha256(episode_id.encode(errors='surrogatepass')).hexdigest()[:12]}"
