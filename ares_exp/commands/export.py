"""The command `export`: writes the episodes of a run to a file or folder, in the format of another program."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import appearing, dump_json
from ares_exp.records.terminal_text import count_of, printable
from ares_exp.trajectories.collectors import SAFE_NAME
from ares_exp.trajectories.exports.parquet_export import PARQUET_SUFFIX, write_parquet
from ares_exp.trajectories.exports.preference_export import preference_rows
from ares_exp.trajectories.exports.sft_export import sft_rows
from ares_exp.trajectories.exports.training_conversations import ExportReport, left_out_sentences
from ares_exp.trajectories.files.episode_file import dump_episode
from ares_exp.trajectories.files.line_file import ZSTD, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory
from ares_exp.trajectories.stored_episodes import StoredEpisode, load

T = TypeVar("T")
Written = tuple[int, list[str]]
"""Result of an export: the number of written episodes, rows or trials, and sentences that are printed for the user."""

SUCCESS = 1.0
"""Default minimum reward of the episodes that are exported for supervised training (`--to sft`)."""
JSONL_SUFFIXES = (".jsonl", f".jsonl{ZSTD}")
CHOOSING = ("task", "outcome", "min_reward", "max_reward")
OF_ROWS = ("oracle", "tool_arguments", "reasoning")
OF_TOKENS = ("conversation", "realign_tokens", "temperature", "altered_sampling")


@dataclass(slots=True)
class ExportedEpisodes:
    """The episodes of `run` that match the filters. Can be iterated once, and keeps only one episode in memory.

    If a run was killed, its running episodes have the outcome `lost` and contain the steps that were recorded. If a
    file cannot be read, the error is added to `problems`, and the iteration continues.

    Attributes:
        run: A run directory, a folder of runs, or a file of episodes.
        tasks: Names of tasks, or patterns such as `fix-*`; empty for all tasks.
        outcomes: Names of outcomes; empty for all outcomes.
        min_reward, max_reward: Inclusive bounds on the total reward; `None` for no bound. With a bound, episodes
            without a reward are excluded.
        oracle: Whether episodes with responses of `policy=oracle` are included.
        count: Number of episodes yielded so far.
        left_out: Number of excluded episodes by reason, as in `{"episodes without a reward": 3}`.
        problems: One sentence for each unreadable file or record, with the file and the position.
    """

    run: Path
    tasks: Collection[str] = ()
    outcomes: Collection[str] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    oracle: bool = True
    count: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[EpisodeTrajectory]:
        """Yields the episodes in order of their start. Raises `TrajectoryFormatError` if `run` does not exist."""
        found = load(self.run, partial=True, skip_broken=True)
        self.problems += found.left_out
        seen: set[str] = set()
        for stored in found:
            reason = "with the id of an earlier episode" if stored.episode_id in seen else self._why_not(stored)
            seen.add(stored.episode_id)
            if reason is None:
                try:
                    episode = stored.load()
                except TrajectoryFormatError as error:
                    self.problems.append(str(error))
                    continue
                if self.oracle or not episode.is_of_oracle:
                    self.count += 1
                    yield episode
                    continue
                reason = "of the oracle (`--oracle` includes them)"
            self.left_out[f"episodes {reason}"] += 1

    def _why_not(self, episode: StoredEpisode) -> str | None:
        """Returns the reason for excluding an episode, such as "without a reward"; `None` if the filters match."""
        reward = episode.total_reward
        if self.tasks and not any(fnmatchcase(episode.task_name, task) for task in self.tasks):
            return "of other tasks"
        if episode.outcome is None:
            return "still running"
        if self.outcomes and episode.outcome not in self.outcomes:
            return f"with the outcome {episode.outcome}"
        if reward is None:
            return "without a reward" if (self.min_reward, self.max_reward) != (None, None) else None
        if self.min_reward is not None and reward < self.min_reward:
            return f"with a reward below {self.min_reward:g}"
        if self.max_reward is not None and reward > self.max_reward:
            return f"with a reward above {self.max_reward:g}"
        return None


@dataclass(frozen=True, slots=True)
class _Format:
    """An export format.

    Attributes:
        write: Function that writes the export.
        suffixes: Allowed suffixes of the output file; empty if the output is a folder.
        options: Names of the command's options that the format supports.
        about: Description of the format in the help.
    """

    write: Callable[[ExportedEpisodes, argparse.Namespace], Written]
    suffixes: tuple[str, ...]
    options: tuple[str, ...]
    about: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=run_path, metavar="RUN", help=f"a run directory, a folder of runs, or a file of episodes; {MEANING}"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the new file or folder; see the formats")
    parser.add_argument("--to", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--force", action="store_true", help="overwrite the file (not a folder)")
    chosen = parser.add_argument_group("which episodes (not for harbor)", "Only episodes that meet all conditions.")
    chosen.add_argument("--task", action="append", metavar="PATTERN", help="a task's name, or e.g. 'fix-*'; repeatable")
    chosen.add_argument("--outcome", action="append", choices=[*Outcome], metavar="OUTCOME",
                        help=f"{', '.join(Outcome)}; repeatable")  # fmt: skip
    chosen.add_argument("--min-reward", type=float, metavar="X", help="at least this total reward")
    chosen.add_argument("--max-reward", type=float, metavar="X", help="at most this total reward")
    rows = parser.add_argument_group("sft and preference")
    rows.add_argument("--oracle", action="store_true", help="include episodes of the oracle")
    rows.add_argument("--tool-arguments", choices=("text", "object"), help="form of the arguments of tool calls [text]")
    rows.add_argument("--reasoning", choices=("field", "think"),
                      help="keep reasoning: as `reasoning_content`, or in the text as <think>…</think>")  # fmt: skip
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--conversation", action="append", metavar="PATTERN",
                        help=f"conversations to train on: e.g. 'sub-*'; repeatable [{MAIN_CONVERSATION}]")  # fmt: skip
    tokens.add_argument("--realign-tokens", type=int, metavar="N",
                        help="sampled tokens per call to leave out, at most, to avoid a new row [0]")  # fmt: skip
    tokens.add_argument("--temperature", metavar="T", help="required sampling temperature, or `any` [1]")
    tokens.add_argument("--altered-sampling", action="store_true",
                        help="include responses sampled with a truncation, a penalty or a grammar")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    out, name = arguments.out, arguments.to
    _check(arguments)
    bounded = (arguments.min_reward, arguments.max_reward) != (None, None)
    episodes = ExportedEpisodes(
        arguments.run,
        arguments.task or (),
        arguments.outcome or (),
        SUCCESS if name == "sft" and not bounded else arguments.min_reward,
        arguments.max_reward,
        oracle=arguments.oracle or name not in ("sft", "preference"),
    )
    try:
        written, sentences = FORMATS[name].write(episodes, arguments)
    except OSError as error:
        what = f"{error.filename}: " if error.filename not in (None, str(out)) else ""
        raise UserError(f"Cannot write {out}: {what}{error.strerror or error}.") from error
    for problem in episodes.problems:
        sys.stderr.write(f"error: {printable(problem)}\n")
    counted, *more = [*sentences, *left_out_sentences(episodes.left_out)]
    if not written:
        raise UserError(" ".join([f"Nothing in {arguments.run} can be exported to {name}.", *more]))
    for sentence in (f"Wrote {out}.", counted, *more):
        sys.stdout.write(f"{printable(sentence)}\n")
    return exit_codes.INCOMPLETE if episodes.problems else exit_codes.COMPLETE


def _check(arguments: argparse.Namespace) -> None:
    """Checks that the options and the output path fit the format. Raises `UserError` if they do not."""
    out, name, suffixes = arguments.out, arguments.to, FORMATS[arguments.to].suffixes
    for option in ("force", *CHOOSING, *OF_ROWS, *OF_TOKENS):
        if getattr(arguments, option) not in (None, False) and option not in FORMATS[name].options:
            takers = [other for other, item in FORMATS.items() if option in item.options]
            raise UserError(
                f"`--{option.replace('_', '-')}` works only with `--to {', '.join(takers)}`, not with `--to {name}`."
            )
    if suffixes and not out.name.endswith(suffixes):
        raise UserError(
            f"Expected OUT to be a {name} file, with a name that ends in {' or '.join(suffixes)}, got {out}."
        )
    if out.exists() and not arguments.force:
        remedy = "Use `--force` to overwrite it." if suffixes else "Use another name, or remove it."
        raise UserError(f"{out} already exists. {remedy}")


def _write_jsonl(episodes: ExportedEpisodes, arguments: argparse.Namespace) -> Written:
    lines = (line for episode in episodes for line in dump_episode(episode, shared=True))
    _write_unless_empty(arguments.out, lines, write_lines)
    return _counted(episodes)


def _write_parquet(episodes: ExportedEpisodes, arguments: argparse.Namespace) -> Written:
    _write_unless_empty(arguments.out, episodes, write_parquet)
    return _counted(episodes)


def _write_atif(episodes: ExportedEpisodes, arguments: argparse.Namespace) -> Written:
    from ares_exp.trajectories.exports.atif_writer import (  # loads pydantic, which is slow
        ATIF_SUFFIX,
        write_atif,
    )

    changed: Counter[str] = Counter()

    def write(out: Path, found: Iterable[EpisodeTrajectory]) -> None:
        with appearing(out) as folder:
            for episode in found:
                changed.update(write_atif(folder / f"{_file_name(episode.episode_id)}{ATIF_SUFFIX}", episode))

    _write_unless_empty(arguments.out, episodes, write)
    count, sentences = _counted(episodes)
    return count, [*sentences, *(f"In {count_of(n, 'episode')}: {what}." for what, n in sorted(changed.items()))]


def _write_rows(
    make: Callable[..., tuple[Iterator[dict[str, Any]], ExportReport]],
    episodes: ExportedEpisodes,
    arguments: argparse.Namespace,
) -> Written:
    rows, report = make(episodes, tool_arguments=arguments.tool_arguments or "text", reasoning=arguments.reasoning)
    _write_unless_empty(arguments.out, (f"{dump_json(row)}\n" for row in rows), write_lines)
    return report.rows, report.sentences()


def _write_tokens(episodes: ExportedEpisodes, arguments: argparse.Namespace) -> Written:
    from ares_exp.training.recorded_sequences import RecordedSequences, write_sequences

    temperature = arguments.temperature or "1"
    try:
        expected = None if temperature == "any" else float(temperature)
    except ValueError:
        raise UserError(f"Expected `--temperature` to be a number or `any`, got {temperature!r}.") from None
    if (realign_tokens := arguments.realign_tokens or 0) < 0:
        raise UserError(f"Expected `--realign-tokens` to be at least 0, got {realign_tokens}.")
    recorded = RecordedSequences(
        arguments.run,
        conversations=arguments.conversation or [MAIN_CONVERSATION],
        realign_tokens=realign_tokens,
        temperature=expected,
        altered_sampling=arguments.altered_sampling,
    )
    reports = (report for episode in episodes if (report := recorded.add(episode)) is not None)
    _write_unless_empty(arguments.out, (row for report in reports for row in report.rows), write_sequences)
    return recorded.counts.rows, recorded.sentences()


def _write_harbor(episodes: ExportedEpisodes, arguments: argparse.Namespace) -> Written:
    from ares_exp.commands.harbor_export import write_job

    if not SAFE_NAME.fullmatch(arguments.out.name):
        raise UserError(
            f"Expected OUT to end with a job name of letters, digits and `._-`, got {arguments.out.name!r:.80}."
        )

    def readable() -> Iterator[EpisodeTrajectory]:
        try:
            yield from episodes
        except TrajectoryFormatError as error:  # the results can be exported without trajectories
            episodes.problems.append(str(error))

    stats = write_job(arguments.run, arguments.out, readable())
    if stats is None:
        return 0, ["0 trials.", "No attempt has a result yet."]
    trials, errors, unfinished = (stats[f"n_{name}_trials"] for name in ("completed", "errored", "pending"))
    sentences = [f"{count_of(trials, 'trial')}, {errors} of them with an error."]
    if unfinished:
        sentences.append(f"{count_of(unfinished, 'attempt')} without a result yet.")
    return trials, [*sentences, f"To open it: harbor view {arguments.out.parent}"]


def _counted(episodes: ExportedEpisodes) -> Written:
    return episodes.count, [f"{count_of(episodes.count, 'episode')}."]


def _write_unless_empty(out: Path, items: Iterable[T], write: Callable[[Path, Iterator[T]], object]) -> None:
    """Writes `items` to `out`, and creates the folder of `out`. Creates nothing if there are no items."""
    iterator = iter(items)
    for first in iterator:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, chain([first], iterator))


def _file_name(episode_id: str) -> str:
    """Returns an episode's id if it is a safe file name, otherwise (for example, for `../x`) a similar safe name."""
    if SAFE_NAME.fullmatch(episode_id):
        return episode_id
    like_it = re.sub(r"[^A-Za-z0-9_-]+", "_", episode_id)[:100]
    return f"{like_it}-{hashlib.sha256(episode_id.encode(errors='surrogatepass')).hexdigest()[:12]}"


