"""Budgets, which limit the time, tokens, cost and errors of a run or its sweep, and counters of these amounts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import Field

from ares_exp.errors import BudgetExhaustedError, ConfigError, ContextOverflowError, RefusalError, close_matches
from ares_exp.llms.response import LLMResponse
from ares_exp.records.recorded_results import is_countable, read_results
from ares_exp.records.results import EnvironmentUsage, EpisodeResult, Outcome
from ares_exp.records.run_dir import RunDir

if TYPE_CHECKING:
    from ares_exp.runs.components import Components, Settings
    from ares_exp.runs.resume.session import PreviousSessions
    from ares_exp.runs.running_episode import RunningEpisode

_STRICT = pydantic.ConfigDict(extra="forbid")
_NAMES = {"wall_sec": "seconds", "tokens": "tokens", "cost": "US dollars", "errors_in_a_row": "errors in a row"}
_FAULTS = (Outcome.CONTAINER_ERROR, Outcome.VERIFIER_ERROR, Outcome.POLICY_ERROR, Outcome.ERRORED)
_NO_FAULTS = (ContextOverflowError.__name__, RefusalError.__name__)
_SAYS_NOTHING = (Outcome.CANCELLED, Outcome.LOST, Outcome.ABANDONED, Outcome.CLOSED)

MAX_JOBS = 10_000
"""Maximum number of the sweep's other jobs that are counted."""

_PROCESS_BEGAN = time.time()


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)
class Limits:
    """Spending limits. `None` means that there is no limit.

    Attributes:
        wall_sec: Wall-clock seconds, summed over all sessions of a run. For a sweep, the sum over its jobs.
        tokens: Prompt and generated tokens of paid responses, for the policy and for environments.
        cost: Cost of paid responses in US dollars, for the policy and for environments.
        errors_in_a_row: Number of consecutive episodes without a reward because the container, the verifier or the
            policy failed. A reward, an agent error, a refusal or a context overflow resets the count, because these
            outcomes show that all three work. Cancelled and lost episodes do not count.
    """

    wall_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tokens: Annotated[int, Field(gt=0)] | None = None
    cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    errors_in_a_row: Annotated[int, Field(gt=0)] | None = None

    def reached(self, spent: Spent) -> tuple[str, float, float] | None:
        """Returns the first limit that `spent` has reached (its name, its value and the spent amount), if any."""
        for name in _NAMES:
            bound = getattr(self, name)
            if bound is not None and getattr(spent, name) >= bound:
                return name, bound, getattr(spent, name)
        return None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_STRICT)
class Budget(Limits):
    """The limits of a run, and the limits that all jobs of its sweep share.

    Attributes:
        sweep: Limits for the total of all jobs of the sweep.
    """

    sweep: Limits = Limits()

    def changed(self, values: Mapping[str, Any]) -> Budget:
        """Returns a copy of the budget with new values for some limits, by name, such as `cost` or `sweep.tokens`.

        Raises:
            ConfigError: No limit has this name.
            ValidationError: A value is invalid.
        """
        data = asdict(self)
        for name, value in values.items():
            group, _, shared = name.partition(".")
            place = data["sweep"] if group == "sweep" and shared else data
            if (shared or name) not in place or name == "sweep":
                raise ConfigError(f"There is no `budget.{name}`.{close_matches(name, data)}")
            place[shared or name] = value
        return pydantic.TypeAdapter(Budget).validate_python(data)


_UNLIMITED = Budget()


@dataclass(frozen=True, slots=True)
class Spent:
    """The amounts that a run or a sweep has spent. The fields have the same meaning as in `Limits`."""

    wall_sec: float = 0.0
    tokens: int = 0
    cost: float = 0.0
    errors_in_a_row: int = 0

    def __add__(self, other: Spent) -> Spent:
        """Adds the amounts. Leaves `errors_in_a_row` at 0, because the sum of two such counts has no meaning."""
        return Spent(self.wall_sec + other.wall_sec, self.tokens + other.tokens, self.cost + other.cost)


