"""The command `ctl`: shows the state of a run or sweep in progress, and sends orders such as `pause` to it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ares_exp.config.overrides import value_of
from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.run_dir import STOP, SWEEP_RECORD, RunDir, append_lines, dump_json, is_run, read_tail
from ares_exp.records.terminal_text import count_of, format_duration, one_line
from ares_exp.runs.control.orders import VERBS, Order, watch, write_order
from ares_exp.runs.control.status import PLACES, RunStatus, read_status
from ares_exp.runs.sweeps.jobs import job_folders
from ares_exp.trajectories.files.line_file import has_writer

WAIT_SEC = 15.0
FRESH_SEC = 3.0
"""Maximum time in seconds that `status` waits for a new state, which a watched run writes every two seconds."""
POLL_SEC = 0.1
MAX_TAIL = 16 * 2**20
SHOWN = 20
HELP = """\
Shows the state of a run or sweep in progress, or controls it. The command uses files in the run directory, so it works
from another terminal, from a script, and from another machine with the same disk. Users with write access to the
directory can control the run.

  status               show the state: why episodes wait, and how much was spent
  pause                stop starting episodes; running episodes continue to their end
  pause --now          also hold requests to the policy; time limits of episodes are suspended
  resume               end a pause
  stop                 like pressing Ctrl-C once: cancel running episodes; `resume=` continues them
  set KEY=VALUE ...    change concurrency, budget.*, retry.*, policy.max_concurrency or policy.max_retries
                       until this session ends
  cancel TASK|EPISODE  cancel the episode, or all episodes of the task, also queued ones; `resume=` runs them

A sweep passes each command to all its jobs, including jobs that start later. control.jsonl records each command with
its author, reason and outcome.
[arguments]
Examples:
  %(prog)s latest status
  %(prog)s outputs/grid pause --for 10m --reason "the endpoint is rate-limited"
  %(prog)s latest status --json | jq .status.waiting
  %(prog)s latest set concurrency=32 budget.cost=20 --reason "more budget"

