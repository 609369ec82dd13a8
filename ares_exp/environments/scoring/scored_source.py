"""The scorers of a run, which are created from the config and called at the end of each episode."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ares_exp.cancellation import finish
from ares_exp.config.parts import StandIn
from ares_exp.config.targets import SCORER, added_defaults, import_target, instantiate_node
from ares_exp.environment import Environment, EnvironmentWrapper, EpisodeReport, LimitName, MinimalEnvironment, TimeStep
from ares_exp.environments.episode_limits import PhaseClock, limited
from ares_exp.environments.own_model import OwnModel
from ares_exp.environments.scoring.scorer import REWARD, ConfiguredScorer, ScoredEpisode, combined_reward, named_rewards
from ares_exp.environments.source import EpisodeParts, SourceBase
from ares_exp.errors import ConfigError, ScorerError
from ares_exp.records.results import EnvironmentUsage
from ares_exp.records.run_dir import dump_json
from ares_exp.records.secrets import scrub
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """The scorers of a run, in the order of their calls, and the weight of the verifier's reward."""

    scorers: Sequence[ConfiguredScorer] = ()
    verifier_weight: float = 1.0


class ScoringEnvironment(EnvironmentWrapper):
    """Wraps any environment, and calls the scorers of a run for each episode that reaches LAST.

    The reward of the LAST step becomes the weighted sum of the verifier's reward and the scores. `report().rewards`
    contains each of these numbers by name. The container is kept until the last scorer has returned. If a scorer fails,
    the step raises an error, as if the verifier had failed. With `verify_on_truncation=false`, truncated episodes are
    not scored.
    """

    def __init__(
        self, env: MinimalEnvironment, rules: ScoringRules, parts: EpisodeParts, *, task_name: str | None = None
    ) -> None:
        """Scores the episodes of `env`, which was made from `parts`.

        `task_name` is the task's name for scorers. By default, it is the name that `env` reports or, if `env` reports
        no name, the name of the class of `env`.
        """
        self._collected = TrajectoryCollectingEnvironment(
            limited(env, parts.limits),
            EpisodeCollector(),
            episode_id=parts.episode_id,
            task_name=task_name,
            metadata={"attempt": parts.attempt, "seed": parts.seed},
        )
        super().__init__(self._collected)
        self._rules = rules
        self._parts = parts
        self._task_name = task_name
        self._clear()
        self.hold_container()

    def _clear(self) -> None:
        self._last: TimeStep[Any] | None = None
        self._rewards: Mapping[str, float] | None = None
        self._used: EnvironmentUsage | None = None
        self._clock = PhaseClock()

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> TimeStep[Any]:
        """Starts an episode."""
        self._clear()
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> TimeStep[Any]:
        """Applies `action`, and scores the episode at LAST.

        Raises:
            ScorerError: A scorer failed. All resources have been released.
        """
        time_step = await super().step(action)
        return await self._scored(time_step) if time_step.step_type == "LAST" else time_step

    async def truncate(self, limit: LimitName) -> TimeStep[Any] | None:
        """Truncates the episode with the environment's `truncate`, and scores it.

        Returns `None` if the environment does not support `truncate`. Raises `ScorerError` like `step`.
        """
        last = await super().truncate(limit)
        return await self._scored(last) if last is not None else None

    async def fork(self, n: int, *, diversify: bool = False) -> Sequence[ScoringEnvironment]:
        """Forks the environment. Each fork also scores its episode."""
        forks = await super().fork(n, diversify=diversify)
        parts = replace(self._parts, episode_id=None)
        return [ScoringEnvironment(fork, self._rules, parts, task_name=self._task_name) for fork in forks]

    def report(self) -> EpisodeReport:
        """Returns the wrapped environment's report, with the scores, and with the scorers' time and cost."""
        report = super().report()
        if self._last is None and not self._clock.seconds and self._clock.phase is None:
            return report
        used = report.environment_usage
        if self._used is not None:
            used = self._used if used is None else used + self._used
        return replace(
            report,
            rewards=report.rewards if self._rewards is None else self._rewards,
            environment_usage=used,
            phase=self._clock.phase or report.phase,
            phase_sec={**report.phase_sec, **self._clock.seconds},
        )

    @property
    def time_step(self) -> TimeStep[Any] | None:
        """The pending time step. It becomes LAST only after the episode was scored."""
        pending = super().time_step
        return pending if pending is None or pending.step_type != "LAST" else self._last

    async def _scored(self, last: TimeStep[Any]) -> TimeStep[Any]:
        """Calls the scorers, and returns the LAST step with the combined reward."""
        try:
            is_unscored = last.discount and not self._parts.limits.verify_on_truncation
            if is_unscored or not math.isfinite(last.reward or 0.0):  # a non-finite reward ends the episode as an error
                self._last = last
            else:
                with self._clock.during("score"):
                    reward = await self._score(last.reward)
                self._last = last._replace(reward=reward)
        finally:
            await finish(self.release_container())
        return self._last

    async def _score(self, reward: float | None) -> float | None:
        if (trajectory := self._collected.trajectory) is None:
            raise ScorerError("The scorers need the steps of the episode, but the steps could not be collected.")
        verified = super().report().rewards
        episode = ScoredEpisode(
            trajectory=trajectory,
            task=self.current_task,
            reward=reward,
            rewards=named_rewards(reward, verified, ()),
            seed=self._parts.seed,
            attempt=self._parts.attempt,
            output_dir=self._parts.output_dir,
            spend=self._spend,
        )
        container = self.held_container
        scores = [await one.score(episode, container) for one in self._rules.scorers]
        self._rewards = named_rewards(reward, verified, scores)
        return combined_reward(reward, self._rules.verifier_weight, scores)

    def _spend(self, used: EnvironmentUsage) -> None:
        self._used = used if self._used is None else self._used + used