_NOTHING = Spent()


def paid(result: EpisodeResult) -> Spent:
    """Returns the tokens and cost of one episode, including its environment's own models but not replayed responses."""
    tokens, cost, taken = result.prompt_tokens + result.generated_tokens, result.cost, result.replayed
    if taken is not None:
        tokens, cost = tokens - taken.prompt_tokens - taken.generated_tokens, cost - taken.cost
    return Spent(tokens=max(0, tokens), cost=max(0.0, cost)) + _spent_on_its_own(result.environment_usage)


def _spent_on_its_own(used: EnvironmentUsage | None) -> Spent:
    return Spent(tokens=used.tokens, cost=used.cost) if used is not None else _NOTHING


class BudgetMeter:
    """Counts what a run spends, and reports when a budget is exhausted. It does not end the run.

    Only `refresh` can be called from another thread.

    Attributes:
        budget: Current limits, which can be replaced during the run.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        earlier: Sequence[EpisodeResult] = (),
        earlier_wall_sec: float = 0.0,
        run_dir: Path | None = None,
        sweep_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        since: float = _PROCESS_BEGAN,
    ) -> None:
        """Starts the count with the results and wall-clock seconds of earlier sessions. Does not read files.

        Errors of the other jobs in `sweep_dir` count only if they occurred after `since`, in epoch seconds. The user
        may have fixed the causes of earlier errors before resuming the run.
        """
        self.budget = budget
        self._clock = clock
        self._started = clock()
        self._since = since
        self._spent = sum((paid(result) for result in earlier), Spent(wall_sec=earlier_wall_sec))
        self._in_progress: dict[str, Spent] = {}
        self._by_environments: dict[str, Spent] = {}
        self._row = _Row()
        self._run_dir = run_dir
        self._sweep_dir = sweep_dir
        self._jobs: dict[Path, _Job] = {}
        self._spent_by_jobs = Spent()

    def add_response(self, episode_id: str, response: LLMResponse) -> None:
        """Counts a paid response of a running episode. Ignores invalid numbers, such as negative tokens."""
        if is_countable(response):
            self._add(episode_id, response.usage.total_tokens, response.cost)

    def add_environment(self, episode_id: str, used: EnvironmentUsage | None) -> None:
        """Updates the count with `used`, which a running episode's environment has spent on its own models so far."""
        total, known = _spent_on_its_own(used), self._by_environments.get(episode_id, _NOTHING)
        if total == known:
            return
        self._by_environments[episode_id] = total
        self._add(episode_id, total.tokens - known.tokens, total.cost - known.cost)

    def _add(self, episode_id: str, tokens: int, cost: float) -> None:
        known, spent = self._in_progress.get(episode_id, _NOTHING), self._spent
        self._in_progress[episode_id] = Spent(tokens=known.tokens + tokens, cost=known.cost + cost)
        self._spent = Spent(spent.wall_sec, spent.tokens + tokens, spent.cost + cost)

    def add(self, result: EpisodeResult) -> None:
        """Counts an episode that has ended. Amounts that were counted while it was running are not counted again."""
        total, known = paid(result), self._in_progress.pop(result.episode_id, _NOTHING)
        self._by_environments.pop(result.episode_id, None)
        self._spent += Spent(tokens=max(0, total.tokens - known.tokens), cost=max(0.0, total.cost - known.cost))
        self._row.add(result)

    def refresh(self) -> None:
        """Reads the results of the sweep's other jobs again, to update what these jobs have spent. Blocking.

        Raises:
            ConfigError: The results of some jobs are invalid. For these jobs, the last known amounts are kept.
        """
        from ares_exp.runs.sweeps.jobs import job_folders

        if self._sweep_dir is None or self.budget.sweep == Limits():
            return
        own = self._run_dir.resolve() if self._run_dir is not None else None
        folders = (path for path in job_folders(self._sweep_dir) if path.resolve() != own)
        jobs, broken = dict(self._jobs), list[str]()
        try:
            for folder, _ in zip(folders, range(MAX_JOBS), strict=False):
                try:
                    job = _Job.read(folder, jobs.get(folder), self._since)
                except ConfigError as error:
                    broken.append(str(error))
                else:
                    jobs |= {folder: job} if job is not None else {}
        except ConfigError as error:  # a folder that contains jobs cannot be read
            broken.append(str(error))
        self._jobs = jobs
        self._spent_by_jobs = sum((job.spent for job in jobs.values()), Spent())
        if broken:
            raise ConfigError(" ".join(broken))

    @property
    def spent(self) -> Spent:
        """The amounts that the run has spent so far, in all its sessions."""
        wall_sec = self._spent.wall_sec + self._clock() - self._started
        return replace(self._spent, wall_sec=wall_sec, errors_in_a_row=self._row.length())

    @property
    def spent_by_sweep(self) -> Spent:
        """The total of all jobs of the sweep. The amounts of other jobs are from the last `refresh`."""
        row = self._row.length([job.row for job in self._jobs.values()])
        return replace(self.spent + self._spent_by_jobs, errors_in_a_row=row)

    def exhausted(self) -> str | None:
        """Returns a message for the user if a budget of the run or sweep is exhausted; `None` otherwise."""
        if self.budget == _UNLIMITED:
            return None
        if (reached := self.budget.reached(self.spent)) is not None:
            return _in_words("run", "budget", *reached)
        if self._sweep_dir is not None and (reached := self.budget.sweep.reached(self.spent_by_sweep)) is not None:
            return _in_words("sweep", "budget.sweep", *reached)
        return None