Exit codes: 0 done; 1 the run rejected the command or did not respond in time; 2 the command line is wrong, or the run
is not running.
"""
ORDERS = ("status", *VERBS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=run_path, metavar="RUN|SWEEP", help=f"a run directory or a sweep folder; {MEANING}"
    )
    parser.add_argument("order", choices=ORDERS, metavar="COMMAND", help=", ".join(ORDERS))
    parser.add_argument(
        "what", nargs="*", default=[], metavar="WHAT", help="KEY=VALUE for set; a task or an episode for cancel"
    )
    parser.add_argument("--now", action="store_true", help="pause: also hold running episodes at their next request")
    parser.add_argument(
        "--for",
        dest="for_sec",
        type=_seconds,
        metavar="TIME",
        help="pause: resume automatically after TIME, such as 90s, 10m or 1h30m",
    )
    parser.add_argument("--reason", metavar="TEXT", help="reason to record in control.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--wait", type=float, default=WAIT_SEC, metavar="SEC", help=f"seconds to wait for the outcome [{WAIT_SEC:g}]"
    )


def run(arguments: argparse.Namespace) -> int:
    path, is_sweep = arguments.path, (arguments.path / SWEEP_RECORD).is_file()
    if not is_sweep and not is_run(path):
        raise ConfigError(
            f"Expected the directory of a run, or the folder of a sweep, got {path}. If a new run in this "
            "directory is still checking its tasks, wait until it has started."
        )
    if arguments.order == "status":
        if arguments.what:
            raise ConfigError(f"Expected no words after `status`, got {' '.join(arguments.what)!r:.100}.")
        _print_status(path, is_sweep=is_sweep, as_json=arguments.json)
        return exit_codes.COMPLETE
    order = _order(arguments)
    outcomes = _give_to_sweep(path, order, arguments.wait) if is_sweep else [_give_to_run(path, order, arguments.wait)]
    if arguments.json:
        shown = [{**asdict(one), "path": str(one.path)} for one in outcomes]
        sys.stdout.write(dump_json({"order": order.to_dict(), "outcomes": shown}, indent=2) + "\n")
    else:
        sys.stdout.write("" if outcomes else "The command was sent to the sweep, but no job is running now.\n")
        sys.stdout.writelines(f"{one.path}: {one.outcome}. {one_line(one.says, 500)}\n" for one in outcomes)
    return exit_codes.COMPLETE if all(one.outcome == "done" for one in outcomes) else exit_codes.INCOMPLETE


def _order(arguments: argparse.Namespace) -> Order:
    """Creates an order to a run, such as `cancel TASK`, from the arguments. Raises `ConfigError` if it is invalid."""
    verb, words, more = arguments.order, arguments.what, dict[str, Any]()
    if verb == "cancel":
        if len(words) != 1:
            raise ConfigError(f"Expected one task or episode after `cancel`, got {len(words)}.")
        more = {"what": words[0]}
    elif verb == "set":
        if not words or not all("=" in word for word in words):
            raise ConfigError("Expected `set KEY=VALUE …`, such as `set concurrency=8`.")
        more = {"values": {key: value_of(text) for key, _, text in (word.partition("=") for word in words)}}
    elif words:
        raise ConfigError(f"Expected no words after `{verb}`, got {' '.join(words)!r:.100}.")
    return Order.new(verb, reason=arguments.reason, now=arguments.now, for_sec=arguments.for_sec, **more)


def _seconds(text: str) -> float:
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 1h30m, got {text!r}")
    return sum(float(number) * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit] for number, unit in parts)


def _state(path: Path) -> str:
    """Returns the state of a run: `running`, `finished`, `killed`, …, or `not started` if it has no record yet."""
    from ares_exp.reports.run_payload import ShownRun

    return ShownRun(path).state.name if is_run(path) else "not started"


def _sweep_is_running(sweep: Path) -> bool:
    """Returns whether the sweep is in progress: its command is running, or at least one of its jobs is."""
    return has_writer(sweep) or any(_state(job) == "running" for job in job_folders(sweep))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an order for the run at `path`.

    `outcome` is `done`, `refused`, `failed` or `not taken` (without a response of the run). `says` explains it.
    """

    path: Path
    outcome: str
    says: str


def _give_to_run(run: Path, order: Order, wait_sec: float) -> Outcome:
    """Sends an order to a run and waits for its outcome. Raises `ConfigError` if the run is not running."""
    if (state := _state(run)) != "running":
        remedy = f" Use `ares-exp resume={run}` with the new values." if order.verb == "set" else ""
        raise ConfigError(f"Expected a run in progress, but {run} is {state}.{remedy}")
    path = write_order(RunDir(run).control, order)
    outcome = _outcome(run, order, wait_sec, time.monotonic())
    if outcome.outcome == "not taken" and _state(run) != "running":
        path.unlink(missing_ok=True)
        return Outcome(run, "not taken", "The run ended before it received the command.")
    return outcome


def _give_to_sweep(sweep: Path, order: Order, wait_sec: float) -> list[Outcome]:
    """Sends an order to all jobs of a sweep, including later jobs. Returns the outcomes of the running jobs."""
    jobs = [job for job in job_folders(sweep) if _state(job) == "running"]
    if order.verb == "cancel":
        named = ", ".join(map(str, jobs)) or "none now"
        raise ConfigError(f"`cancel` requires one job, but {sweep} is a sweep. Running jobs: {named}.")
    if not _sweep_is_running(sweep):
        raise ConfigError(f"Expected a sweep in progress, but no process is running {sweep}.")
    folder = RunDir(sweep)
    if order.verb == "stop":
        (sweep / STOP).touch()  # has the effect of one Ctrl-C in each job
    else:
        write_order(folder.control, order)
    append_lines(folder.orders, order.settled("done", "Sent to all jobs of the sweep."))
    if order.verb == "stop":
        return [Outcome(job, "done", "The running episodes of this job are being cancelled.") for job in jobs]
    since = time.monotonic()
    return [_outcome(job, order, wait_sec, since) for job in jobs]


