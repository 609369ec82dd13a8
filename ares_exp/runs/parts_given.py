"""The parts that a script gives: objects as they are, others made from the config tree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ares_exp.agents.code_agent import as_agent_factory
from ares_exp.config.hydra_setup import compose_config
from ares_exp.config.overrides import key_set_by, parse_overrides
from ares_exp.config.schema import KEYS, validate
from ares_exp.config.targets import SCORER, instantiate_group
from ares_exp.containers.container import as_container_factory
from ares_exp.environment import MinimalEnvironment, complete
from ares_exp.environments.scoring.scored_source import make_scored_source
from ares_exp.environments.source import EnvironmentSource, SourceBase, as_source
from ares_exp.errors import ConfigError
from ares_exp.policies.policy import as_policy
from ares_exp.runs.components import Components, Settings
from ares_exp.runs.made_environments import MadeEnvironments
from ares_exp.trackers.several import SeveralTrackers
from ares_exp.trajectories.collectors.memory_collector import MemoryTrajectoryCollector

if TYPE_CHECKING:
    from omegaconf import DictConfig

EPISODE_KEYS = ("limits", "timeouts", "verify_on_truncation")
"""Top-level keys that apply to one episode."""


class Made(NamedTuple):
    """What was made.

    Attributes:
        parts: The components.
        settings: Their settings.
        owned: Closes each component that was made here.
    """

    parts: Components
    settings: Settings
    owned: list[Callable[[], Awaitable[None]]]


@dataclass(frozen=True)
class PartsGiven:
    """Arguments of a function that plays episodes.

    Attributes:
        parts: By group, an object, the name of an option, the content of an option file, or `None` for the default.
        values: Top-level keys with arguments of their own.
        overrides: Further overrides, as on the command line.
        config_dirs: The user's folders of options.
    """

    parts: Mapping[str, Any]
    values: Mapping[str, Any]
    overrides: Sequence[str]
    config_dirs: Sequence[Path]

    def make(self) -> Made:
        """Composes the config of what is no object, and makes the components. Blocking; starts nothing.

        Raises:
            ConfigError: Something is wrong with an argument.
        """
        from omegaconf import OmegaConf, open_dict

        if isinstance(self.overrides, str):
            raise ConfigError(f'Expected a list of overrides, got {self.overrides!r:.200}: `["limits.steps=20"]`.')
        chosen = [f"{group}={part}" for group, part in self.parts.items() if isinstance(part, str)]
        own = [f"{name}={value}" for name, value in self.values.items()]
        self._check_overrides()
        config = compose_config([*chosen, *own, *self.overrides], config_dirs=self.config_dirs)
        for group, part in self.parts.items():
            if isinstance(part, Mapping):
                with open_dict(config):
                    OmegaConf.update(config, group, dict(part), merge=False)
        values = {name: config[name] for name in KEYS}
        validate(values)
        return self._made(config, Settings.of(values))

    def _made(self, config: DictConfig, settings: Settings) -> Made:
        def is_object(group: str) -> bool:
            return not (self.parts[group] is None or isinstance(self.parts[group], str | Mapping))

        def part(group: str) -> Any:
            return self.parts[group] if is_object(group) else instantiate_group(config, group)

        parts = Components(
            source=_source(self.parts["env"]) if is_object("env") else make_scored_source(config),
            agent_factory=as_agent_factory(part("agent")),
            container_factory=as_container_factory(part("container")),
            policy=as_policy(part("policy")),
            wrapper=complete,
            collectors={"memory": MemoryTrajectoryCollector(keep=1)},
            tracker=SeveralTrackers({}),
        )
        closing = {
            "policy": parts.policy.close,
            "env": parts.source.close,
            "container": parts.container_factory.close,
        }
        return Made(parts, settings, [close for group, close in closing.items() if not is_object(group)])

    def _check_overrides(self) -> None:
        """Refuses overrides without effect. Those that cannot be parsed are explained when they are composed."""
        from hydra.errors import OverrideParseException

        try:
            parsed = parse_overrides(self.overrides)
        except OverrideParseException:
            return
        for override in parsed:
            key = key_set_by(override)
            group = key.partition(".")[0].partition("/")[0]
            if group in self.values:
                raise ConfigError(f"`{group}` is an argument: write `{group}=…` outside of `overrides`.")
            owner = "env" if group == SCORER else group  # an option of scorers is a value of `env`
            if owner in self.parts:
                if not ((part := self.parts[owner]) is None or isinstance(part, str)):
                    raise ConfigError(
                        f"`{key}` has no effect where `{owner}` is no option but {type(part).__name__}: give that its "
                        "values itself."
                    )
            elif group not in EPISODE_KEYS and key != "hydra.searchpath":
                raise ConfigError(
                    f"`{key}` has no effect here: rollouts keep nothing on disk and retry nothing. Leave it out, or "
                    f"play a run, `ares_exp.run`. Expected a key of {', '.join(self.parts)}, `{SCORER}`, or "
                    f"one of {', '.join(EPISODE_KEYS)}."
                )


def _source(env: Any) -> SourceBase:
    """Returns the source that `env` is, or one of the environments that it makes."""
    if isinstance(env, EnvironmentSource):
        return as_source(env)
    if callable(env):
        return MadeEnvironments(env)
    if isinstance(env, MinimalEnvironment):
        raise ConfigError(
            f"Expected `env` to be a function that makes an environment, got an environment ({type(env).__name__}), "
            "which plays one episode at a time: `env=lambda: …`."
        )
    raise ConfigError(
        "Expected `env` to be an environment source, a function that makes an environment, or an option of `env`, got "
        f"{type(env).__name__}."
    )
