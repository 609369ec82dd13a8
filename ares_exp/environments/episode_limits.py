"""Limits of an episode (steps, tokens, cost, and the time of each phase), and a wrapper that enforces them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.environment import (
    EnvironmentBase,
    EnvironmentWrapper,
    EpisodeReport,
    LimitName,
    MinimalEnvironment,
    TimeStep,
    complete,
    no_episode,
)
from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeUsage
from ares_exp.tasks.task_contract import Stage, Task


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The settings of a run that change the time limits of its tasks.

    The effective limit of a phase is `min(override or task's limit, maximum) * multiplier`.

    Attributes:
        timeout_multiplier: Multiplier of every limit that has no separate multiplier.
        agent_timeout_sec: Override of the task's agent limit; ignored if `None` or 0.
        agent_timeout_max_sec: Maximum of the agent limit before it is multiplied; ignored if `None` or 0.
        agent_timeout_multiplier: Multiplier of the agent limit, instead of `timeout_multiplier`.
        verifier_timeout_sec, verifier_timeout_max_sec, verifier_timeout_multiplier: The same settings for the verifier.
        environment_build_timeout_multiplier: Multiplier of the limit for building and starting the container.

    Raises:
        ConfigError: A limit is negative, or a multiplier is not positive.
    """

    timeout_multiplier: float = 1.0
    agent_timeout_sec: float | None = None
    agent_timeout_max_sec: float | None = None
    agent_timeout_multiplier: float | None = None
    verifier_timeout_sec: float | None = None
    verifier_timeout_max_sec: float | None = None
    verifier_timeout_multiplier: float | None = None
    environment_build_timeout_multiplier: float | None = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting.name, getattr(self, setting.name))

    def agent(self, stage: Stage | None) -> float | None:
        """Computes the time limit of the agent phase in seconds; `None` for no limit.

        If `stage` is `None`, as for environments without stages, only the settings of the run count.
        """
        own = stage.agent_timeout_sec if stage is not None else None
        return self._limit(self.agent_timeout_sec or own, self.agent_timeout_max_sec, self.agent_timeout_multiplier)

    def verifier(self, stage: Stage) -> float | None:
        """Computes the time limit of the verification in seconds; `None` for no limit, which a task sets as `inf`."""
        return self._limit(
            self.verifier_timeout_sec or stage.verifier_timeout_sec,
            self.verifier_timeout_max_sec,
            self.verifier_timeout_multiplier,
        )

    def start(self, task: Task) -> float:
        """Computes the time limit for building and starting the agent's container, in seconds; `inf` for no limit."""
        limit = self._limit(task.container_spec.start_timeout_sec, None, self.environment_build_timeout_multiplier)
        return math.inf if limit is None else limit

    def container_spec(self, task: Task) -> ContainerSpec:
        """Returns the specification of the agent's container, with limits on its start and on its lifetime.

        The lifetime is the sum of the limits of all phases in which the container is needed.
        """
        start = self.start(task)
        phases: list[float | None] = [start, task.set_up_timeout_sec]
        for stage in task.stages:
            before, after = stage.start_timeout_sec, stage.collect_timeout_sec
            own = self.verifier_spec(task, stage)
            phases += [before, self.agent(stage), after, self.verifier(stage) if own is None else own.lifetime_sec]
        return replace(task.container_spec, start_timeout_sec=start, lifetime_sec=_sum(phases))

    def verifier_spec(self, task: Task, stage: Stage) -> ContainerSpec | None:
        """Returns the specification of the verifier's separate container, with limits on its start and lifetime.

        Returns `None` if the verifier runs in the agent's container.
        """
        if (spec := stage.verifier_spec) is None:
            return None
        start = self.start(task)
        return replace(spec, start_timeout_sec=start, lifetime_sec=_sum((start, self.verifier(stage))))

    def _limit(self, own: float | None, cap: float | None, multiplier: float | None) -> float | None:
        seconds = min(math.inf if own is None else own, cap or math.inf)
        seconds *= self.timeout_multiplier if multiplier is None else multiplier
        return None if seconds == math.inf else seconds


