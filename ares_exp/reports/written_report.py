"""The report as an HTML file, with the data of the runs and as many trajectories as fit into the maximum size."""

from __future__ import annotations

import getpass
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import UNFINISHED, EpisodeResult, RunSummary
from ares_exp.records.run_dir import atomic_file
from ares_exp.records.secrets import MASK
from ares_exp.records.statistics.run_statistics import THRESHOLD
from ares_exp.reports.episode_payload import episode_payload
from ares_exp.reports.page import pack, packed_block, page_foot, page_head
from ares_exp.reports.run_payload import ShownRun, payload_of
from ares_exp.trajectories.records import EpisodeTrajectory

KINDS = ("paths", "env")
LEAST_CHARS = 6
"""Minimum length of an environment variable's value that is masked. Shorter values may be ordinary words."""
_HOMES = re.compile(r"(/home/|/Users/)[^/\s\"'`:;,)]+")
_ASSIGNED = re.compile(r"^(\s*(?:export |declare -x )?[A-Z_][A-Z0-9_]{2,}=).+$", re.MULTILINE)
_ENV_KEYS = re.compile(r"(^|[._])(env|environ|environment|env_vars|env_file|hostname|argv|platform|pid)$")
"""Keys of the config and of `provenance.json` whose values could identify the machine."""


def redactor(kinds: Collection[str], places: Collection[Path] = ()) -> Callable[[Any], Any]:
    """Returns a function that copies a payload and hides private information in the copy.

    The kind `paths` replaces the user's home directory by `~`, the directories of the runs (`places`) by `RUN`, and the
    working directory by `.`. It also masks other users' home directories. The kind `env` masks the values of this
    process's environment variables, and values in lines such as `NAME=value`. It also masks the values of keys that
    could identify the machine.
    """
    steps: list[Callable[[str], str]] = []
    if "paths" in kinds:
        steps.append(_paths(places))
    if "env" in kinds:
        steps.append(_environment())
    if not steps:
        return lambda data: data

    def text(value: str) -> str:
        for step in steps:
            value = step(value)
        return value

    return lambda data: _walk(data, text, hide_keys="env" in kinds)