_KEY = "env.scorers"
_WEIGHT = "env.verifier_weight"
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_FORMS = "`env.scorers=[package.module.function]`, or by name `env.scorers={tidy: {_target_: package.module.function}}`"


def make_scoring_rules(config: DictConfig) -> ScoringRules:
    """Makes the scorers in `scorer` and `env.scorers` of a config. Raises `ConfigError` if one of them is invalid."""
    from omegaconf import OmegaConf, open_dict

    defaults = added_defaults(SCORER)
    scorers: dict[str, ConfiguredScorer] = {}
    for key, given, node in _nodes(config):
        name = str(node.get("name") or given)
        if not _NAME.fullmatch(name) or name == REWARD or name in scorers:
            raise ConfigError(
                f"Expected each scorer to have a unique name of letters, digits, '_' and '-', got {name!r}. "
                f"`{REWARD}` is reserved for the verifier's reward. Use {_FORMS}."
            )
        apart = config.copy()
        with open_dict(apart):
            OmegaConf.update(apart, _KEY, None, merge=False)
            own = {argument: value for argument, value in node.items() if argument not in defaults}
            OmegaConf.update(apart, key, _as_made(own), merge=False, force_add=True)
        part = instantiate_node(apart, key)
        _check_call(key, part)
        weight, timeout = (_number(f"{key}.{one}", node.get(one, defaults[one])) for one in ("weight", "timeout_sec"))
        if timeout <= 0:
            raise ConfigError(f"Expected `{key}.timeout_sec` to be a number above 0, got {timeout:g}.")
        made_from: Any = OmegaConf.to_container(OmegaConf.select(apart, key), resolve=True)
        scorers[name] = ConfiguredScorer(name, part, weight, timeout, json.loads(dump_json(scrub(made_from))))
        scorers[name].scorer.set_name(name, key)
    if not scorers:
        return ScoringRules()
    return ScoringRules(tuple(scorers.values()), _number(_WEIGHT, OmegaConf.select(config, _WEIGHT, default=1.0)))


