"""The setup of Hydra, the composition of configs in Python code, and the files in `.hydra` that Hydra writes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ares_exp.config.explain import explain
from ares_exp.config.option_files import OptionFiles, OptionSearchPath, file_stamp
from ares_exp.config.options import ROOT_CONFIG, conf_dir, folder_url, installed_plugins
from ares_exp.config.overrides import listed, with_home
from ares_exp.config.schema import ExperimentConfig
from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import HYDRA_RECORDS, RunDir, fresh_dir, write_atomically
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
        raise ConfigError(explain(error, [*places, *overrides])) from None  # the chained traceback has 200 lines
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
