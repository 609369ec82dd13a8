"""The classes that the options of a group name in `_target_`, plugins included.

The options are the only table of backends and agents: code that needs one by name looks here. Names from anywhere else
are never imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from ares_exp.config.options import ROOT_CONFIG, conf_dir, find_options
from ares_exp.config.parts import import_name
from ares_exp.config.plugins import OPTION_FOLDERS, installed_plugins
from ares_exp.errors import ConfigError, close_matches

_CLASS = re.compile(r"""_target_["']?\s*:\s*["']?([\w.]+)""")


def option_targets(group: str, config_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Reads the `_target_` of each option of a group, by the option's name, those of the user's folders included."""
    import yaml

    found: dict[str, str] = {}
    for option in find_options(group, config_dirs):
        with suppress(OSError, ValueError, yaml.YAMLError):
            node = yaml.safe_load(option.path.read_text())
            if isinstance(node, dict) and isinstance(target := node.get("_target_"), str):
                found[option.name] = target
    return found


def classes_of_options(config_dirs: Sequence[Path] = ()) -> frozenset[str]:
    """Returns the dotted names of all classes that the options of ares_exp, plugins and `config_dirs` name."""
    found: set[str] = set()
    for folder in (conf_dir(), *(plugin.folder for plugin in installed_plugins().plugins), *config_dirs):
        for path in (one for group in OPTION_FOLDERS for one in (folder / group).rglob("*.yaml")):
            with suppress(OSError):
                found.update(_CLASS.findall(path.read_text(encoding="utf-8", errors="replace")))
    found.update(_CLASS.findall((conf_dir() / f"{ROOT_CONFIG}.yaml").read_text(encoding="utf-8")))
    return frozenset(found)


def import_target(target: str) -> Any:
    """Imports the class or function that an option's `_target_` names.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        return resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        why = explain_target(target) or f"it cannot be imported: {error}."
        raise ConfigError(f"`{target}` is not to be had: {why}") from error


def explain_target(target: str) -> str | None:
    """Says why a dotted name cannot be imported, and where it was looked for; `None` if it can be, or is none."""
    *path, _ = parts = target.split(".")
    if not path or not all(part.isidentifier() for part in parts):
        return None
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                return f"`{name}` cannot be imported: {error}."  # a module that it imports
        except Exception as error:  # anybody's module may raise anything
            return f"`{name}` cannot be imported: {type(error).__name__}: {error}"
        else:
            return _explain_attribute(module, parts[length])
    return (
        f"there is no module `{path[0]}` for `{target}`. Looked for in {Path.cwd()}, in the folders of PYTHONPATH and "
        f"among the packages of {sys.prefix}. Start the command where the module is, or name its folder in PYTHONPATH."
    )


def _explain_attribute(module: ModuleType, name: str) -> str | None:
    if hasattr(module, name):
        return None
    place = f" ({module.__file__})" if module.__file__ else ""
    known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
    return f"the module `{module.__name__}`{place} has no `{name}`.{close_matches(name, known)}"


def find_part(group: str, name: str) -> Any:
    """Imports what an option of a group makes its parts from.

    Args:
        group: The group.
        name: The `import_name` of the class, as records have it; or the option's `_target_`.

    Returns:
        The class or function; `None` where no option is made from it.
    """
    targets = option_targets(group).values()
    if name in targets:
        return import_target(name)
    for target in targets:  # a package may show its class under a shorter name than it has
        if target.partition(".")[0] == name.partition(".")[0]:
            with suppress(ConfigError):
                if import_name(part := import_target(target)) == name:
                    return part
    return None
