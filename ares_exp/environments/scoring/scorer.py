"""The contract of scorers, which get a finished episode and its container, and return rewards.

`ConfiguredScorer` calls a scorer with a time limit, validates the result, and names the scorer in errors.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ares_exp.cancellation import in_daemon_thread
from ares_exp.config.parts import completed
from ares_exp.containers.container import Container
from ares_exp.environments.own_model import OwnModel
from ares_exp.errors import ConfigError, ContainerError, ScorerError, ScorerTimeoutError
from ares_exp.llms.request import Message
from ares_exp.records.results import EnvironmentUsage, Outcome
from ares_exp.records.validation import MAX_NUMBER
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, deserialize_llm_response

Scores = float | Mapping[str, float]
"""A scorer's result: a number, or several numbers by name, of which only `reward` counts towards the reward."""


@runtime_checkable
class _Instructed(Protocol):
    instruction: str


@runtime_checkable
class _Staged(Protocol):
    stages: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """A finished episode, which is passed to scorers. It has reached LAST, and its verifier has run.

    Attributes:
        trajectory: The trajectory before any scorer was called, with steps, outcome and limit. In `ares-exp score`, the
            trajectory that the run recorded.
        task: The task that the environment exposes: a `Task` of Harbor's format or of SWE-bench, the task object of
            another environment, or a name; `None` if the environment exposes no task.
        reward: Reward of the LAST step, which usually comes from the verifier; `None` if there is no reward.
        rewards: All rewards from the verifier, by key; `{"reward": reward}` for an environment without a verifier.
        seed: Seed of the episode.
        attempt: Number of the attempt at the task, from 0.
        output_dir: Directory on this machine with the saved files of the episode (`verifier/`, `artifacts/`), or
            `None`.
        scorer: Name of the scorer to which this object is passed.
        spend: Function that a scorer calls to report the tokens and cost of its own model calls. They count towards
            `environment_usage` and the budget.
    """

    trajectory: EpisodeTrajectory
    task: Any = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    attempt: int = 0
    output_dir: Path | None = None
    scorer: str = ""
    spend: Callable[[EnvironmentUsage], None] = field(default=lambda used: None, repr=False, compare=False)

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self.trajectory.task_name

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """All time steps, including FIRST. Their observations and actions are dicts, as in a trajectory file."""
        return self.trajectory.steps

    @property
    def outcome(self) -> Outcome:
        """Outcome of the episode: `completed` or `truncated`. In `ares-exp score`, also `verifier_error`."""
        return self.trajectory.outcome

    @property
    def instruction(self) -> str:
        """Instruction of the task or, if the environment does not expose it, the first message of the first request."""
        from ares_exp.trajectories.episode_printer import message_text

        if isinstance(self.task, _Staged):
            stages = [stage.instruction for stage in self.task.stages if isinstance(stage, _Instructed)]
            return "\n\n".join(stages)
        first = self.steps[0].observation if self.steps else None
        messages = (first or {}).get("messages") or ()
        return message_text(messages[0]) if messages else ""

    @property
    def responses(self) -> tuple[str, ...]:
        """The texts of all responses of the policy, in order."""
        return tuple(_said(step.action) for step in self.steps if step.action is not None)

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """Messages of the last request and, if the policy responded to it, the last response."""
        requests = [step.observation for step in self.steps if step.observation is not None]
        messages = tuple(requests[-1].get("messages") or ()) if requests else ()
        responses = self.responses
        is_answered = bool(self.steps) and self.steps[-1].action is not None and bool(responses)
        return (*messages, Message(role="assistant", content=responses[-1])) if is_answered else messages


