"""Hydra plugins that find and read option files. Their error messages name the file.

If a file omits an argument, the argument gets the default of the constructor in `_target_`. Each default is therefore
defined only once, and users can set and print every argument.
"""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from ares_exp.config.options import PROVIDER, ROOT_CONFIG, SCHEME, conf_dir, folder_url, installed_plugins
from ares_exp.config.schema import MADE_NODES
from ares_exp.config.targets import NO_VALUE, option_defaults
from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import MAX_YAML_BYTES

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_HEADER_CHARS = 512


class OptionSearchPath(SearchPathPlugin):
    """Adds the folders of options to Hydra's search path. Hydra creates an instance at each initialization.

    If several folders contain the same option, Hydra uses the first: ares_exp, then plugins, then the user's folders.
    """

    config_dirs: ClassVar[tuple[Path, ...]] = ()
    """The folders that the user names with `--config-dir`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Makes Hydra read `conf/` with `OptionFiles`, and appends the folders of plugins and of the user."""
        for element in search_path.get_path():
            if element.path in (str(conf_dir()), f"file://{conf_dir()}"):
                element.path = folder_url(conf_dir())
        for plugin in installed_plugins().plugins:
            search_path.append(provider=f"{PROVIDER} {plugin.name}", path=folder_url(plugin.folder))
        for folder in self.config_dirs:
            search_path.append(provider="command-line", path=folder_url(folder))


class OptionFiles(ConfigSource):
    """A folder of option files, as a source of configs for Hydra.

    Attributes:
        looked_at: The `file_stamp` of every file that Hydra has read or looked for since the composition started. A
            cached config is valid until one of these stamps changes.
    """

    looked_at: ClassVar[dict[Path, tuple[int, int, int] | None]] = {}

    @staticmethod
    def scheme() -> str:
        """Returns the URL scheme that identifies folders of options in Hydra's search path."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads an option file, and adds the defaults of the arguments that the file omits.

        Raises:
            ConfigLoadError: The file does not exist.
            ConfigError, yaml.YAMLError: The file is invalid. The message names the file.
        """
        path = self._file(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found: {path}")
        group = config_path.rpartition("/")[0]
        if path.is_relative_to(conf_dir()):
            config, package = pickle.loads(_read_our_own(path, group, file_stamp(path)))
        else:
            config, package = _read(path, group)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": package})

    def available(self) -> bool:
        """Whether the folder exists."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Whether the folder contains a subfolder with this path."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Whether the folder contains a config file with this path."""
        return self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Lists the options of a group, its subgroups, or both, depending on `results_filter`."""
        found = set()
        for path in Path(self.path, config_path).iterdir():
            if path.is_dir() and results_filter is not ObjectType.CONFIG and path.name != "__pycache__":
                found.add(path.name)
            if path.suffix == ".yaml" and path.is_file() and results_filter is not ObjectType.GROUP:
                found.add(path.stem)
        return sorted(found)

    def _file(self, config_path: str) -> Path:
        path = Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")
        self.looked_at.setdefault(path, file_stamp(path))
        return path


@functools.lru_cache
def _read_our_own(path: Path, group: str, stamp: object) -> bytes:
    """Returns the pickled result of `_read` for a file of ares_exp. Cached, which makes composing a third faster."""
    return pickle.dumps(_read(path, group))


def _read(path: Path, group: str) -> tuple[Any, str | None]:
    """Returns the content of a file with the defaults of omitted arguments, and its `# @package` (`None` if absent)."""
    if (size := path.stat().st_size) > MAX_YAML_BYTES:
        raise ConfigError(f"Expected the config file {path} to have at most {MAX_YAML_BYTES:,} bytes, got {size:,}.")
    try:
        with path.open(encoding="utf-8") as file:
            found = _PACKAGE.search(file.read(_HEADER_CHARS))
            file.seek(0)
            config = OmegaConf.load(file)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The config file {path} is not valid UTF-8: it contains the byte {error.object[error.start]:#04x}. "
            "Save it as UTF-8, or choose another file."
        ) from error
    except RecursionError as error:
        raise ConfigError(f"The config file {path} is nested too deeply. Use fewer levels.") from error
    if isinstance(config, DictConfig) and path == conf_dir() / f"{ROOT_CONFIG}.yaml":
        for node in MADE_NODES:
            config[node] = _completed(config[node], group=node)
    elif isinstance(config, DictConfig):
        config = _completed(config, group=group)
    return config, found and found[1]


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns the inode, size and modification time of a file, to detect a change. `None` if the file is missing."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _completed(option: DictConfig, *, group: str) -> DictConfig:
    target = option.get("_target_")
    if not isinstance(target, str):
        return option
    defaults = option_defaults(group, target, is_partial=bool(option.get("_partial_")))
    first = {str(key): None for key in option if str(key).startswith("_")}
    completed: Any = OmegaConf.merge(OmegaConf.create(first), defaults, option)
    for key in option:
        if OmegaConf.is_missing(option, key):  # required, although the constructor has a default
            completed[key] = NO_VALUE
    return cast("DictConfig", completed)