FORMATS = {
    "jsonl": _Format(_write_jsonl, JSONL_SUFFIXES, ("force", *CHOOSING), "everything that was recorded"),
    "parquet": _Format(_write_parquet, (PARQUET_SUFFIX,), ("force", *CHOOSING), "a table with one row per step"),
    "atif": _Format(_write_atif, (), CHOOSING, "Agent Trajectory Interchange Format, one file per episode"),
    "sft": _Format(
        partial(_write_rows, sft_rows), JSONL_SUFFIXES, ("force", *CHOOSING, *OF_ROWS),
        "chat messages for supervised training",
    ),
    "preference": _Format(
        partial(_write_rows, preference_rows), JSONL_SUFFIXES, ("force", *CHOOSING, *OF_ROWS),
        "pairs of a better and a worse attempt",
    ),
    "tokens": _Format(
        _write_tokens, (*JSONL_SUFFIXES, PARQUET_SUFFIX), ("force", *CHOOSING, *OF_TOKENS),
        "sampled tokens for on-policy training",
    ),
    "harbor": _Format(_write_harbor, (), (), "a Harbor job, for `harbor view`"),
}  # fmt: skip


_LISTED = "".join(
    f"  {name:<11} {', '.join(one.suffixes) or 'a folder':<29} {one.about}\n" for name, one in FORMATS.items()
)
HELP = f"""\
Writes the episodes of RUN to OUT in another format. OUT is a new file whose name ends as listed, or a new folder:

{_LISTED}
Episodes of a killed run are included with their complete steps. `sft` includes only episodes with a reward of at
least {SUCCESS:g}, unless you set other bounds. `tokens` requires a policy that records token ids and log-probabilities.
[arguments]
Examples:
  %(prog)s outputs/first episodes.parquet --to parquet
  %(prog)s outputs/first good.jsonl --to sft --min-reward 0.5
  %(prog)s outputs/first rows.parquet --to tokens --conversation main --conversation 'sub-*'
  %(prog)s outputs/first jobs/first --to harbor

Exit codes: 0 all episodes were read; 1 some could not be read (the others are written); 2 the command line
is wrong, or there is nothing to write.
"""
