"""Hydra: its setup, its plugins that read option files, the composition of configs in Python, and its records.

If an option file omits an argument, the argument gets the default of the constructor in `_target_`. Each default is
therefore defined only once, and users can set and print every argument. Error messages name the file. Hydra's records
are the files that Hydra writes to `.hydra`.
"""

from __future__ import annotations

import functools
import pickle
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.explain import explain
from ares_exp.config.options import PROVIDER, ROOT_CONFIG, SCHEME, conf_dir, folder_url, installed_plugins
from ares_exp.config.overrides import listed, with_home
from ares_exp.config.schema import MADE_NODES, ExperimentConfig
from ares_exp.config.targets import NO_VALUE, option_defaults
from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import HYDRA_RECORDS, MAX_YAML_BYTES, RunDir, fresh_dir, write_atomically
from ares_exp.records.secrets import masked, scrub, typed_secrets

RECORDED_CONFIG = "recorded_run"
"""Name of the root config that `store_recorded_config` registers."""
NOTHING_TO_RESUME = (
    "`resume=true` continues the {what} in `{key}`, which is not set, so there is nothing to resume. Use "
    "`resume=<{what}>`, or `{key}=<{what}> resume=true` if the {what} may not have started."
)
ONE_AT_A_TIME = threading.Lock()
"""Lock that is held during composition, because Hydra's state is global."""
MAX_COMPOSED = 128
"""Maximum number of composed configs in the cache."""
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


def set_up_hydra(config_dirs: Sequence[Path] | None = None) -> None:
    """Registers the schema, the resolvers, and the folders of options with Hydra.

    `config_dirs` replaces the user's folders of options. `None` keeps the current folders.
    """
    register_resolvers()
    ConfigStore.instance().store(name="ares_exp_schema", node=ExperimentConfig, provider="ares_exp")
    for plugin in (OptionFiles, OptionSearchPath):
        Plugins.instance().register(plugin)
    if config_dirs is not None:
        OptionSearchPath.config_dirs = tuple(folder.absolute() for folder in config_dirs)


def register_resolvers() -> None:
    """Registers with OmegaConf the `${…}` resolvers that `conf/config.yaml` uses. Can be called repeatedly."""
    OmegaConf.register_new_resolver("fresh_dir", fresh_dir, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("hydra_records", hydra_records, replace=True)


def is_fresh_dir(node: Any) -> bool:
    """Returns whether Hydra's node `run` or `sweep` has the default directory, a new one. Does not create it."""
    unresolved: Any = OmegaConf.to_container(node, resolve=False)
    return "${fresh_dir:" in str(unresolved["dir"])


def hydra_records(resume: bool, run_dir: str | None) -> str | None:
    """Returns the folder name for Hydra's record of the config; `None` for a resumed run, to keep its record."""
    started = resume and run_dir is not None and RunDir(Path(run_dir)).has_run
    return None if started else HYDRA_RECORDS


def store_recorded_config(values: Mapping[str, Any], choices: Mapping[str, str]) -> str:
    """Registers a root config that contains the recorded values of a run. Returns the name of this config.

    Hydra composes this config instead of the default root config. For a group without a recorded value, Hydra uses the
    option on the command line or the default option. `choices` maps each group to the name of its recorded option.
    """
    root = yaml.safe_load((conf_dir() / f"{ROOT_CONFIG}.yaml").read_text(encoding="utf-8"))
    recorded = {*values, "experiment"}
    defaults = [one for one in root["defaults"] if not (isinstance(one, dict) and recorded & {*one})]
    runtime = {"choices": {group: option for group, option in choices.items() if group in recorded}}
    node = {**root, **values, "defaults": defaults, "hydra": {**root["hydra"], "runtime": runtime}}
    ConfigStore.instance().store(name=RECORDED_CONFIG, node=OmegaConf.create(node), provider="ares_exp")
    return RECORDED_CONFIG


_Composed = tuple[bytes, Mapping[Path, object]]
"""A pickled config (unpickling is faster than copying), and the `file_stamp` of every file of the config."""

_composed: dict[object, _Composed] = {}


def compose_config(overrides: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> DictConfig:
    """Composes the config of overrides such as `env.path=tasks`, without the `hydra` node. Does not write files.

    Composing takes some tenths of a second, so configs are cached until one of their files changes. The caller may
    change the returned config.

    Raises:
        ConfigError: The overrides do not compose. The message explains why.
    """
    folders = tuple(folder.absolute() for folder in config_dirs)
    plugins = tuple(plugin.folder for plugin in installed_plugins().plugins)
    overrides = with_home(overrides)
    key = tuple(overrides), folders, OptionSearchPath.config_dirs, plugins
    with ONE_AT_A_TIME:
        composed = _composed.pop(key, None)
        if composed is None or any(file_stamp(path) != stamp for path, stamp in composed[1].items()):
            composed = _compose(overrides, folders)
        _composed[key] = composed  # the most recently used config is at the end
        if len(_composed) > MAX_COMPOSED:
            del _composed[next(iter(_composed))]
    config: DictConfig = pickle.loads(composed[0])
    return config


def _compose(overrides: Sequence[str], folders: Sequence[Path]) -> _Composed:
    places = [f"hydra.searchpath={listed(folder_url(one) for one in folders)}"] if folders else []
    set_up_hydra()
    OptionFiles.looked_at.clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = compose(ROOT_CONFIG, overrides=[*places, *overrides])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        said = explain(error, [*places, *overrides], ROOT_CONFIG, OptionSearchPath.config_dirs)
        raise ConfigError(said) from None  # the chained traceback has 200 lines
    return pickle.dumps(config), dict(OptionFiles.looked_at)


def _is_clean(path: Path) -> bool:
    """Returns whether a YAML file contains nothing that must be masked. Uses the fastest available loader."""
    loader = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader  # both load every value as a string
    data = yaml.load(path.read_bytes(), loader)
    return bool(scrub({"root": data})["root"] == data)


def scrub_hydra_records(folder: Path, overrides: Sequence[str]) -> None:
    """Masks secrets in the YAML files of a `.hydra` folder, including the values of sensitive `overrides`."""
    typed = typed_secrets(overrides)
    for path in sorted(folder.glob("*.yaml")):
        if typed or not _is_clean(path):
            write_atomically(path, yaml_without_secrets(OmegaConf.load(path), typed))


def yaml_without_secrets(config: DictConfig | ListConfig, typed: Iterable[str]) -> str:
    """Returns a config as YAML in which secrets are masked, also the secrets in `typed`."""
    clean = scrub({"root": OmegaConf.to_container(config)})["root"]
    return masked(OmegaConf.to_yaml(OmegaConf.create(clean)), typed)