@runtime_checkable
class Scorer(Protocol):
    """Scores finished episodes. A function with the arguments of `__call__` is also a scorer.

    `ScorerBase` adds optional members.
    """

    def __call__(self, episode: ScoredEpisode, container: Container | None, /) -> Scores | Awaitable[Scores]:
        """Returns the rewards of an episode.

        Called once per episode that reached LAST, after its verifier has run, and concurrently for many episodes. A
        function that is not `async` is called in a thread, and cannot use the container.

        Args:
            episode: The finished episode.
            container: The agent's container, which is still running, and is removed after the last scorer. `None` if
                the environment has no container. Also `None` in `ares-exp score`, if the episode has no snapshot.

        Returns:
            A finite number, or several numbers by name.

        Raises:
            Exception: Any exception ends the episode with the outcome `verifier_error`. The error of the episode names
                this scorer.
        """


class ScorerBase(Scorer):
    """Defines all members of a scorer, with defaults for the members that are optional in `Scorer`."""

    async def __call__(self, episode: ScoredEpisode, container: Container | None, /) -> Scores:
        """Returns the rewards of an episode; see `Scorer`."""
        raise NotImplementedError

    @property
    def asks_model(self) -> bool:
        """Whether the scorer calls a model, so that the summary of a run names the scorer. Default: no."""
        return False

    @property
    def uses_container(self) -> bool:
        """Whether the scorer uses the container. If so, `ares-exp score` restores it from a snapshot. Default: yes."""
        return True

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """The models that the scorer calls. Default: empty."""
        return ()

    def set_name(self, name: str, key: str) -> None:
        """Receives the scorer's name and config key for messages, before other calls. Default: does nothing."""

    async def preflight(self) -> None:
        """Checks that the scorer is ready, before a run starts its first episode. Default: does nothing.

        Raises:
            PreflightError: The scorer is not ready. The message suggests a fix.
        """

    async def close(self) -> None:
        """Releases the scorer's resources. Idempotent. Default: does nothing."""


def as_scorer(scorer: object) -> ScorerBase:
    """Returns `scorer`, completed with the defaults of `ScorerBase`. Raises `ConfigError` if it is not callable."""
    if not callable(scorer):
        raise ConfigError(
            f"Expected a scorer to be callable with an episode and its container, got {type(scorer).__name__}."
        )
    return completed(scorer, ScorerBase)


def _said(action: Mapping[str, Any]) -> str:
    """Returns the text of a recorded action. An action that is not an LLM response is formatted with `str`."""
    try:
        return deserialize_llm_response(action).text
    except (TypeError, KeyError, ValueError):
        return str(dict(action))


REWARD = "reward"
"""Key of the verifier's reward in an episode's rewards, and of the number that counts in a scorer's return value."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one scorer for an episode.

    Attributes:
        name: Name of the scorer.
        weight: Weight in the episode's reward. With 0, the score is only recorded.
        value: Number that counts towards the episode's reward. `None` if the scorer returned several numbers and none
            of them is named `reward`, which is allowed only with weight 0.
        rewards: All numbers from the scorer, by the names under which they are recorded.
    """

    name: str
    weight: float
    value: float | None
    rewards: Mapping[str, float]


def checked_score(name: str, weight: float, returned: Any) -> Score:
    """Validates the return value of a scorer, and makes a score from it.

    For example, if the scorer `style` returns `{"reward": 0.5, "length": 80}`, the numbers are recorded as `style` and
    `style.length`, and 0.5 counts towards the episode's reward. A plain number is recorded as `style`, and it counts. A
    mapping with one number needs no key `reward`: its number counts.

    Raises:
        ScorerError: The value is neither a finite number nor a mapping of names to finite numbers. Or it has several
            numbers without the key `reward`, and `weight` is not 0.
    """
    if not isinstance(returned, Mapping):
        number = _number(name, returned)
        return Score(name, weight, number, {name: number})
    if not returned or not all(isinstance(key, str) and key for key in returned):
        raise ScorerError(
            f"Expected the scorer `{name}` to return a number, or a dict of numbers by name, got {returned!r:.200}.",
            scorer=name,
        )
    numbers = {str(key): _number(name, value) for key, value in returned.items()}
    value = numbers.get(REWARD, next(iter(numbers.values())) if len(numbers) == 1 else None)
    if value is None and weight:
        raise ScorerError(
            f"Expected the scorer `{name}` to return one number, or a mapping with the key `reward`, got the keys "
            f"{', '.join(sorted(numbers)[:20])}. Add the key `reward`, or set `weight: 0` to only record the numbers.",
            scorer=name,
        )
    recorded = {name if key == REWARD else f"{name}.{key}": number for key, number in numbers.items()}
    return Score(name, weight, value, recorded)


