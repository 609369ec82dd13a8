"""The classes that options name in `_target_`: their import, their arguments, and their instances.

The options of ares_exp and of plugins are the only registry of backends and agents. Code that looks up a class by name
uses this module. It imports a name, for example from a record, only if an option contains the name. No other module
inspects constructors. Error messages about arguments contain the arguments' config keys.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ares_exp.config.options import OPTION_GROUPS, ROOT_CONFIG, Option, conf_dir, find_options, installed_plugins
from ares_exp.config.parts import import_name
from ares_exp.errors import ConfigError, close_matches
from ares_exp.records.secrets import scrub

if TYPE_CHECKING:
    from omegaconf import DictConfig


_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
_IN_YAML = {"`None`": "`null`", "`True`": "`true`", "`False`": "`false`"}
_CLASS = re.compile(r"""_target_["']?\s*:\s*["']?([\w.]+)""")
NO_VALUE = "???"
"""OmegaConf's marker of a required value."""
AGENT, SCORER = "agent", "scorer"

ADDED_ARGUMENTS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "env": {
        "scorers": (
            None,
            "additional scorers: functions `[package.module.function]`, or scorers by name (docs/scoring.md)",
        ),
        "verifier_weight": (1.0, "weight of the environment's own reward in the weighted sum with the scores"),
    },
    SCORER: {
        "name": (None, "name of the scorer's rewards; null uses the name of the function or class"),
        "weight": (1.0, "weight of the scores in the episode's reward; 0 only records the scores"),
        "timeout_sec": (600.0, "time limit in seconds for scoring one episode"),
    },
}
"""Default and description of each argument that the options of a group have in addition to those of their class.

The run uses these arguments itself, and does not pass them to the class.
"""


def added_defaults(group: str) -> dict[str, Any]:
    """Returns the default values of the arguments that `ADDED_ARGUMENTS` adds to each option of a group."""
    return {name: default for name, (default, _) in ADDED_ARGUMENTS.get(group, {}).items()}


def parameters_of(target: str) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a class or function; `None` if it has no signature or cannot be imported."""
    try:
        return inspect.signature(resolve_name(target)).parameters
    except Exception:  # the import of a third-party module may raise anything
        return None


def option_targets(group: str, config_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the `_target_` of each option of a group by the option's name, including options in `config_dirs`."""
    import yaml

    found: dict[str, str] = {}
    for option in find_options(group, config_dirs):
        with suppress(OSError, ValueError, yaml.YAMLError):
            node = yaml.safe_load(option.path.read_text())
            if isinstance(node, dict) and isinstance(target := node.get("_target_"), str):
                found[option.name] = target
    return found


def classes_of_options(config_dirs: Sequence[Path] = ()) -> frozenset[str]:
    """Returns the dotted name of every class in the options of ares_exp, of plugins and of `config_dirs`."""
    found: set[str] = set()
    for folder in (conf_dir(), *(plugin.folder for plugin in installed_plugins().plugins), *config_dirs):
        for path in (one for group in OPTION_GROUPS for one in (folder / group).rglob("*.yaml")):
            with suppress(OSError):
                found.update(_CLASS.findall(path.read_text(encoding="utf-8", errors="replace")))
    found.update(_CLASS.findall((conf_dir() / f"{ROOT_CONFIG}.yaml").read_text(encoding="utf-8")))
    return frozenset(found)


def import_target(target: str) -> Any:
    """Imports the class or function that a `_target_` names. Raises `ConfigError` if the import fails."""
    try:
        return resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        why = explain_target(target) or f"it cannot be imported: {error}."
        raise ConfigError(f"`{target}` cannot be imported: {why}") from error


def explain_target(target: str) -> str | None:
    """Returns the reason why a dotted name cannot be imported; `None` if it can be imported."""
    *path, _ = parts = target.split(".")
    if not path or not all(part.isidentifier() for part in parts):
        return None
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                return f"`{name}` cannot be imported: {error}."  # a missing dependency of the module
        except Exception as error:  # a third-party module can raise any exception
            return f"`{name}` cannot be imported: {type(error).__name__}: {error}"
        else:
            if hasattr(module, parts[length]):
                return None
            place = f" ({module.__file__})" if module.__file__ else ""
            known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
            return f"the module `{name}`{place} has no `{parts[length]}`.{close_matches(parts[length], known)}"
    return (
        f"there is no module `{path[0]}` for `{target}` in {Path.cwd()}, in the folders of PYTHONPATH or among the "
        f"packages of {sys.prefix}. Start the command in the folder of the module, or add this folder to PYTHONPATH."
    )


