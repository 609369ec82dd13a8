"""What Hydra has to know before the config can be composed, and the composing of a part of it outside a command."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

_one_at_a_time = threading.Lock()
"""Hydra keeps what it composes from in one global place."""


def set_up_hydra() -> None:
    """Tells Hydra of the schema, of `${…}`, and of the config trees of plugins; more than once does no harm."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    from ares_exp.config import ExperimentConfig
    from ares_exp.hydra_option_files import read_option_files
    from ares_exp.hydra_resolvers import register_resolvers
    from ares_exp.plugin_search_path import PluginSearchPath

    register_resolvers()
    ConfigStore.instance().store(name="ares_exp_schema", node=ExperimentConfig, provider="ares_exp")
    Plugins.instance().register(PluginSearchPath)
    read_option_files()


def compose_config(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> DictConfig:
    """The config that these overrides make, without Hydra's own part: nothing is run and nothing is written.

    Args:
        overrides: As on a command line.
        config_dirs: Folders of options, as `--config-dir`.

    Raises:
        ConfigError: They do not compose; the message says why.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from ares_exp.cli_errors import explain
    from ares_exp.conf_dir import conf_dir
    from ares_exp.errors import ConfigError
    from ares_exp.override_text import listed

    folders = [f"hydra.searchpath={listed(f'file://{one.absolute()}' for one in config_dirs)}"] if config_dirs else []
    with _one_at_a_time:
        set_up_hydra()
        try:
            with initialize_config_dir(str(conf_dir()), version_base="1.3"):
                return compose("config", overrides=[*folders, *overrides])
        except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            raise ConfigError(explain(error, overrides)) from error
