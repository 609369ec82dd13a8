"""The command line of `python -m ares_exp.ctl`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.terminal.run_command import EXIT_OK, run_module

PROGRAM = "python -m ares_exp.ctl"
EXIT_NOT_DONE = 1
WAIT_SEC = 15.0
DESCRIPTION = """\
Shows the state of a run or a sweep under way, and gives it orders, by files in its directory: from another
terminal, another machine with the same disk, or a script. Who may write in the directory may give orders.

  status               the state: what waits for what, what is spent
  pause                no new episode begins; those under way are played to their end
  pause --now          also holds requests to the policy; time limits of episodes stand still
  resume               the end of a pause
  stop                 as Ctrl-C once: episodes are ended as cancelled, `resume=` goes on with them
  set KEY=VALUE ...    changes concurrency, budget.*, retry.*, policy.max_concurrency, policy.max_retries,
                       stall_warn_sec or monitor_interval_sec, until this session ends
  cancel TASK|EPISODE  ends its episodes under way as cancelled, takes the rest off the queue; `resume=` plays it
  cancel … --verify    ends it and scores its container as it is
  retry TASK|EPISODE   plays attempts without a reward again, next, with their recorded answers
  snapshot EPISODE     takes a snapshot as soon as it waits for the policy
  branch EPISODE       takes a snapshot, and prints the command that branches off it (--go: runs it)

A sweep passes an order on to all its jobs, those that begin later included. Each order is noted in control.jsonl, with
who gave it, why, and its outcome.
"""
EPILOG = """\
Examples:
  %(prog)s latest status
  %(prog)s outputs/grid pause --for 10m --reason "the endpoint is rate-limited"
  %(prog)s latest status --json | jq .status.waiting
  %(prog)s latest set concurrency=32 budget.cost=20 --reason "more budget"
  %(prog)s latest branch fix-bug__0__1a2b3c4d --n 8