def _outcome(run: Path, order: Order, wait_sec: float, since: float) -> Outcome:
    """Waits for up to `wait_sec` after `since` until the run has recorded the order's outcome in `control.jsonl`."""
    while True:
        with suppress(OSError):
            for text in read_tail(RunDir(run).orders, MAX_TAIL).splitlines():
                with suppress(ValueError, RecursionError):  # a line that is not complete yet
                    line = json.loads(text) if order.id.encode() in text else None
                    if isinstance(line, dict) and line.get("id") == order.id:
                        return Outcome(run, str(line.get("outcome")), str(line.get("says")))
        if time.monotonic() > since + wait_sec:
            return Outcome(run, "not taken", f"The run did not respond within {wait_sec:.0f} s (see `--wait`).")
        time.sleep(POLL_SEC)


def _print_status(path: Path, *, is_sweep: bool, as_json: bool) -> None:
    data: Mapping[str, Any]
    if is_sweep:
        jobs = [(job, _state(job), read_status(RunDir(job).status)) for job in job_folders(path)]
        data = {"path": str(path), "jobs": [_as_json(*one) for one in jobs]}
        state = "running" if _sweep_is_running(path) else "not running"
        lines = [f"{path}: {state}, {count_of(len(jobs), 'job')} started"]
        lines += [f"  {next(_lines(*one))}" for one in jobs]
    else:
        state = _state(path)
        status = _fresh_status(path) if state == "running" else read_status(RunDir(path).status)
        data, lines = _as_json(path, state, status), [*_lines(path, state, status)]
    if as_json:
        lines = [dump_json(data, indent=2)]
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _fresh_status(run: Path) -> RunStatus | None:
    """Requests and returns a new status of a run. If none arrives within `FRESH_SEC`, returns the last one, if any."""
    folder, asked = RunDir(run), time.time()
    watch(folder.control)
    while True:
        status = read_status(folder.status)
        if (status is not None and status.written_at >= asked) or time.time() >= asked + FRESH_SEC:
            return status
        time.sleep(POLL_SEC)


def _as_json(run: Path, state: str, status: RunStatus | None) -> Mapping[str, Any]:
    return {"path": str(run), "state": state, "status": asdict(status) if status is not None else None}


def _lines(run: Path, state: str, status: RunStatus | None) -> Iterator[str]:
    """Yields the lines that the order `status` prints about a run. The first line is a summary."""
    if status is None or state != "running":
        yield f"{run}: {state}"
        return
    yield (
        f"{run}: {status.state}, {status.running} of at most {status.concurrency} episodes running, "
        f"{status.queued} queued, {status.ended} ended"
    )
    yield from (f"  {one_line(line, 200)}" for line in status.lines())
    for name, limit in status.budget.items():
        spent = f"{status.spent[name]:g} spent" if name in status.spent else "of all jobs together"
        yield f"  budget.{name}={limit:g}: {spent}"
    shown = sorted(status.episodes, key=lambda one: one.since)[:SHOWN]
    for one in shown:
        waited = format_duration(status.written_at - one.since)
        yield (
            f"  {one_line(one.episode_id)}  step {one.num_steps}, {f'{one.tokens:,} tokens, ' if one.tokens else ''}"
            f"{f'${one.cost:.4f}, ' if one.cost else ''}waits {PLACES[one.waits_for]} for {waited}"
        )
    if status.running > len(shown):
        yield f"  and {status.running - len(shown):,} more (--json lists them)"
    age = format_duration(time.time() - status.written_at)
    yield f"  written {age} ago by process {status.pid} on {one_line(status.hostname)}"
