"""Error messages for command lines that Hydra cannot compose, with suggestions for misspelled keys."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError
from yaml import YAMLError

from ares_exp.config.options import OPTION_GROUPS, ROOT_CONFIG, Option, conf_dir, find_options, no_option
from ares_exp.config.overrides import parse_overrides
from ares_exp.config.schema import GROUPS, KEYS, NOT_A_VALUE
from ares_exp.config.targets import arguments_of
from ares_exp.errors import closest

_SHOWN_KEYS = 4
_SHOWN_OPTIONS = 2
NO_PACKAGE = (
    "Expected `# @package _global_` as the first line of {name}.yaml. Add this line. Without it, the keys of the file "
    "are set below `experiment` instead of at the top level."
)
QUOTED = re.compile(r"['\"`]([^'\"`]+)['\"`]")


def explain(
    error: Exception, argv: Sequence[str], root_config: str = ROOT_CONFIG, config_dirs: Sequence[Path] = ()
) -> str:
    """Converts a config error of Hydra or OmegaConf to a message that names the most similar valid key or option.

    `config_dirs` are the user's folders of options.
    """
    cause: BaseException = error.__cause__ or error
    key, text = str(getattr(cause, "full_key", None) or ""), str(error)
    failed = _resolved(error)
    if isinstance(failed, OSError) and failed.filename is not None:
        remedy = "If this is the run directory, choose another one with `hydra.run.dir=…`."
        return f"Cannot use {failed.filename}: {failed.strerror}. {remedy}"
    if isinstance(failed, OSError) and failed.errno == errno.ENOSPC:  # errors of writes have no file name
        place = next((one.partition("=")[2] for one in argv if one.startswith("hydra.run.dir=")), "outputs")
        return f"Cannot write a run to {place}: {failed.strerror}. Choose another place with `hydra.run.dir=…`."
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override, text)
    if isinstance(error, MissingConfigException) or "Could not find" in text:
        return _explain_option(text, config_dirs)
    if found := re.match("Ambiguous value for argument '(.*)'$", text, re.MULTILINE):
        name, _, values = found[1].partition("=")
        is_numeric = re.fullmatch(r"[-+.\d_e,\s]+", values) is not None
        listed = "" if is_numeric else f", or write one list: '{name}=[{values}]'"
        return f"Expected one value of `{name}`, got `{values}`. Add `-m` for a sweep, with one run per value{listed}."
    if "Config group override must be" in text:
        return _explain_no_option(argv, config_dirs)
    if "No match in the defaults list" in text:
        word = _first_quoted(text)
        meant = suggest_key(word, config_dirs=config_dirs)
        return f"There is no group or key `{word}`.{meant} Groups: {', '.join(GROUPS)}."
    if re.search(r"not in struct|Key '.*' not in '\w+'", f"{text}\n{cause}"):
        word = key or _first_quoted(text)
        if word.startswith("experiment/"):
            return NO_PACKAGE.format(name=word)
        meant = suggest_key(word, argv, root_config, config_dirs)
        return f"There is no key `{word}`.{meant} `--cfg job` prints all keys; `--help` describes them."
    if is_below_a_list(error):
        return f"An override sets a key inside a list: {text}. Set the whole list instead."
    if found := re.match(r"Interpolation key '(\w+)' not found", str(cause)):
        name = found[1]
        return f"`{key}`: There is no key `{name}` for `${{{name}}}`. Use `${name}` for a shell variable."
    if "is not a subclass of" in str(cause):
        return NOT_A_VALUE.format(name=key)
    if key:
        given = next((one.partition("=")[2] for one in argv if one.startswith(f"{key}=")), "")
        if re.fullmatch(r"\[.+\]", given):
            values = re.sub(r"\s*,\s*", ",", given[1:-1])
            sweep = f"Use `-m {key}={values}` for a sweep, with one run per value."
            return f"Expected one value of `{key}`, got `{given}`. {sweep}"
        return f"`{key}`: {str(cause).splitlines()[0].rstrip('.')}. `--help` describes the expected value."
    return " ".join(text.split())


def is_below_a_list(error: BaseException) -> bool:
    """Returns whether OmegaConf raised `error` because an override sets a named key inside a list."""
    return re.match(r"Index '.*' \(str\) is not an int", str(error)) is not None


def _resolved(error: BaseException) -> BaseException:
    """Returns the error of a `${…}` resolver if OmegaConf wrapped it in `error`, otherwise `error` itself."""
    while isinstance(error, InterpolationResolutionError) and error.__context__ is not None:
        error = error.__context__
    return error


def _explain_no_option(argv: Sequence[str], config_dirs: Sequence[Path]) -> str:
    """Returns the error message for an override that sets a group to null, a number or a boolean."""
    no_choice = re.compile(rf"(?:{'|'.join(OPTION_GROUPS)})=(?:null|[-+.\d_]+|true|false)")
    chosen = next(filter(no_choice.fullmatch, argv), "GROUP=null")
    group, _, value = chosen.partition("=")
    options = [option.name for option in find_options(group, config_dirs)]
    said = f"`{chosen}` does not name an option of the group `{group}`. Options: {', '.join(options)}."
    if value != "null" and (own := [key for key in keys_of(argv) if key.rpartition(".")[0] == group]):
        settable = [key for key in own if not key.rpartition(".")[2].startswith("_")]
        said += f" To set its arguments, use {', '.join(f'`{key}=…`' for key in settable[:_SHOWN_KEYS])}."
    return said


def _explain_syntax(override: str, text: str) -> str:
    name = override.partition("=")[0]
    if name == override:
        meant = f" Did you mean `{name}=…`?" if name in GROUPS or name in KEYS else ""
        return f"Cannot read `{override}`: expected an override, `key=value`.{meant} `--help` shows examples."
    return (
        f"Cannot read `{override}`: {text.splitlines()[0].rstrip('.')}. "
        f"Write overrides as `key=value`. Quote a value with special characters twice: '{name}=\"…\"'."
    )


def _explain_option(text: str, config_dirs: Sequence[Path]) -> str:
    found = re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    group, _, option = (found[1] if found else _first_quoted(text)).rpartition("/")
    if not group:
        return f"There is no root config `{option}`. For your own settings, use `experiment=NAME`, not `--config-name`."
    listed = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    options = listed or [option.name for option in find_options(group, config_dirs)]
    return no_option(option, group, options)


def _first_quoted(text: str) -> str:
    found = QUOTED.search(text)
    return found[1] if found else text.split()[0]


def suggest_key(
    word: str, argv: Sequence[str] = (), root_config: str = ROOT_CONFIG, config_dirs: Sequence[Path] = ()
) -> str:
    """Returns a sentence that suggests a key instead of the unknown key `word`; empty if no key is similar.

    First searches the config that `argv` selects, then the other options. The sentence starts with a space.
    """
    known = keys_of(argv, root_config)
    above, _, last = word.rpartition(".")
    beside = {_last(key): key for key in known if key.rpartition(".")[0] == above and key != word}
    if near := closest(last, beside):
        return _did_you_mean(beside[one] for one in near)
    if below := [key for key in known if above and key.startswith(f"{above}.") and _last(key) == last]:
        return _did_you_mean(below[:_SHOWN_OPTIONS])
    elsewhere = _arguments_by_option([word.partition(".")[0]] if above else GROUPS, config_dirs)
    if owners := _owners(word, elsewhere):
        chosen = [choice for choice in _choices(argv) if choice.startswith(f"{word.partition('.')[0]}=")]
        remedy = f", but not of `{chosen[0]}`." if chosen else ". Choose this option as well."
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
    """Lists every key of the config that Hydra composes from the options in `argv`.

    If the composition fails, lists the keys of the default config. If a sweep chooses several options of a group, uses
    the first of these options.
    """
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for overrides in (_choices(argv), []):
            with suppress(HydraException, ValueError):  # the choices of the command line may be the cause of the error
                return _flatten(compose(root_config, overrides=overrides))
    return []


def _choices(argv: Sequence[str]) -> list[str]:
    """Returns the overrides in `argv` that choose an option of a group, or set Hydra's search path."""
    found = []
    for argument in argv:
        with suppress(HydraException):
            [override] = parse_overrides([argument])
            if override.key_or_group in (*OPTION_GROUPS, "hydra.searchpath"):
                found.append(_first(override))
    return found


