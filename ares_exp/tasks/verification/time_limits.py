"""`TimeLimits`, the time limits of a run for each phase of an episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ares_exp.containers.container import ContainerSpec
from ares_exp.errors import ConfigError
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
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

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