def combined_reward(reward: float | None, verifier_weight: float, scores: Sequence[Score]) -> float | None:
    """Returns the weighted sum of `reward` and the scores; `None` if `reward` is missing and its weight is not 0."""
    if reward is None and verifier_weight:
        return None
    total = verifier_weight * reward if reward is not None and verifier_weight else 0.0
    return total + sum(score.weight * score.value for score in scores if score.weight and score.value is not None)


def named_rewards(reward: float | None, verified: Mapping[str, float], scores: Sequence[Score]) -> dict[str, float]:
    """Returns all rewards of an episode by name: the rewards of the verifier (`verified`) and of the scorers.

    If `verified` is empty, includes `reward` itself. Raises `ScorerError` if two rewards have the same name.
    """
    found = dict(verified) if verified or reward is None else {REWARD: reward}
    for score in scores:
        if taken := sorted(found.keys() & score.rewards.keys()):
            raise ScorerError(
                f"The reward {taken[0]!r} of the scorer `{score.name}` has the same name as another reward. Rename "
                "the scorer.",
                scorer=score.name,
            )
        found |= score.rewards
    return found


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) < MAX_NUMBER:  # also rejects non-finite values
        raise ScorerError(f"Expected the scorer `{name}` to return finite numbers, got {value!r:.200}.", scorer=name)
    return number


@dataclass(frozen=True, slots=True)
class ConfiguredScorer:
    """A scorer and its options in a run.

    Attributes:
        name: Name under which the scorer's rewards are recorded.
        part: The scorer: a function, or another callable object.
        weight: Weight in the episode's reward. With 0, the scores are only recorded.
        timeout_sec: Time limit of one call in seconds.
        config: Config of `part` for the records, without secrets.
    """

    name: str
    part: Any
    weight: float = 1.0
    timeout_sec: float = 600.0
    config: Any = None

    @property
    def scorer(self) -> ScorerBase:
        """The scorer, with the defaults of `ScorerBase` for missing members."""
        return as_scorer(self.part)

    @property
    def uses_container(self) -> bool:
        """Whether the scorer uses the container. A scorer that is not `async` cannot, because it runs in a thread."""
        return _is_async(self.part) and self.scorer.uses_container

    async def score(self, episode: ScoredEpisode, container: Container | None) -> Score:
        """Calls the scorer for an episode, and validates the returned numbers.

        Raises:
            ScorerError: The scorer raised, took too long, or returned an invalid value. The message names the scorer.
            ContainerError: The container failed during the call.
        """
        limit = asyncio.timeout(self.timeout_sec)
        try:
            async with limit:
                returned = await _called(self.part, replace(episode, scorer=self.name), container)
            return checked_score(self.name, self.weight, returned)
        except (ScorerError, ContainerError):
            raise
        except (Exception, SystemExit) as error:
            if limit.expired():
                raise ScorerTimeoutError(
                    f"The scorer `{self.name}` did not return within its limit of {self.timeout_sec:g} s "
                    "(`timeout_sec` of the scorer).",
                    scorer=self.name,
                ) from error
            raise ScorerError(
                f"The scorer `{self.name}` raised {type(error).__name__}: {error}", scorer=self.name
            ) from error


async def _called(part: Any, episode: ScoredEpisode, container: Container | None) -> Any:
    if _is_async(part):
        return await part(episode, container)
    returned = await in_daemon_thread(lambda: part(episode, container))
    return await returned if inspect.isawaitable(returned) else returned


def _is_async(part: Any) -> bool:
    while isinstance(part, functools.partial):
        part = part.func
    return inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(type(part).__call__)
