"""Keys that a command line can set, and which of them a word may stand for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ares_exp.config.option_arguments import arguments_of
from ares_exp.config.options import ROOT_CONFIG, Option, conf_dir, find_options
from ares_exp.config.overrides import parse_overrides
from ares_exp.config.plugins import OPTION_FOLDERS
from ares_exp.config.schema import GROUPS
from ares_exp.errors import closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_SHOWN_OPTIONS = 2


def suggest_key(word: str, argv: Sequence[str] = (), root_config: str = ROOT_CONFIG) -> str:
    """Returns a sentence on what a key that is not there may stand for, after a blank; empty if nothing is like it.

    Args:
        word: The key, dotted.
        argv: The command line, whose choices of options count.
        root_config: Name of the config that was composed.
    """
    known = keys_of(argv, root_config)
    above, _, last = word.rpartition(".")
    beside = {_last(key): key for key in known if key.rpartition(".")[0] == above and key != word}
    if near := closest(last, beside):
        return _did_you_mean(beside[one] for one in near)
    if below := [key for key in known if above and key.startswith(f"{above}.") and _last(key) == last]:
        return _did_you_mean(below[:_SHOWN_OPTIONS])
    elsewhere = _arguments_by_option([word.partition(".")[0]] if above else GROUPS)
    if owners := _owners(word, elsewhere):
        chosen = [choice for choice in _choices(argv) if choice.startswith(f"{word.partition('.')[0]}=")]
        remedy = f"; `{chosen[0]}` does not take it." if chosen else ": choose that option, too."
        return f" It is an argument of {owners}{remedy}"
    same = [key for key in known if _last(key) == last and key != word]
    if same and not above:
        return _did_you_mean(same[:1])
    for keys in elsewhere.values():
        if near := closest(last, map(_last, keys)) if above else [name for name in map(_last, keys) if name == last]:
            key = next(key for key in keys if _last(key) == near[0])
            return f" Did you mean `{key}`, an argument of {_owners(key, elsewhere)}?"
    return _did_you_mean(same[:1]) if same else ""


def keys_of(argv: Sequence[str] = (), root_config: str = ROOT_CONFIG) -> list[str]:
    """Lists every key of the config that `argv`'s choices of options compose to; without them, if they do not compose.

    Of several choices for a sweep the first one counts.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for overrides in (_choices(argv), []):
            with suppress(
                HydraException, ValueError
            ):  # what the command line chooses may be the very thing that is wrong
                return _flatten(compose(root_config, overrides=overrides))
    return []


def options_of(group: str) -> list[Option]:
    """Lists the options of a group, also those of the folders that the command names."""
    from ares_exp.config.option_files import OptionSearchPath

    return find_options(group, OptionSearchPath.config_dirs)


def _choices(argv: Sequence[str]) -> list[str]:
    """Returns the overrides that choose options, and those that say where options are."""
    from hydra.errors import HydraException

    found = []
    for argument in argv:
        with suppress(HydraException):
            [override] = parse_overrides([argument])
            if override.key_or_group in (*OPTION_FOLDERS, "hydra.searchpath"):
                found.append(_first(override))
    return found


def _first(override: Override) -> str:
    """Returns the override, of a sweep that of its first job."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{str(override.input_line).partition('=')[0]}={next(override.sweep_string_iterator())}"


def _arguments_by_option(groups: Iterable[str]) -> dict[Option, list[str]]:
    """Lists the arguments of every option."""
    from yaml import YAMLError

    found: dict[Option, list[str]] = {}
    for group in groups:
        for option in options_of(group) if group in GROUPS else ():
            with suppress(OSError, YAMLError):
                found[option] = [argument.key for argument in arguments_of(option)]
    return found


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _owners(key: str, elsewhere: Mapping[Option, Collection[str]]) -> str:
    """Names the options that have an argument, the first ones of many; empty if none has."""
    owners = [option for option, keys in elsewhere.items() if key in keys]
    chosen = " or ".join(f"`{option.group}={option.name}`" for option in owners[:_SHOWN_OPTIONS])
    return f"{chosen} or another one" if len(owners) > _SHOWN_OPTIONS else chosen


def _did_you_mean(keys: Iterable[str]) -> str:
    return f" Did you mean {' or '.join(f'`{key}`' for key in keys)}?"


def _flatten(node: object, prefix: str = "") -> list[str]:
    from omegaconf import DictConfig

    if not isinstance(node, DictConfig):
        return []
    names: list[str] = []
    for name, value in node.items_ex(resolve=False):
        path = prefix + str(name)
        names += [path, *_flatten(value, f"{path}.")]
    return names
