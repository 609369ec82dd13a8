"""Plugins: installed packages that bring options of their own, such as environments, agents and policies.

Such a package has an entry point in the group `ares_exp.plugins` whose value is the dotted name of a folder in it:

```toml
[project.entry-points."ares_exp.plugins"]
nim = "ares_nim.conf"
```

The folder is a config tree as `conf/` is: `env/nim.yaml` becomes `env=nim`, and its `_target_` names a class of the
package. It holds groups alone; the root config and Hydra's own set-up are not a plugin's. An option that ares_exp has
itself is never replaced. Finding plugins imports none of them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ares_exp.config.schema import GROUPS, TRAINER

ENTRY_POINTS = "ares_exp.plugins"
PROVIDER = "ares_exp plugin"
"""Prefix of a plugin's name in Hydra's records, as the provider of options."""
OPTION_GROUPS = (*GROUPS, "experiment")
OPTION_FOLDERS = (*OPTION_GROUPS, TRAINER)

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Plugin:
    """Options that an installed package adds.

    Attributes:
        name: Of the entry point.
        package: Name and version of the package, for people.
        folder: The config tree.
    """

    name: str
    package: str
    folder: Path


@dataclass(frozen=True, slots=True)
class InstalledPlugins:
    """The plugins of this Python.

    Attributes:
        plugins: Those that can be used, by name.
        problems: A sentence for each plugin that is left out.
    """

    plugins: tuple[Plugin, ...]
    problems: tuple[str, ...]


class _BrokenPluginError(Exception):
    """Why a plugin is left out."""


def installed_plugins() -> InstalledPlugins:
    """Looks for plugins where Python looks for modules. A broken plugin is reported as a problem, not raised."""
    return _installed(tuple(sys.path))


@functools.cache  # a command composes more than once
def _installed(_search_path: tuple[str, ...]) -> InstalledPlugins:
    found: dict[str, Plugin] = {}
    problems: list[str] = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda one: (one.name, one.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist and entry.dist.name else "an unknown package"
        try:
            if entry.name in found:
                raise _BrokenPluginError(f"{found[entry.name].package} has a plugin of that name")
            found[entry.name] = Plugin(entry.name, package, _conf_tree(entry.value))
        except _BrokenPluginError as broken:
            problems.append(f"The plugin `{entry.name}` of {package} is left out: {broken}.")
    return InstalledPlugins(tuple(found.values()), tuple(problems))


def _conf_tree(value: str) -> Path:
    """Finds the folder that an entry point names, without importing the package."""
    if not _MODULE.fullmatch(value):
        raise _BrokenPluginError(f"expected the dotted name of a folder in the package, got {value!r}")
    top, *below = value.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except Exception as error:  # a finder may be anybody's
        raise _BrokenPluginError(f"`{top}` cannot be found: {type(error).__name__}: {error}") from error
    places = [Path(place, *below) for place in (spec.submodule_search_locations or ()) if place] if spec else []
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise _BrokenPluginError(f"expected `{value}` to be a folder of an installed package, found none")
    _check_tree(folder)
    return folder


def _check_tree(folder: Path) -> None:
    try:
        stray = sorted(path.name for path in folder.glob("*.yaml"))
        options = [path for group in OPTION_FOLDERS for path in (folder / group).glob("*.yaml")]
    except OSError as error:
        raise _BrokenPluginError(f"{error.filename} cannot be read: {error.strerror}") from error
    if stray or (folder / "hydra").exists():
        raise _BrokenPluginError(
            f"expected nothing but groups in {folder}, found {stray[0] if stray else 'hydra/'}, which sets up more "
            "than an option"
        )
    if not options:
        raise _BrokenPluginError(
            f"expected an option in {folder}, such as env/NAME.yaml or policy/NAME.yaml, found none"
        )