def _sum(limits: Sequence[float | None]) -> float | None:
    """Returns the sum of the limits; `None` (no limit) if one limit is `None` or infinite."""
    seconds = [math.inf if limit is None else limit for limit in limits]
    return None if math.inf in seconds else sum(seconds)


def _check(key: str, value: float | None) -> None:
    is_multiplier = key.endswith("multiplier")
    if value is None or (0 < value < math.inf) or (not is_multiplier and value in (0, math.inf)):
        return
    expected = "a positive number" if is_multiplier else "a number of seconds, 0 or more"
    raise ConfigError(
        f"Expected `{key}` to be {expected}, got {value}. Set {key}=<number>, or {key}=null to disable this setting."
    )


@dataclass(slots=True)
class PhaseClock:
    """Measures how long the phases of an episode take. Only one phase is measured at a time.

    Attributes:
        seconds: Seconds of wall-clock time by phase.
        phase: Name of the current phase, such as `start`, `agent` or `verify`; `None` between phases.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    phase: str | None = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Adds the wall-clock time of the `with` block to the seconds of `phase`."""
        started = time.perf_counter()
        self.phase = phase
        try:
            yield
        finally:
            self.phase = None
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. When an episode reaches a limit, it is truncated. `None` means unlimited.

    Attributes:
        steps: Maximum number of LLM responses.
        tokens: Maximum number of prompt and generated tokens over all responses.
        cost: Maximum cost in US dollars over all responses.
        time: Wall-clock limits of the phases.
        verify_on_truncation: Whether the verifier also runs for a truncated episode. If not, its reward is `None`.
    """

    steps: int | None = None
    tokens: int | None = None
    cost: float | None = None
    time: TimeLimits = field(default_factory=TimeLimits)
    verify_on_truncation: bool = True

    def reached(self, usage: EpisodeUsage) -> LimitName | None:
        """Returns the first of the limits `steps`, `tokens` and `cost` that `usage` has reached; otherwise `None`."""
        used: tuple[tuple[LimitName, float, float | None], ...] = (
            ("steps", usage.num_steps, self.steps),
            ("tokens", usage.tokens, self.tokens),
            ("cost", usage.cost, self.cost),
        )
        return next((name for name, amount, limit in used if limit is not None and amount >= limit), None)


def limited(env: MinimalEnvironment, limits: EpisodeLimits, used: EpisodeUsage | None = None) -> EnvironmentBase:
    """Returns `env` itself if it enforces `limits`, and otherwise `env` wrapped in a `LimitedEnvironment`."""
    whole = complete(env)
    return whole if whole.keeps(limits) else LimitedEnvironment(whole, limits, used=used)


class LimitedEnvironment(EnvironmentWrapper):
    """Enforces the limits of a run for an environment that does not enforce them itself.

    If a step reaches a limit and does not end the episode, the wrapper calls the environment's `truncate`, which scores
    the current state. If the environment does not support `truncate`, the wrapper closes it. The episode then ends with
    a LAST step with discount 1.0, the pending observation and reward `None`.

    The time limit is the run's limit on the agent (`limits.time`). If it passes during a step, the wrapper closes the
    environment. The wrapper does not limit the time of an environment that does so itself (`is_timed`).
    """

    def __init__(self, env: MinimalEnvironment, limits: EpisodeLimits, *, used: EpisodeUsage | None = None) -> None:
        """Limits the episodes of `env`.

        Args:
            env: The environment.
            limits: The limits of each episode.
            used: If the first `reset()` continues an earlier episode, the steps, tokens and cost of that episode. They
                count towards the limits.
        """
        super().__init__(env)
        self._limits = limits
        self._used = used
        self._usage = EpisodeUsage()
        self._keeps_time = False
        self._ends_at: float | None = None
        self._timer: asyncio.Timeout | None = None
        self._pending: TimeStep[Any] | None = None
        self._truncated_by: LimitName | None = None
        self._is_given_up = False

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode. The time limit starts at the first observation."""
        self._usage, self._used = replace(self._used) if self._used is not None else EpisodeUsage(), None
        self._pending = self._truncated_by = None
        self._is_given_up = False
        self._pending = await super().reset(seed=seed, options=options)
        self._keeps_time = not super().is_timed
        limit_sec = self._limits.time.agent(None) if self._keeps_time else None
        self._ends_at = None if limit_sec is None else time.monotonic() + limit_sec
        return self._pending

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action`, and ends the episode if a limit is reached. Raises `EpisodeStateError` after LAST."""
        if self._pending is not None and self._pending.step_type == "LAST":
            raise no_episode(ended=True)
        if self._keeps_time and (action is None or self._left_sec == 0):
            return await self._cut_short("time")
        timer = asyncio.timeout(self._left_sec)
        try:
            async with timer:
                self._timer = timer
                time_step = await super().step(action)
        except TimeoutError:
            if not timer.expired():
                raise
            return await self._give_up("time")
        finally:
            self._timer = None
        self._pending = time_step
        self._usage.add(action)
        limit = self._limits.reached(self._usage)
        if time_step.step_type != "LAST" and limit is not None:
            return await self._cut_short(limit)
        return time_step

    async def truncate(self, limit: LimitName) -> TimeStep[Any]:
        """Truncates the wrapped environment. If this is not supported, closes it; the reward is then `None`."""
        if self._pending is None or self._pending.step_type == "LAST":
            raise no_episode(ended=self._pending is not None)
        return await self._cut_short(limit)

    async def _cut_short(self, limit: LimitName) -> TimeStep[Any]:
        if (last := await super().truncate(limit)) is None:
            return await self._give_up(limit)
        self._truncated_by, self._pending = limit, last
        return last

    async def _give_up(self, limit: LimitName) -> TimeStep[Any]:
        observation = self._pending.observation if self._pending is not None else None
        self._truncated_by, self._is_given_up = limit, True
        self._pending = TimeStep("LAST", None, 1.0, observation)
        await super().close()
        return self._pending

    def report(self) -> EpisodeReport:
        """Returns the report of the wrapped environment, with the limit that ended the episode."""
        report = super().report()
        if self._truncated_by is None:
            return report
        why = (
            f"the episode has no reward, because {type(self.unwrapped).__name__} has no `truncate(limit)` to score an "
            "unfinished episode"
        )
        note = report.note or (why if self._is_given_up else None)
        return replace(report, truncated_by=self._truncated_by, note=note)

    @property
    def step_count(self) -> int:
        """Step count of the wrapped environment or, if it does not count steps, the count of this wrapper."""
        return super().step_count or self._usage.step_count

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The pending time step, or the LAST step."""
        return self._pending if self._is_given_up else super().time_step

    def keeps(self, limits: object) -> bool:
        """Returns whether this wrapper enforces `limits`, so that no other wrapper has to."""
        return limits == self._limits

    @property
    def is_timed(self) -> bool:
        """Always true, because this wrapper enforces a time limit even if the wrapped environment has none."""
        return True

    @property
    def time_left_sec(self) -> float | None:
        """Seconds left until the time limit of the wrapped environment or, if it has none, of this wrapper."""
        if not self._keeps_time:
            return super().time_left_sec
        is_over = self._pending is None or self._pending.step_type == "LAST"
        return None if is_over else self._left_sec

    @property
    def _left_sec(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def grant_time(self, seconds: float) -> None:
        """Extends the time limit by `seconds`, unless it has passed; see `EnvironmentBase.grant_time`."""
        if self._ends_at is not None and self._left_sec and not (self._timer is not None and self._timer.expired()):
            self._ends_at += seconds
            if self._timer is not None:
                self._timer.reschedule(asyncio.get_running_loop().time() + self._ends_at - time.monotonic())
        super().grant_time(seconds)
