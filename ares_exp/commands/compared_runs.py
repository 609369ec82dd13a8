"""The runs that the command `compare` compares, and the comparison of each pair of runs, with a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ares_exp.config.overrides import dotted_items
from ares_exp.errors import ConfigError
from ares_exp.records.recorded_results import last_attempts, object_or_empty, read_results
from ares_exp.records.run_dir import SWEEP_RECORD, RunDir
from ares_exp.records.statistics.comparison import Comparison, Obstacle, Remedy
from ares_exp.records.statistics.run_statistics import RunStatistics
from ares_exp.records.terminal_text import count_of, format_number, print_warning
from ares_exp.runs.resume.recorded_run import RecordedRun, is_recorded_run, recorded_config
from ares_exp.runs.resume.session import RESUME_KEYS
from ares_exp.tasks.task_files import changed_files, content_of

MOST_RUNS = 100
MOST_KEYS = 5_000
TARGET = "_target_"
OWN_PLACE = ("output_dir", "resume")
"""Last parts of config keys that are not compared, because they contain paths that differ in every run."""


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """One run to compare.

    Attributes:
        letter: Short name in the report: `A` for the first run.
        overrides: Recorded overrides by key; `None` if they were not recorded.
        config: Config values by dotted key; `None` if the config cannot be read.
        digests: Digests of the tasks, by task name, if they were recorded. Equal digests mean equal tasks.
        notes: Sentences about missing or ignored results, for the report.
        name: Display name: the overrides that differ from the other runs, or the path.
    """

    letter: str
    path: Path
    statistics: RunStatistics
    overrides: Mapping[str, str] | None
    config: Mapping[str, str] | None
    digests: Mapping[str, str]
    notes: tuple[str, ...] = ()
    name: str = field(default="")


def choose_runs(paths: Sequence[Path], *, threshold: float, level: float) -> list[ChosenRun]:
    """Reads the runs at the paths, each run once. The folder of a sweep selects its jobs that have finished episodes.

    Raises:
        ConfigError: A path is not a run or sweep, has no results, or cannot be read; or the number of runs is wrong.
    """
    places = list({place.resolve(): place for path in paths for place in _runs_in(path)}.values())
    if len(places) == 1 and len(paths) > 1:
        raise ConfigError(
            f"Expected different runs to compare, but all {len(paths)} paths name the same run: {places[0]}. Name "
            "at least two different runs."
        )
    if not 2 <= len(places) <= MOST_RUNS:
        raise ConfigError(
            f"Expected 2 to {MOST_RUNS} runs to compare, got {len(places)}. Name run directories, or the folder of a "
            "sweep in which at least two jobs have finished episodes."
        )
    runs = [
        _read(place, letter=_letters(number), threshold=threshold, level=level) for number, place in enumerate(places)
    ]
    differing = _differing([run.overrides for run in runs if run.overrides is not None])
    return [replace(run, name=_name(run, differing)) for run in runs]


def differing_config(runs: Sequence[ChosenRun]) -> dict[str, tuple[str | None, ...]]:
    """Returns the config keys that differ, with the value in each run (`None` if the run does not have the key).

    If the runs use different classes for a component, such as the agent, most arguments exist only in some runs. Such
    arguments are left out.
    """
    known = [run.config for run in runs if run.config is not None]
    keys = _differing(known)
    exchanged = tuple(key.removesuffix(TARGET) for key in keys if key.endswith(TARGET))
    told = [
        key
        for key in keys
        if key.endswith(TARGET) or not key.startswith(exchanged) or all(key in config for config in known)
    ]
    return {key: tuple((run.config or {}).get(key) for run in runs) for key in told}


def _runs_in(path: Path) -> list[Path]:
    try:
        if is_recorded_run(path):
            return [path]
        jobs = [job for job in path.iterdir() if is_recorded_run(job)] if path.is_dir() else []
        is_sweep = bool(jobs) and ((path / SWEEP_RECORD).is_file() or all(job.name.isdecimal() for job in jobs))
    except (OSError, ValueError) as error:  # the name is too long or contains a NUL
        raise ConfigError(f"Expected a run directory, got {str(path)!r:.200}: {error}") from None
    if not is_sweep:
        return [RecordedRun(path).path]  # raises an error that describes the path
    jobs.sort(key=lambda job: (int(job.name) if job.name.isdecimal() else 0, job.name))
    started = [job for job in jobs if RunDir(job).episodes.stat().st_size]
    if left_out := ", ".join(job.name for job in jobs if job not in started):
        print_warning(f"These jobs of {path} are left out, because none of their episodes has ended: {left_out}")
    return started


def _read(path: Path, *, letter: str, threshold: float, level: float) -> ChosenRun:
    place, notes = RunDir(path), []
    recorded = read_results(place.episodes)
    if not recorded.results:
        raise ConfigError(f"There are no results in {place.episodes}, because no episode of this run has ended.")
    if recorded.torn:
        notes.append("the last line of its episodes.jsonl is incomplete, and is ignored")
    planned = object_or_empty(place.summary).get("planned")
    if not isinstance(planned, int):
        notes.append("it has no summary: it is running, or was killed")
        planned = None
    statistics = RunStatistics.of(
        recorded.results, planned=planned or len(recorded.results), threshold=threshold, level=level
    )
    if planned is not None and statistics.attempts < planned:
        notes.append(f"only {statistics.attempts} of its {planned} attempts have ended")
    tasks = object_or_empty(place.provenance).get("tasks")
    digests = {name: one for name, one in tasks.items() if isinstance(one, str)} if isinstance(tasks, dict) else {}
    return ChosenRun(letter, path, statistics, _overrides(path), _config(path), digests, tuple(notes))


def _overrides(path: Path) -> dict[str, str] | None:
    try:
        lines = RecordedRun(path).overrides()
    except ConfigError:  # for example a merged run, which has no overrides
        return None
    overrides = (line.partition("=") for line in lines)
    return {key: value for key, _, value in overrides if key not in RESUME_KEYS}


def _config(path: Path) -> dict[str, str] | None:
    """Returns a run's config values by dotted key; `None` if the config cannot be read.

    A resume may change the number of attempts. The key `attempts` has the value of the last session.
    """
    try:
        config = recorded_config(path)
    except (OSError, ConfigError):
        return None
    if (attempts := last_attempts(RunDir(path))) is not None and "attempts" in config:
        config["attempts"] = attempts
    return {
        key: _shown(value)
        for key, value in islice(dotted_items(config), MOST_KEYS)
        if key.rpartition(".")[2] not in OWN_PLACE
    }


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{len(value)} entries" if any(isinstance(one, dict | list) for one in value) else str(value)
    return "null" if value is None else str(value)


def _differing(records: Sequence[Mapping[str, str]]) -> list[str]:
    keys = sorted({key for record in records for key in record})
    return [key for key in keys if len({record.get(key) for record in records}) > 1]


def _name(run: ChosenRun, differing: Sequence[str]) -> str:
    """Returns a run's name: its overrides for the keys in `differing`, such as `seed=1`, or `defaults` if it sets none.

    If its overrides were not recorded, or `differing` is empty, the name is the path.
    """
    if run.overrides is None or not differing:
        return str(run.path)
    return " ".join(f"{key}={run.overrides[key]}" for key in differing if key in run.overrides) or "defaults"


def _letters(number: int) -> str:
    """Converts a number to letters: A to Z, then AA, AB and so on."""
    first, last = divmod(number, len(ascii_uppercase))
    return (ascii_uppercase[first - 1] if first else "") + ascii_uppercase[last]


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """The comparison of run `b` with run `a`.

    `adjusted_p` is the p-value after correction for the number of compared pairs; `None` without common tasks.
    """

    a: ChosenRun
    b: ChosenRun
    comparison: Comparison
    adjusted_p: float | None

    @property
    def changed_tasks(self) -> tuple[str, ...]:
        """The compared tasks whose recorded digests differ between the two runs."""
        a, b = self.a.digests, self.b.digests
        known = [name for task in self.comparison.pairs if (name := task.a.task_name) in a and name in b]
        return tuple(
            name for name in known if content_of(a[name]) != content_of(b[name]) or changed_files(a[name], b[name])
        )

    @property
    def is_settled(self) -> bool:
        """Whether the runs differ significantly: the adjusted p-value is below the significance level."""
        return self.adjusted_p is not None and self.adjusted_p < self.comparison.alpha

    @property
    def verdict(self) -> str:
        """The result of the comparison in one sentence, such as `B is better than A (p = 0.012)`."""
        difference = self.comparison.errors_as_zero
        if difference is None or self.adjusted_p is None:
            return f"{self.a.letter} and {self.b.letter} have no task in common, so they cannot be compared."
        if not self.is_settled and self.comparison.is_too_few:
            tasks = count_of(len(self.comparison.pairs), "task")
            return (
                f"Not significant (p = {format_p(self.adjusted_p)}): with {tasks}, no p-value can be below "
                f"{self.comparison.alpha:g}, whatever the rewards are."
            )
        if not self.is_settled:
            return f"Not significant (p = {format_p(self.adjusted_p)}): chance can explain a difference of this size."
        better, worse = (self.b, self.a) if difference.value > 0 else (self.a, self.b)
        return f"{better.letter} is better than {worse.letter} (p = {format_p(self.adjusted_p)})."

    @property
    def advice(self) -> str | None:
        """Advice on how many attempts or tasks would give a significant result.

        `None` if the result is significant, or if no tasks were compared.
        """
        remedy = self.comparison.remedy
        return None if self.is_settled or remedy is None else _advice(remedy, self)


def _advice(remedy: Remedy, pair: ComparedPair) -> str:
    number = len(pair.comparison.pairs)
    these_tasks = "this task" if number == 1 else f"these {number} tasks"
    more_tasks = "more tasks" if remedy.tasks is None else f"about {remedy.tasks:,} similar tasks"
    detect = f"To detect a difference of this size (power {remedy.power:.0%})"
    if remedy.attempts is not None:
        also = f", or {more_tasks} with as many attempts as now" if remedy.tasks is not None else ""
        return f"{detect}, run {remedy.attempts:,} attempts at each of {these_tasks} in both runs{also}."
    match remedy.obstacle:
        case Obstacle.NO_DIFFERENCE:
            if remedy.detectable is None or pair.comparison.is_too_few:
                return "No difference was observed."
            least = f"a difference of {format_number(remedy.detectable)} or more (power {remedy.power:.0%})"
            return f"No difference was observed. {these_tasks.capitalize()} can detect {least}."
        case Obstacle.TOO_FEW_TASKS:
            enough = more_tasks if remedy.tasks is None else f"at least {remedy.tasks:,} tasks"
            return f"More attempts at {these_tasks} cannot make the difference significant. Compare {enough}."
        case Obstacle.SINGLE_ATTEMPTS:
            return (
                f"{detect}, compare {more_tasks}. To find out whether more attempts at {these_tasks} would also be "
                "enough, run at least two attempts at each task."
            )
        case _:
            return (
                f"More attempts at {these_tasks} cannot make the difference significant, because it varies too much "
                f"from task to task. {detect}, compare {more_tasks} with as many attempts as now."
            )


def format_p(p: float) -> str:
    """Formats a p-value with three decimals, or as `less than 0.001`."""
    return "less than 0.001" if p < 0.001 else f"{p:.3f}"


def compare_pairs(pairs: Sequence[tuple[ChosenRun, ChosenRun]], *, alpha: float) -> list[ComparedPair]:
    """Compares the runs of each pair, and corrects the p-values for the number of pairs with Holm's method (1979)."""
    comparisons = [Comparison.of(a.statistics, b.statistics, alpha=alpha, comparisons=len(pairs)) for a, b in pairs]
    found = {number: one.errors_as_zero.p for number, one in enumerate(comparisons) if one.errors_as_zero is not None}
    adjusted = adjust(found)
    return [
        ComparedPair(a, b, comparison, adjusted.get(number))
        for number, ((a, b), comparison) in enumerate(zip(pairs, comparisons, strict=True))
    ]


def adjust(p_values: dict[int, float]) -> dict[int, float]:
    """Corrects p-values for multiple comparisons with Holm's method. The keys are the numbers of the pairs."""
    adjusted, largest = {}, 0.0
    for rank, (number, p) in enumerate(sorted(p_values.items(), key=lambda one: one[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[number] = largest
    return adjusted


def pair_document(pair: ComparedPair) -> dict[str, object]:
    """Returns the JSON form of a comparison."""
    return {
        "a": pair.a.letter,
        "b": pair.b.letter,
        "changed_tasks": pair.changed_tasks,
        **pair.comparison.to_dict(),
        "adjusted_p": pair.adjusted_p,
        "verdict": pair.verdict,
        "advice": pair.advice,
    }