@dataclass(slots=True)
class _Row:
    """Times of the last success and of all errors since then, in epoch seconds, for counting consecutive errors."""

    well_at: float = 0.0
    errors_at: list[float] = field(default_factory=list)

    def add(self, result: EpisodeResult) -> None:
        """Counts an episode as an error, a success or neither. Call this in the order in which the episodes ended."""
        if result.outcome in _SAYS_NOTHING:
            return
        no_fault = result.error is not None and result.error.type in _NO_FAULTS
        if result.reward is None and result.outcome in _FAULTS and not no_fault:
            self.errors_at.append(result.finished_at)
        else:
            self.well_at = result.finished_at
            self.errors_at.clear()

    def length(self, others: Sequence[_Row] = ()) -> int:
        """Returns the number of errors since the last success: of this job, or of this job and the jobs `others`."""
        rows = [self, *others]
        well_at = max(row.well_at for row in rows)
        return sum(at > well_at for row in rows for at in row.errors_at) if others else len(self.errors_at)


@dataclass(frozen=True, slots=True)
class _Job:
    """The amounts that another job of the sweep has spent, computed from its `episodes.jsonl`."""

    version: tuple[int, int]
    spent: Spent
    row: _Row

    @classmethod
    def read(cls, folder: Path, known: _Job | None, since: float) -> _Job | None:
        """Reads what a job has spent; `None` without `episodes.jsonl`. If this file is unchanged, returns `known`."""
        path = RunDir(folder).episodes
        try:
            stat = path.stat()
        except OSError:
            return None
        version = stat.st_size, stat.st_mtime_ns
        if known is not None and known.version == version:
            return known
        results, row = read_results(path).results, _Row()
        for result in sorted(results, key=lambda one: one.finished_at):
            if result.finished_at >= since:
                row.add(result)
        return cls(version, sum((paid(result) for result in results), Spent(wall_sec=_busy_sec(results))), row)


def _busy_sec(results: Iterable[EpisodeResult]) -> float:
    total, until = 0.0, 0.0
    for started, ended in sorted((result.started_at, result.finished_at) for result in results):
        total += max(0.0, ended - max(started, until))
        until = max(until, ended)
    return total


