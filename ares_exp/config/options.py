"""The options of each group, and their origins: ares_exp itself, a plugin, or one of the user's folders.

If several options have the same name, the option of ares_exp takes precedence, then the option of a plugin. This is the
order of Hydra's search path.

A plugin is an installed package with an entry point in the group `ares_exp.plugins`. The value of the entry point is
the dotted name of a folder in the package:

```toml
[project.entry-points."ares_exp.plugins"]
nim = "ares_nim.conf"
```

The folder is a config tree like `conf/`. For example, `env/nim.yaml` becomes `env=nim`, and its `_target_` names a
class of the package. The folder may contain only groups. Plugins cannot change the root config or the settings of
Hydra, and cannot replace an option of ares_exp. ares_exp finds plugins without importing them.
"""

from __future__ import annotations

import filecmp
import functools
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ares_exp.config.schema import GROUPS
from ares_exp.errors import ConfigError, close_matches

BUILT_IN = "built in"
SCHEME = "options"
"""URL scheme for the folders of options in Hydra's search path."""
MAX_COMMENT_CHARS = 65536
ROOT_CONFIG = "config"
"""Name of the root config, without `.yaml`."""
EXTRAS = {
    **dict.fromkeys([f"hydra/launcher={name}" for name in ("joblib", "submitit_local", "submitit_slurm")], "sweep"),
    "hydra/sweeper=optuna": "optuna",
}
"""For each option of Hydra that needs a plugin of Hydra, the extra of ares_exp that installs this plugin."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a group, which users choose with `group=name`.

    Attributes:
        origin: `built in`, `plugin NAME`, or the folder of a `--config-dir`.
        description: The first comment in the file; may be empty.
    """

    group: str
    name: str
    path: Path
    origin: str
    description: str


def conf_dir() -> Path:
    """Returns the folder that contains `config.yaml`. Raises `FileNotFoundError` if the installation is broken."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"The config tree {package / 'conf'} is missing. Install ares_exp again.")


def folder_url(folder: Path) -> str:
    """Returns the URL that Hydra's search path uses for a folder of options."""
    return f"{SCHEME}://{folder}"


def find_options(group: str, config_dirs: Sequence[Path] = ()) -> list[Option]:
    """Lists the options of a group in order of precedence. If several have the same name, lists only the first."""
    found: dict[str, Option] = {}
    for option in _every_option(group, config_dirs):
        found.setdefault(option.name, option)
    return list(found.values())


def config_dirs_of(argv: Sequence[str]) -> list[Path]:
    """Returns the folders in the `--config-dir` flags of a command line."""
    found = [argument.partition("=")[2] for argument in argv if argument.startswith("--config-dir=")]
    found += [after for flag, after in pairwise(argv) if flag in ("--config-dir", "-cd")]
    return [Path(folder) for folder in found]