def _first(override: Override) -> str:
    """Returns the text of an override. If the override is a sweep, returns its first value."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{str(override.input_line).partition('=')[0]}={next(override.sweep_string_iterator())}"


def _arguments_by_option(groups: Iterable[str], config_dirs: Sequence[Path]) -> dict[Option, list[str]]:
    """Lists the argument keys of every option in `groups`. Skips options whose file cannot be read."""
    found: dict[Option, list[str]] = {}
    for group in groups:
        for option in find_options(group, config_dirs) if group in GROUPS else ():
            with suppress(OSError, YAMLError):
                found[option] = [argument.key for argument in arguments_of(option)]
    return found


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _owners(key: str, elsewhere: Mapping[Option, Collection[str]]) -> str:
    """Returns a text that lists up to `_SHOWN_OPTIONS` options that have the argument `key`; empty if none has it."""
    owners = [option for option, keys in elsewhere.items() if key in keys]
    chosen = " or ".join(f"`{option.group}={option.name}`" for option in owners[:_SHOWN_OPTIONS])
    return f"{chosen} or another option" if len(owners) > _SHOWN_OPTIONS else chosen


def _did_you_mean(keys: Iterable[str]) -> str:
    return f" Did you mean {' or '.join(f'`{key}`' for key in keys)}?"


def _flatten(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, DictConfig):
        return []
    names: list[str] = []
    for name, value in node.items_ex(resolve=False):
        path = prefix + str(name)
        names += [path, *_flatten(value, f"{path}.")]
    return names