def _in_words(whose: str, prefix: str, name: str, bound: float, spent: float) -> str:
    amount = f"{spent:,}" if isinstance(spent, int) else f"{spent:,.4f}".rstrip("0").rstrip(".")
    larger = 2 * bound
    while larger <= spent:
        larger *= 2
    remedy = f"a larger budget, such as {prefix}.{name}={_number(larger)}"
    if name == "errors_in_a_row":
        remedy = "the same budget after you have fixed the cause of the errors"
    return (
        f"The {whose}'s budget is used up: {amount} {_NAMES[name]}, {prefix}.{name}={_number(bound)}. "
        f"No more episodes start, and running episodes are cancelled. Resume with {remedy}."
    )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"


INTERVAL_SEC = 2.0
"""Interval between two checks of the budgets, in seconds."""


class Spending:
    """Counts what a run spends, and ends the run when a budget is exhausted.

    Attributes:
        budget: Current budget.
        is_limited: Whether tokens or cost are limited by the budget, or by the limits of a single episode.
    """

    def __init__(
        self,
        parts: Components,
        settings: Settings,
        *,
        running: Callable[[], Iterable[RunningEpisode]],
        end: Callable[[BudgetExhaustedError], None],
        warn: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._running = running
        self._end = end
        self._warn = warn
        self._use(parts.budget)

    def _use(self, budget: Budget) -> None:
        limits, sweep = self._settings.limits, budget.sweep
        self.budget = budget
        self._limits_cost = any(bound is not None for bound in (limits.cost, budget.cost, sweep.cost))
        self.is_limited = self._limits_cost or any(
            bound is not None for bound in (limits.tokens, budget.tokens, sweep.tokens)
        )

    def start(self, earlier: PreviousSessions, run_dir: Path) -> None:
        """Starts the count with the amounts that earlier sessions and the sweep's other jobs have spent. Blocking."""
        self._meter = BudgetMeter(
            self.budget,
            earlier=earlier.results,
            earlier_wall_sec=earlier.wall_sec,
            run_dir=run_dir,
            sweep_dir=self._settings.sweep_dir,
        )
        self._asks_models = bool(self._parts.source.own_models)
        self._refresh()

    @property
    def spent(self) -> Spent:
        """The amounts that the run has spent so far, in all its sessions."""
        return self._meter.spent

    def set(self, budget: Budget) -> None:
        """Replaces the budget, and ends the run if the new budget is exhausted."""
        self._use(budget)
        self._meter.budget = budget
        self.check()

    def pay(self, episode: RunningEpisode, response: LLMResponse) -> None:
        """Counts a policy's response and all model calls by the environment. Ends the run if a budget is exhausted."""
        self._meter.add_response(episode.planned.episode_id, response)
        if self._limits_cost:
            for model in tuple(self._parts.policy.unpriced):
                self._warn(
                    f"No price is known for model {model!r}: its cost counts as 0, so the limit on cost has "
                    "no effect. Set policy.prices (0 for a free model)."
                )
        if self._asks_models:
            self._count_environments([episode])
        self.check()

    def add(self, result: EpisodeResult) -> None:
        """Counts an episode that has ended. Ends the run if a budget is then exhausted."""
        self._meter.add(result)
        self.check()

    def check(self) -> None:
        """Ends the run if a budget is exhausted. The run can be resumed later."""
        if (why := self._meter.exhausted()) is not None:
            self._end(BudgetExhaustedError(why))

    async def watch(self) -> None:
        """Checks the budgets every two seconds. Time, environments and other jobs use them up between responses."""
        while True:
            await asyncio.sleep(INTERVAL_SEC)
            await asyncio.to_thread(self._refresh)
            self._count_environments(self._running())
            self.check()

    def _count_environments(self, running: Iterable[RunningEpisode]) -> None:
        for episode in running:
            if episode.result is None:
                self._meter.add_environment(episode.planned.episode_id, episode.report().environment_usage)

    def _refresh(self) -> None:
        """Reads what the sweep's other jobs have spent. Shows a warning if that fails. Blocking."""
        try:
            self._meter.refresh()
        except (ConfigError, OSError) as error:
            self._warn(f"Cannot read what some jobs of the sweep have spent since the last reading: {error}")