def refuse_unreadable(config_dirs: Sequence[Path]) -> str | None:
    """Returns an error message for the first folder of options that exists but cannot be read, if any."""
    for folder in config_dirs:
        for place in (folder / group for group in OPTION_GROUPS):
            try:
                list(place.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                return f"Cannot read the options in {place} (--config-dir): {error.strerror}."
    return None


def no_option(option: str, group: str, options: Sequence[str]) -> str:
    """Returns the error message for a name that is not an option of a group.

    If an extra of ares_exp provides the option, the message contains the command that installs the extra. Otherwise, it
    lists the existing options.
    """
    if extra := EXTRAS.get(f"{group}={option}"):
        return f"`{group}={option}` needs a package that is not installed: pip install 'ares-exp[{extra}]'."
    known = f"{close_matches(option, options)} Options: {', '.join(options)}."
    return f"There is no option `{option}` in the group `{group}`.{known}"


def option_problems(config_dirs: Sequence[Path] = ()) -> list[str]:
    """Describes each broken plugin, each ignored option, and each root config in `config_dirs` (always ignored).

    An option is ignored if an earlier folder has an option with this name. An identical copy is not a problem.
    """
    problems = [*installed_plugins().problems]
    for group in OPTION_GROUPS:
        counts: dict[str, Option] = {}
        for option in _every_option(group, config_dirs):
            owner = counts.setdefault(option.name, option)
            if owner is not option and not _same(owner.path, option.path):
                problems.append(
                    f"`{group}={option.name}` of {_said(option)} is ignored: {_said(owner)} has an option of "
                    f"that name, which takes precedence. Rename {option.path}."
                )
    problems += [
        f"{own} is ignored: the root config of ares_exp cannot be replaced. Move its values to "
        f"{folder / 'experiment'}/NAME.yaml, and choose it with `experiment=NAME`."
        for folder in config_dirs
        if (own := folder / f"{ROOT_CONFIG}.yaml").is_file() and not _same(own, conf_dir() / own.name)
    ]
    return problems


def print_problems(config_dirs: Sequence[Path] = ()) -> None:
    """Prints the result of `option_problems` to stderr."""
    for problem in option_problems(config_dirs):
        sys.stderr.write(f"warning: {problem}\n")


def log_problems(config_dirs: Sequence[Path] = ()) -> None:
    """Logs the result of `option_problems`. Each problem is logged once per process."""
    for problem in option_problems(config_dirs):
        _log(problem)


@functools.cache
def _log(problem: str) -> None:
    _logger.warning("%s", problem)


def _every_option(group: str, config_dirs: Sequence[Path]) -> list[Option]:
    """Lists all options of a group in the order of the search path, including options with the same name."""
    plugins = installed_plugins().plugins
    places = [(conf_dir(), BUILT_IN), *((plugin.folder, f"plugin {plugin.name}") for plugin in plugins)]
    places += [(folder, str(folder)) for folder in config_dirs]
    return [
        Option(group, path.stem, path, origin, _first_comment(path))
        for folder, origin in places
        for path in sorted((folder / group).glob("*.yaml"))
        if path.is_file()
    ]


def _said(option: Option) -> str:
    """Returns the origin of an option for a message: ares_exp, a plugin, or a folder."""
    if option.origin == BUILT_IN:
        return "ares_exp itself"
    kind, _, name = option.origin.partition(" ")
    return f"the plugin `{name}`" if kind == "plugin" else option.origin


def _same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return filecmp.cmp(one, other, shallow=False)
    return False


def _first_comment(path: Path) -> str:
    """Reads the description at the top of a file. Returns `""` if there is none, or if the file cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(MAX_COMMENT_CHARS).splitlines()
    except OSError:
        return ""
    no_text = ("# @package", "# file:")  # examples in the docs start with the path of the file
    return next((line[2:] for line in lines if line.startswith("# ") and not line.startswith(no_text)), "")


ENTRY_POINTS = "ares_exp.plugins"
PROVIDER = "ares_exp plugin"
"""Prefix of a plugin's name in Hydra's list of config sources. Hydra records this list for each run."""
OPTION_GROUPS = (*GROUPS, "experiment")

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin. `package` is the name and version of the installed package, and `folder` contains the options."""

    name: str
    package: str
    folder: Path


@dataclass(frozen=True, slots=True)
class InstalledPlugins:
    """The plugins of this Python environment, sorted by name, and one sentence for each broken plugin."""

    plugins: tuple[Plugin, ...]
    problems: tuple[str, ...]


def installed_plugins() -> InstalledPlugins:
    """Finds the plugins on Python's module search path."""
    return _installed(tuple(sys.path))


@functools.cache  # a command composes several times
def _installed(_search_path: tuple[str, ...]) -> InstalledPlugins:
    found: dict[str, Plugin] = {}
    problems: list[str] = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda one: (one.name, one.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist and entry.dist.name else "an unknown package"
        try:
            if entry.name in found:
                raise ConfigError(f"{found[entry.name].package} already has a plugin with this name")
            found[entry.name] = Plugin(entry.name, package, _conf_tree(entry.value))
        except ConfigError as broken:
            problems.append(f"The plugin `{entry.name}` of {package} is ignored: {broken}.")
    return InstalledPlugins(tuple(found.values()), tuple(problems))


def _conf_tree(value: str) -> Path:
    """Returns the folder that the entry point `value` names, without importing the package.

    Raises:
        ConfigError: The folder is missing, or its content is not allowed.
    """
    if not _MODULE.fullmatch(value):
        raise ConfigError(f"its entry point must be the dotted name of a folder, got {value!r}")
    top, *below = value.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except Exception as error:  # third-party finders can raise any exception
        raise ConfigError(f"`{top}` cannot be found: {type(error).__name__}: {error}") from error
    places = [Path(place, *below) for place in (spec.submodule_search_locations or ()) if place] if spec else []
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise ConfigError(f"`{value}` is not a folder of an installed package")
    try:
        stray = sorted(path.name for path in folder.glob("*.yaml"))
        options = [path for group in OPTION_GROUPS for path in (folder / group).glob("*.yaml")]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    if stray or (folder / "hydra").exists():
        raise ConfigError(
            f"{folder} contains {stray[0] if stray else 'hydra/'}, but may contain only folders of options such as env/"
        )
    if not options:
        raise ConfigError(f"{folder} contains no file with an option, such as env/NAME.yaml")
    return folder
