"""The command `sequences`: rows of sampled tokens for trainers, of recorded episodes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ares_exp.environment import MAIN_LANE
from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.results import Outcome
from ares_exp.terminal.run_command import EXIT_OK
from ares_exp.terminal.terminal import printable
from ares_exp.training.recorded_sequences import RecordedSequences
from ares_exp.training.sequence_files import SUFFIXES, is_parquet, write_sequences
from ares_exp.training.sequences import TrainingSequence
from ares_exp.trajectories.exports.parquet_export import import_parquet
from ares_exp.trajectories.exports.training_conversations import EpisodeFilter

DESCRIPTION = f"""\
Writes the tokens that the policy of a run sampled as rows for on-policy training: ids, mask, log-probabilities, reward,
lane, task, attempt, version of the weights. A token with mask 1 was sampled by the engine, with that log-probability,
after exactly the tokens before it in its row; nothing is tokenised here. The policy must have recorded ids and
log-probabilities. OUT ends with {", ".join(SUFFIXES)}; `datasets` opens it.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first rows.parquet
  %(prog)s outputs/first rows.jsonl --lane main --lane 'sub-*' --min-reward 0.5

Exit codes: 0 written; 2 the command line is wrong, a file is broken, or no episode can be trained on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("run", type=run_path, metavar="RUN", help=f"a run directory, or a folder of runs; {MEANING}")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.add_argument("--lane", action="append", metavar="PATTERN",
                        help=f"lanes to train on: names, or e.g. 'sub-*', '*' for all [{MAIN_LANE}]")  # fmt: skip
    parser.add_argument("--realign-tokens", type=int, default=0, metavar="N",
                        help="sampled tokens at a call's end that may go untrained to avoid a fork [0]")  # fmt: skip
    parser.add_argument("--temperature", default="1", metavar="T",
                        help="at which answers must have been sampled; any for any [1]")  # fmt: skip
    parser.add_argument("--altered-sampling", action="store_true",
                        help="also answers whose sampling a truncation, a penalty or a grammar changed")  # fmt: skip
    chosen = parser.add_argument_group("which episodes", "All must hold; an option given again adds to itself.")
    chosen.add_argument("--task", action="append", metavar="PATTERN", help="a task's name, or e.g. 'fix-*'")
    chosen.add_argument("--outcome", action="append", choices=[*Outcome], metavar="OUTCOME", help=", ".join(Outcome))
    chosen.add_argument("--min-reward", type=float, metavar="X", help="at least this total reward")
    chosen.add_argument("--max-reward", type=float, metavar="X", help="at most this total reward")


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, and prints a summary."""
    out: Path = arguments.out
    _check_out(out, force=arguments.force)
    if arguments.realign_tokens < 0:
        raise UserError(f"Expected `--realign-tokens` to be at least 0, got {arguments.realign_tokens}.")
    recorded = RecordedSequences(
        arguments.run,
        keep=EpisodeFilter(arguments.min_reward, arguments.max_reward, arguments.outcome, arguments.task),
        lanes=arguments.lane or [MAIN_LANE],
        realign_tokens=arguments.realign_tokens,
        temperature=_temperature(arguments.temperature),
        altered_sampling=arguments.altered_sampling,
    )
    rows = _rows(recorded)
    first = next(rows, None)
    if first is None:
        raise UserError(f"Nothing in {arguments.run} can be trained on. {' '.join(recorded.sentences()[1:])}".rstrip())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_sequences(out, chain([first], rows))
    except OSError as error:
        raise UserError(f"Cannot write {error.filename or out}: {error.strerror or error}.") from error
    for sentence in (f"Wrote {out}.", *recorded.sentences()):
        sys.stdout.write(f"{printable(sentence)}\n")
    return EXIT_OK


def _rows(recorded: RecordedSequences) -> Iterator[TrainingSequence]:
    for report in recorded.new():
        yield from report.rows


def _check_out(out: Path, *, force: bool) -> None:
    if not out.name.endswith(SUFFIXES):
        raise UserError(f"Expected the name of OUT to end with {' or '.join(SUFFIXES)}, got {out}.")
    if out.exists() and not force:
        raise UserError(f"Expected a new file, but {out} is there already. `--force` overwrites it.")
    if is_parquet(out):
        import_parquet()


def _temperature(text: str) -> float | None:
    if text == "any":
        return None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"Expected `--temperature` to be a number or `any`, got {text!r}.") from None