def _nodes(config: DictConfig) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the config key, default name and config of each scorer: first `scorer`, then `env.scorers`."""
    from omegaconf import OmegaConf

    def plain(key: str) -> Any:
        found = OmegaConf.select(config, key)
        return OmegaConf.to_container(found, resolve=False) if OmegaConf.is_config(found) else found

    several = plain(_KEY) or {}
    if not isinstance(several, list | dict):
        raise ConfigError(
            f"Expected `{_KEY}` to be a list or a mapping of scorers, got {several!r:.100}. Set {_FORMS}."
        )
    entries = [(SCORER, plain(SCORER) or None)]
    if isinstance(several, list):
        entries += [(_KEY, entry) for entry in several]
    else:
        entries += [(f"{_KEY}.{name}", entry) for name, entry in several.items()]
    for key, entry in entries:
        if entry is None:
            continue
        node = {"_target_": entry} if isinstance(entry, str) else entry
        if not isinstance(node, dict) or not isinstance(target := node.get("_target_"), str):
            raise ConfigError(f"Expected `{key}` to name a function or a class, got {entry!r:.100}. Set {_FORMS}.")
        target = target.replace(":", ".")
        named = target.rpartition(".")[2].lower() if key in (SCORER, _KEY) else key.rpartition(".")[2]
        yield key if key != _KEY else f"{_KEY}.{node.get('name') or named}", named, {**node, "_target_": target}


def _as_made(node: Mapping[str, Any]) -> dict[str, Any]:
    """Adds `_partial_: true` to the config of a function, so that Hydra does not call the scorer when creating it."""
    is_class = inspect.isclass(import_target(node["_target_"]))
    return dict(node) if is_class or "_partial_" in node else {**node, "_partial_": True}


def _check_call(key: str, part: Any) -> None:
    if not callable(part):
        raise ConfigError(f"Expected `{key}` to create a scorer, got {type(part).__name__}, which cannot be called.")
    called, options = (part.func, part.keywords) if isinstance(part, functools.partial) else (part, {})
    try:
        signature = inspect.signature(called)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(None, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"Expected the scorer in `{key}` to accept an episode, its container, and the options by name: {error}."
        ) from None


def _number(key: str, value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise ConfigError(f"Expected `{key}` to be a finite number, got {value!r:.100}. Set `{key}=1`.")
    return float(number)


class ScoredSource(StandIn):
    """Wraps another source so that its episodes are scored. Also checks the scorers before the run, and closes them."""

    def __init__(self, source: SourceBase, rules: ScoringRules) -> None:
        """Wraps `source`. Members that this class does not override are looked up in `source`."""
        super().__init__(source)
        self._rules = rules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def make(self, task_name: str, parts: EpisodeParts) -> Environment:
        """Makes the environment of one episode, which is scored at LAST."""
        return ScoringEnvironment(self._part.make(task_name, parts), self._rules, parts, task_name=task_name)

    @property
    def spenders(self) -> Sequence[str]:
        """Names of the components that call models: the wrapped source's own components, and the judges."""
        asking = [f"the judge `{one.name}`" for one in self._rules.scorers if one.scorer.asks_model]
        return [*self._part.spenders, *asking]

    @property
    def own_models(self) -> Sequence[OwnModel]:
        """The models that the source itself calls, then the models of the scorers."""
        return [*self._part.own_models, *(model for one in self._rules.scorers for model in one.scorer.own_models)]

    async def preflight(self) -> None:
        """Checks that the source and every scorer are ready. Raises `PreflightError` if not."""
        await self._part.preflight()
        for one in self._rules.scorers:
            await one.scorer.preflight()

    async def close(self) -> None:
        """Closes the scorers and the source. Idempotent."""
        try:
            for one in self._rules.scorers:
                await one.scorer.close()
        finally:
            await self._part.close()