Exit codes: 0 done; 1 refused by the run, or not taken in time; 2 the command line is wrong, or nothing is under way.
"""

WITHOUT_WORDS = ("status", "pause", "resume", "stop")
OF_EPISODES = ("cancel", "retry", "snapshot", "branch")
ORDERS = (*WITHOUT_WORDS, "set", *OF_EPISODES)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")


def main(argv: Sequence[str], program: str = PROGRAM) -> int:
    """Runs the command line and returns its exit code."""
    return run_module(__name__, argv, program)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("path", type=run_path, metavar="RUN|SWEEP", help=f"a run directory or a sweep's; {MEANING}")
    parser.add_argument("order", choices=ORDERS, metavar="ORDER", help=", ".join(ORDERS))
    parser.add_argument("what", nargs="*", default=[], metavar="WHAT", help="KEY=VALUE, or a task or an episode")
    parser.add_argument("--now", action="store_true", help="pause: hold episodes under way, too, at their next request")
    parser.add_argument(
        "--for", dest="for_sec", type=_seconds, metavar="TIME", help="pause: resume by itself after 90s, 10m, 1h30m"
    )
    parser.add_argument("--verify", action="store_true", help="cancel: score its container as it is")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="branch: how many branches [1]")
    parser.add_argument("--go", action="store_true", help="branch: run the command that is printed")
    parser.add_argument("--reason", metavar="TEXT", help="why, for the record")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--wait", type=float, default=WAIT_SEC, metavar="SEC", help=f"how long to wait for the answer [{WAIT_SEC:g}]"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from ares_exp.ctl.targets import target_of

    words = _checked_words(arguments)
    target = target_of(arguments.path)
    if arguments.order == "status":
        return _print_status(target, as_json=arguments.json)
    if arguments.order == "branch":
        return _branch(target, words[0], arguments)
    return _give(target, _order(arguments.order, words, arguments), arguments)


def _checked_words(arguments: argparse.Namespace) -> Sequence[str]:
    """Returns the words behind the order.

    Raises:
        ConfigError: There are too many or too few.
    """
    from ares_exp.errors import ConfigError

    order, words = arguments.order, arguments.what
    if order in WITHOUT_WORDS and words:
        raise ConfigError(f"Expected nothing behind `{order}`, got {' '.join(words)!r:.100}.")
    if order in OF_EPISODES and len(words) != 1:
        raise ConfigError(f"Expected one task or episode behind `{order}`, got {len(words)}.")
    if order == "set" and not (words and all("=" in word for word in words)):
        raise ConfigError("Expected `set KEY=VALUE …`, such as `set concurrency=8`.")
    if arguments.n < 1 or ((arguments.go or arguments.n != 1) and order != "branch"):
        raise ConfigError("Expected `--n` of at least 1 and `--go` of `branch` alone.")
    return [*words]


def _order(verb: Any, words: Sequence[str], arguments: argparse.Namespace) -> Any:
    from ares_exp.control.orders import Order

    values = dict(_pair(word) for word in words) if verb == "set" else {}
    return Order.made(
        verb,
        reason=arguments.reason,
        now=arguments.now,
        for_sec=arguments.for_sec,
        verify=arguments.verify,
        what=words[0] if verb != "set" and words else None,
        values=values,
    )


def _pair(word: str) -> tuple[str, Any]:
    import yaml

    key, _, text = word.partition("=")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        return key, text


def _branch(target: Any, episode: str, arguments: argparse.Namespace) -> int:
    """Has a snapshot taken, and prints the command that branches off it, or runs it."""
    import os
    import shlex

    from ares_exp.control.orders import SNAPSHOT_TAKEN
    from ares_exp.ctl.giving import give_to_run, give_to_sweep
    from ares_exp.ctl.targets import SweepTarget

    order = _order("snapshot", [episode], arguments)
    if isinstance(target, SweepTarget):
        give_to_sweep(target, order, wait_sec=0.0)  # refuses: an episode is of one job
    answer = give_to_run(target, order, wait_sec=arguments.wait)
    before, _, after = SNAPSHOT_TAKEN.partition("{}")
    if answer.outcome != "done":
        sys.stdout.write(f"{answer.path}: {answer.outcome}. {answer.says}\n")
        return EXIT_NOT_DONE
    name = answer.says.removeprefix(before).removesuffix(after)
    words = [f"branch_from={target.path}/{name}", f"branches={arguments.n}"]
    sys.stdout.write(f"ares-exp {shlex.join(words)}\n")
    sys.stdout.flush()
    if arguments.go:  # in place of this process: Ctrl-C is the run's own
        os.execv(sys.executable, [sys.executable, "-m", "ares_exp", *words])
    return EXIT_OK


def _give(target: Any, order: Any, arguments: argparse.Namespace) -> int:
    from ares_exp.ctl.giving import give_to_run, give_to_sweep
    from ares_exp.ctl.targets import SweepTarget
    from ares_exp.terminal.terminal import one_line

    if isinstance(target, SweepTarget):
        answers = give_to_sweep(target, order, wait_sec=arguments.wait)
    else:
        answers = [give_to_run(target, order, wait_sec=arguments.wait)]
    if arguments.json:
        _print_json({"order": order.asked(), "answers": [vars_of(one) for one in answers]})
    elif not answers:
        sys.stdout.write("Given; no job is under way at this moment.\n")
    for one in answers if not arguments.json else ():
        sys.stdout.write(f"{one.path}: {one.outcome}. {one_line(one.says, 500)}\n")
    return EXIT_OK if all(one.outcome == "done" for one in answers) else EXIT_NOT_DONE


def vars_of(answer: Any) -> Mapping[str, str]:
    """Returns an answer, JSON-ready."""
    return {"path": str(answer.path), "outcome": answer.outcome, "says": answer.says}


def _print_status(target: Any, *, as_json: bool) -> int:
    from ares_exp.ctl import status_text
    from ares_exp.ctl.targets import FRESH_SEC, SweepTarget
    from ares_exp.terminal.terminal import count_of

    if not isinstance(target, SweepTarget):
        status = target.status(fresh_sec=FRESH_SEC if target.is_under_way else 0.0)
        if as_json:
            _print_json(status_text.as_json(target, status))
        else:
            sys.stdout.write("".join(f"{line}\n" for line in status_text.run_lines(target, status)))
        return EXIT_OK
    found = [(job, job.status()) for job in target.jobs]
    if as_json:
        _print_json({"path": str(target.path), "jobs": [status_text.as_json(*one) for one in found]})
        return EXIT_OK
    state = "under way" if target.is_under_way else "not under way"
    sys.stdout.write(f"{target.path}: {state}, {count_of(len(found), 'job')} begun\n")
    for job, status in found:
        sys.stdout.write("".join(f"  {line}\n" for line in status_text.run_lines(job, status, is_job=True)))
    return EXIT_OK


def _print_json(data: Mapping[str, Any]) -> None:
    from ares_exp.records.run_dir import dump_json

    sys.stdout.write(dump_json(data, indent=2) + "\n")


def _seconds(text: str) -> float:
    parts = _DURATION.findall(text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 1h30m, got {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