def _walk(data: Any, text: Callable[[str], str], *, hide_keys: bool) -> Any:
    if isinstance(data, str):
        return text(data)
    if isinstance(data, Mapping):
        return {
            text(str(key)): MASK
            if hide_keys and isinstance(value, str) and _ENV_KEYS.search(str(key))
            else _walk(value, text, hide_keys=hide_keys)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        if hide_keys and len(data) == 2 and isinstance(data[0], str) and _ENV_KEYS.search(data[0]):
            return [data[0], MASK]  # a key and value of the config or the provenance
        return [_walk(value, text, hide_keys=hide_keys) for value in data]
    return data


def _paths(places: Collection[Path]) -> Callable[[str], str]:
    named = {str(place.absolute()): "RUN" for place in places} | {str(place.resolve()): "RUN" for place in places}
    named |= {str(Path.cwd()): "."}
    home = str(Path.home())
    if home not in ("/", "/root"):  # these also occur in containers, and so in most conversations
        named[home] = "~"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    ordered = sorted((one for one in named.items() if len(one[0]) > 1), key=lambda one: -len(one[0]))

    def hidden(text: str) -> str:
        for path, name in ordered:
            text = text.replace(path, name)
        text = _HOMES.sub(lambda found: f"{found[1]}{MASK}", text)
        return re.sub(rf"\b{re.escape(user)}@", f"{MASK}@", text) if user not in ("", "root") else text

    return hidden


def _environment() -> Callable[[str], str]:
    values = sorted({value for value in os.environ.values() if len(value) >= LEAST_CHARS}, key=len, reverse=True)
    hostname = os.uname().nodename
    values += [hostname] if len(hostname) >= LEAST_CHARS else []

    def hidden(text: str) -> str:
        for value in values:
            text = text.replace(value, MASK)
        return _ASSIGNED.sub(lambda found: f"{found[1]}{MASK}", text)

    return hidden


WHICH = ("failed", "all", "none")


def in_order(summary: RunSummary, recorded: Collection[str], *, first_tasks: Collection[str] = ()) -> list[str]:
    """Returns the ids of a run's recorded episodes. The episodes that are most interesting to a reader come first.

    The order is: all episodes of `first_tasks`, errors and running episodes, failed attempts, one passed attempt of
    each flaky task, other passed attempts (the longest first), interrupted attempts, and episodes that were retried. In
    each group, the first attempts at the tasks come first.
    """
    final = summary.final
    passes = {(one.task_name, one.reward >= summary.threshold) for one in final if one.reward is not None}
    flaky = {task for task, passed in passes if (task, not passed) in passes}
    ranks: dict[str, tuple[int, int, int, str]] = {}
    shown_pass: set[str] = set()
    for result in sorted(final, key=lambda one: (one.attempt, one.task_name)):
        rank = _rank(result, summary.threshold)
        if rank == 3 and result.task_name in flaky - shown_pass:
            shown_pass.add(result.task_name)
            rank = 2
        later = -result.num_steps if rank == 3 else result.attempt
        ranks[result.episode_id] = (-1 if result.task_name in first_tasks else rank, rank, later, result.task_name)
    tries = {result.episode_id for result in summary.results}
    for episode_id in recorded:
        ranks.setdefault(episode_id, (5, 0, 0, "") if episode_id in tries else (0, 0, 0, ""))
    return sorted((one for one in ranks if one in recorded), key=lambda one: (ranks[one], one))


def _rank(result: EpisodeResult, threshold: float) -> int:
    if result.reward is None:
        return 4 if result.outcome in UNFINISHED else 0
    return 1 if result.reward < threshold else 3


@dataclass(frozen=True, slots=True)
class Subject:
    """The runs that a report shows.

    Attributes:
        path: Path of the run, the sweep, or the first of two compared runs.
        runs: The runs by display name.
        more: Other top-level keys of the payload: `pair` for a comparison of two runs, or `sweep` for a sweep.
        first_tasks: Tasks whose trajectories are added first, because the size of the file is limited.
    """

    path: Path
    runs: Mapping[str, ShownRun]
    more: Mapping[str, Any] = field(default_factory=dict)
    first_tasks: Sequence[str] = ()

    @classmethod
    def of_run(cls, path: Path) -> Self:
        """Creates the subject of a report about one run. Raises `ConfigError` if the path is not a run directory."""
        return cls(path, {str(path): ShownRun(path)})


MAX_BYTES = 25 * 10**6
BYTES_OF_A_ROW = 260
"""Estimated number of bytes that are added later to each episode's data, such as the name of its HTML block."""
MISSES = 20
"""Number of consecutive trajectories that do not fit into the file, after which no further trajectories are tried."""


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a written report in bytes, and the numbers of its episodes.

    `episodes` counts all episodes. `trajectories` counts those whose steps are in the file, and `left_out` those whose
    trajectories were recorded but not added.
    """

    size: int
    episodes: int
    trajectories: int
    left_out: int


def write_report(
    subject: Subject, out: Path, *, max_bytes: int = MAX_BYTES, which: str = "all", redact: Collection[str] = ()
) -> Written:
    """Writes a report to `out` atomically.

    Adds the trajectories that `which` selects (`failed`, `all` or `none`), up to a file size of `max_bytes`. `redact`
    contains the kinds of private information to hide (see `redactor`).

    Raises:
        ConfigError: A file of a run is invalid.
        OSError: The report cannot be written.
    """
    hide = redactor(redact, [run.path for run in subject.runs.values()])
    runs = [run.payload(name=name) for name, run in subject.runs.items()]
    payload = hide(payload_of(runs, **subject.more, redacted=list(redact)))
    head = page_head(str(hide(str(subject.path)))).encode()
    rows = sum(len(run["episodes"]) for run in runs)
    choice = _Choice(max_bytes - len(head) - len(page_foot(payload).encode()) - BYTES_OF_A_ROW * rows, hide)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out, sync=False) as file:
        file.write(head)
        for block in choice.blocks(subject, which):
            file.write(block.encode())
        for number, run in enumerate(payload["runs"]):
            run |= {"blocks": choice.names.get(number, {}), "left_out": hide(choice.left_out.get(number, []))}
        file.write(page_foot(payload).encode())
        size = file.tell()
    trajectories = sum(map(len, choice.names.values()))
    return Written(size, rows, trajectories, sum(map(len, choice.left_out.values())))


@dataclass(slots=True)
class _Choice:
    """Selects the trajectories that are added to the file. `left` is the number of bytes that remain for them.

    Attributes:
        names: Names of the added HTML blocks, by index of the run and by episode id.
        left_out: Episodes whose steps are not in the file, by index of the run. Each has its id, the reason, and the
            command that shows the episode.
    """

    left: int
    hide: Callable[[Any], Any]
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    left_out: dict[int, list[Mapping[str, str]]] = field(default_factory=dict)
    _misses: int = 0

    def blocks(self, subject: Subject, which: str) -> Iterator[str]:
        """Yields HTML blocks with trajectories, alternating between the runs so that each run has some in the file."""
        queues = [
            (number, run, self._wanted(number, run, which, subject.first_tasks))
            for number, run in enumerate(subject.runs.values())
        ]
        for place in range(max((len(ids) for _, _, ids in queues), default=0)):
            for number, run, ids in queues:
                if place < len(ids) and (block := self._block(number, run, ids[place])) is not None:
                    yield block

    def _wanted(self, number: int, run: ShownRun, which: str, first_tasks: Collection[str]) -> list[str]:
        summary, recorded = run.summary, run.stored.keys()
        ids = in_order(summary, recorded, first_tasks=first_tasks)
        wanted: set[str] = set() if which == "none" else set(recorded)
        if which == "failed":
            wanted -= {one.episode_id for one in summary.final if _rank(one, summary.threshold) == 3}
        for episode_id in ids:
            if episode_id not in wanted:
                self._leave_out(number, run, episode_id, f"not included (--episodes {which})")
        return [episode_id for episode_id in ids if episode_id in wanted]

    def _block(self, number: int, run: ShownRun, episode_id: str) -> str | None:
        if self._misses >= MISSES:
            self._leave_out(number, run, episode_id, "the file is full (--max-mb)")
            return None
        try:
            episode = run.episode(episode_id)
        except (TrajectoryFormatError, KeyError) as error:
            self._leave_out(number, run, episode_id, str(error))
            return None
        name = f"e{number}-{len(self.names.get(number, {}))}"
        block = packed_block(name, pack(self.hide(episode)))
        if len(block) > self.left:
            self._misses += 1
            self._leave_out(number, run, episode_id, "it does not fit (--max-mb)")
            return None
        self._misses = 0
        self.left -= len(block)
        self.names.setdefault(number, {})[episode_id] = name
        return block

    def _leave_out(self, number: int, run: ShownRun, episode_id: str, why: str) -> None:
        command = f"ares-exp show {shlex.quote(str(run.path / episode_id))}"
        self.left_out.setdefault(number, []).append({"id": episode_id, "why": why, "command": command})


BLOCK = "e0-0"


def episode_page(trajectory: EpisodeTrajectory) -> str:
    """Returns an HTML page that shows one episode."""
    row = {
        "episode_id": trajectory.episode_id,
        "task_name": trajectory.task_name,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.total_reward,
        "has_steps": True,
    }
    run = {
        "name": trajectory.task_name,
        "results": {"statistics": {"threshold": THRESHOLD}},
        "episodes": [row],
        "blocks": {trajectory.episode_id: BLOCK},
    }
    payload = payload_of([run], only=trajectory.episode_id)
    steps = packed_block(BLOCK, pack(episode_payload(trajectory)))
    return f"{page_head(trajectory.episode_id)}{steps}{page_foot(payload)}"