def find_part(group: str, name: str) -> Any:
    """Imports a class or function by its `import_name` or `_target_`; `None` if no option of the group uses it."""
    targets = option_targets(group).values()
    if name in targets:
        return import_target(name)
    for target in targets:  # a package may export its class under a shorter name
        if target.partition(".")[0] == name.partition(".")[0]:
            with suppress(ConfigError):
                if import_name(part := import_target(target)) == name:
                    return part
    return None


def option_defaults(group: str, target: str, *, is_partial: bool = False) -> dict[str, Any]:
    """Returns the defaults of an option's arguments: the defaults of the constructor and of `ADDED_ARGUMENTS`.

    If the option has `_partial_: true`, the run passes further arguments later. For an agent, the result then omits
    arguments without a default. For other groups, it is then empty, because the passed arguments are unknown.
    """
    if is_partial:
        known = constructor_defaults(target) if group == AGENT else {}
        return {name: value for name, value in known.items() if value != NO_VALUE}
    own = constructor_defaults(target)
    if group == SCORER and own and not inspect.isclass(resolve_name(target)):
        given = [*(parameters_of(target) or ())][:2]  # a function gets the episode and the container in each call
        own = {name: value for name, value in own.items() if name not in given}
    return {**own, **added_defaults(group)}


def constructor_defaults(target: str) -> dict[str, Any]:
    """Returns the defaults of a constructor's arguments. Required arguments have the value `???`.

    Omits arguments whose defaults a config cannot represent, such as a clock. The result is empty if the target cannot
    be imported.
    """
    parameters = (parameters_of(target) or {}).values()
    named = [one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    defaults = {one.name: NO_VALUE if one.default is one.empty else _plain(one.default) for one in named}
    return {name: value for name, value in defaults.items() if value is not ...}


def _plain(value: Any) -> Any:
    """Converts a default to a value for a config. Returns `...` if a config cannot represent the default."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        held = {str(key): _plain(item) for key, item in value.items()}
        return ... if any(item is ... for item in held.values()) else held
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in value]
        return ... if any(item is ... for item in items) else items
    if isinstance(value, str):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float) else ...


def documented(target: str) -> dict[str, str]:
    """Returns the description of each argument, from the docstrings of a function, or of a class and its bases."""
    try:
        made: Any = resolve_name(target)
    except Exception:  # the import of a third-party module can raise any exception
        return {}
    kinds = reversed(made.__mro__) if inspect.isclass(made) else ()
    objects = [one for kind in kinds for one in (kind, vars(kind).get("__init__"))] or [made]
    found: dict[str, str] = {}
    for section in (text for one in objects for text in _SECTION.findall(inspect.getdoc(one) or "")):
        for entry in re.split(r"\n(?= {4}\S)", section.rstrip()):
            names, _, said = entry.strip().partition(":")
            for python, in_yaml in _IN_YAML.items():
                said = said.replace(python, in_yaml)
            found |= {name.strip(" *"): " ".join(said.split()) for name in names.split(",")}
    return found


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an option: the dotted key, the default as YAML, and the description, which may be empty.

    Values in the option's file override the defaults of the constructor. The description is the comment on the line of
    the argument in the file. If there is no comment, it is the entry in the constructor's docstring.
    """

    key: str
    default: str
    prose: str


def arguments_of(option: Option) -> list[Argument]:
    """Returns the arguments of an option. An experiment has none, because it sets top-level keys instead.

    Raises `OSError` or `yaml.YAMLError` if the option's file cannot be read.
    """
    package = re.search(r"^# @package (\S+)", option.path.read_text(encoding="utf-8"), re.MULTILINE)
    if package and package[1] == "_global_":
        return []
    return _arguments_of(option.group, package[1] if package else option.group, *_settings(option.path))


def arguments_of_node(name: str) -> list[Argument]:
    """Reads the arguments of a root config node that has a `_target_`, such as `budget`."""
    settings, comments = _settings(conf_dir() / f"{ROOT_CONFIG}.yaml")
    own = {key.removeprefix(f"{name}."): said for key, said in comments.items() if key.startswith(f"{name}.")}
    return _arguments_of(name, name, settings[name], own)


def _arguments_of(group: str, prefix: str, settings: Mapping[str, Any], comments: Mapping[str, str]) -> list[Argument]:
    target = settings.get("_target_")
    own = {name: value for name, value in settings.items() if not name.startswith("_")}
    if not isinstance(target, str):
        return list(_arguments(own, prefix, comments, {}))
    added = {name: prose for name, (_, prose) in ADDED_ARGUMENTS.get(group, {}).items()}
    defaults = {**option_defaults(group, target, is_partial=bool(settings.get("_partial_"))), **own}
    return list(_arguments(defaults, prefix, comments, {**added, **documented(target)}))


def _arguments(
    settings: Mapping[str, Any], prefix: str, comments: Mapping[str, str], prose: Mapping[str, str], path: str = ""
) -> Iterator[Argument]:
    for name, value in settings.items():
        here = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from _arguments(value, prefix, comments, prose, f"{here}.")
        else:
            top = here.partition(".")[0]
            said = comments.get(here) or prose.get(here) or comments.get(top) or prose.get(top, "")
            yield Argument(f"{prefix}.{here}", as_yaml(value), said)


def _settings(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads a file and the files in its defaults list. Returns the file's content, and its comments by dotted key."""
    import yaml

    text = path.read_text(encoding="utf-8")
    own = yaml.safe_load(text) or {}
    settings: dict[str, Any] = {}
    comments: dict[str, str] = {}
    for entry in own.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_" and (path.parent / f"{entry}.yaml").exists():
            more, said = _settings(path.parent / f"{entry}.yaml")
            settings |= more
            comments |= said
    for name, value in own.items():
        before = settings.get(name)
        settings[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return settings, comments | _comments(text)


def _comments(text: str) -> dict[str, str]:
    """Reads the comment on the line of each `name: value`. The keys of the result are dotted names."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = re.match(r"^( *)(\w+):(?: (?:[^#]|(?<! )#)*?)?(?:\s+# (.*))?$", line)
        if match is None:
            continue
        indent = len(match[1])
        path = [*(item for item in path if item[0] < indent), (indent, match[2])]
        if match[3]:
            found[".".join(name for _, name in path)] = match[3]
    return found


def as_yaml(value: Any) -> str:
    """Formats a default value as one line of YAML."""
    import yaml

    if isinstance(value, str):
        return value or '""'
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).replace("\n...\n", "").strip()


_MADE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "env": ("an environment source", ("path", "load", "check", "make")),
    "agent": ("a factory of code agents", ("__call__",)),
    "container": ("a container factory", ("__call__", "check")),
    "wrapper": ("a wrapper of environments", ("__call__",)),
    "collector": ("a trajectory collector", ("begin_episode", "record_step", "end_episode")),
    "tracker": ("a tracker", ("start", "log_episode", "finish")),
    "snapshot": ("a snapshot schedule", ("output_dir", "is_only_to_continue", "around", "collect_garbage")),
    "executor": ("an executor", ("checks", "open", "room")),
}
"""For each group, a description of the part that its options must create, and the members that it must have."""

_OF_AN_AGENT = {"container", "llm_client"}
"""Arguments that an agent gets for each episode. A class with both arguments is an agent, not a factory of agents."""


def instantiate_several(config: DictConfig, group: str) -> dict[str, Any]:
    """Creates the components of a group that accepts several options (`group=[a,b]`). Returns them by name."""
    node = config.get(group)
    if not node or not isinstance(node, Mapping) or "_target_" in node:
        return {group: instantiate_group(config, group)}
    return {str(name): _checked(group, instantiate_node(config, f"{group}.{name}")) for name in node}


def instantiate_group(config: DictConfig, group: str) -> Any:
    """Creates the component that the config node of a group describes, for example the policy.

    Raises:
        ConfigError: An argument is unknown, missing or invalid, or the component lacks required members.
    """
    return _checked(group, instantiate_node(_without_added(config, group), group))


def _without_added(config: DictConfig, group: str) -> DictConfig:
    """Returns the config without the group's `ADDED_ARGUMENTS`, because the classes of the group do not accept them."""
    from omegaconf import OmegaConf, open_dict

    node = OmegaConf.select(config, group)
    added = [name for name in added_defaults(group) if OmegaConf.is_dict(node) and name in node]
    if not added:
        return config
    config = config.copy()
    with open_dict(config[group]):
        for name in added:
            config[group].pop(name)
    return config


def _checked(group: str, made: Any) -> Any:
    """Returns the component `made`. Raises `ConfigError` if it lacks a member that its group requires (`_MADE`)."""
    what, members = _MADE.get(group, ("", ()))
    if lacking := [name for name in members if not hasattr(made, name)]:
        raise ConfigError(
            f"Expected the option of `{group}` to create {what}, got {type(made).__name__}, which has no "
            f"{', '.join(f'`{name}`' for name in lacking)}. Check the `_target_` of the option."
        )
    return made


def instantiate_node(config: DictConfig, group: str) -> Any:
    """Creates the component that a config node describes. `group` is the node's key, such as `env` or `scorer.mine`.

    Raises:
        ConfigError: No option is chosen, or an argument is unknown, missing or invalid.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from pydantic import ValidationError

    node = OmegaConf.select(config, group)
    if not node:
        raise ConfigError(f"No option is chosen for `{group}`. Set `{group}=…`. `--help {group}` lists the options.")
    if not OmegaConf.is_dict(node) or "_target_" not in node:
        raise ConfigError(f"The chosen option of `{group}` has no `_target_`. Set `_target_` to the class to create.")
    keys = {str(key) for key in node}  # `key in node` leaves a reference cycle that keeps the frames of callers alive
    if group == AGENT and "_partial_" not in keys and keys >= _OF_AN_AGENT:
        raise ConfigError(
            f"Expected the option of `agent` to create a factory of agents, got {node['_target_']}, which is an "
            "agent: its arguments are the `container` and the `llm_client` of an episode. Add the line "
            "`_partial_: true` to the option's file, so that the class becomes a factory."
        )
    if group == AGENT and "_partial_" in keys and (unknown := _unknown_argument(group, node)):
        raise ConfigError(unknown)  # otherwise every episode would raise it
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        for name in node:
            part = OmegaConf.select(config, f"{group}.{name}")
            if OmegaConf.is_dict(part) and "_target_" in part:
                instantiate_node(config, f"{group}.{name}")  # raises if this node caused the error
        cause = error.__cause__ or error
        if isinstance(cause, ImportError | AttributeError) and (why := explain_target(str(node["_target_"]))):
            raise ConfigError(f"`{group}` cannot be created: {why}") from error
        unknown = None if isinstance(cause, ImportError) else _unknown_argument(group, node)
        is_explained = unknown is not None or isinstance(cause, ConfigError | ValidationError)
        raise ConfigError(unknown or _explain(group, cause)) from (None if is_explained else cause)
    except MissingMandatoryValue as error:
        key = str(error.full_key or group)
        raise ConfigError(f"`{key}` is required and has no default. Set `{key}=…`.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"`{group}`: {str(error).splitlines()[0]}") from None


def _unknown_argument(group: str, node: DictConfig) -> str | None:
    """Returns an error message for an argument that the component does not accept; `None` if all are accepted."""
    if (parameters := parameters_of(str(node["_target_"]))) is None:
        return None
    takes = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    unknown = [str(key) for key in node if not str(key).startswith("_") and key not in takes]
    if not unknown or len(takes) < len(parameters):
        return None
    if "_target_" in (node[unknown[0]] if isinstance(node[unknown[0]], Mapping) else ()):
        return (
            f"`{group}` and `{unknown[0]}` are two components. To choose both, add the first line "
            f"`# @package {group}.NAME` to the option file of `{group}`."
        )
    known = f"it takes {', '.join(f'`{name}`' for name in takes)}" if takes else "it takes none"
    return f"`{group}` has no argument `{unknown[0]}`: {known}.{close_matches(unknown[0], takes)}"


_TYPE = re.compile(r"[\[(]|^(str|int|float|bool|dict|list)$")
"""Matches the names of union members, which pydantic adds to the location of an error although they are not keys."""


def _explain(group: str, cause: BaseException) -> str:
    from pydantic import ValidationError

    if isinstance(cause, ConfigError):
        return str(cause)
    if not isinstance(cause, ValidationError):
        return f"`{group}` cannot be created: {' '.join(str(cause).split())}"
    problems: dict[str, str] = {}
    for item in cause.errors(include_url=False):
        key = ".".join([group, *(str(part) for part in item["loc"] if not _TYPE.search(str(part)))])
        shown = scrub({key: item["input"]})[key]
        message = item["msg"].removeprefix("Value error, ")
        if key in problems:  # an error of another type of the same union
            message = f"{problems[key].partition(' (got ')[0]} or {message.removeprefix('Input should be ')}"
        problems[key] = message + ("" if "got " in message else f" (got {shown!r:.80})")
    said = "; ".join(f"`{key}`: {message}" for key, message in problems.items())
    return f"{said}. `ares-exp --cfg job -p {group}` prints the composed config."
