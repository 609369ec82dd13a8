"""`PresetGym`: any preset of the registry as a `gymnasium.Env`. It is what `ares_exp/Preset-v0` makes."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from ares_exp.containers.container import ContainerFactory
from ares_exp.presets.registry import make
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.wrappers.gym import GymWrapper
from ares_exp.wrappers.source_gym import container_factory, explained


class PresetGym(GymWrapper):
    """Plays what `ares_exp.make` makes: options of `env`, those of plugins included, and registered presets."""

    @explained
    @pydantic.validate_call(config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    def __init__(
        self,
        /,
        *,
        preset: str,
        container: Annotated[str | ContainerFactory, pydantic.PlainValidator(container_factory)] = "local",
        collector: TrajectoryCollector | None = None,
        render_mode: Literal["ansi"] | None = None,
        allow_running_loop: bool = False,
    ) -> None:
        """Reads the task set; starts nothing.

        Args:
            preset: `name`, or with a selector `name:5`, `name:0:10`, `name@2/8`; see `ares_exp.make`.
            container: An option of the `container` group (`"local"`, `"docker"`), or a factory with options of your
                own.
            collector: Keeps every episode.
            render_mode: `"ansi"`: `render()` gives the last exchange as text.
            allow_running_loop: Whether calls inside a running event loop may block it. For notebooks.

        Raises:
            ValueError, LookupError, UserError: As `ares_exp.make`.
        """
        environment = make(preset, container_factory=container_factory(container), trajectory_collector=collector)
        super().__init__(environment, render_mode=render_mode, allow_running_loop=allow_running_loop)
