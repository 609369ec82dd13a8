"""The config trees of plugins in Hydra's search path, after the own one: of two with the same option that one wins."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ares_exp.plugins import PROVIDER, installed_plugins


class PluginSearchPath(SearchPathPlugin):
    """What Hydra asks whenever it is initialised, once it is registered with it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends a folder for each plugin. `--config-dir` comes after them."""
        for plugin in installed_plugins().plugins:
            search_path.append(provider=f"{PROVIDER} {plugin.name}", path=f"file://{plugin.folder}")
