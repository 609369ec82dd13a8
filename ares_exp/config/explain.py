"""One paragraph for each way in which a command line can fail to compose."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ares_exp.config.known_keys import keys_of, options_of, suggest_key
from ares_exp.config.options import ROOT_CONFIG
from ares_exp.config.plugins import OPTION_GROUPS
from ares_exp.config.schema import GROUPS, KEYS, NOT_A_VALUE
from ares_exp.errors import close_matches

_SHOWN_KEYS = 4
QUOTED = re.compile(r"['\"`]([^'\"`]+)['\"`]")


def explain(error: Exception, argv: Sequence[str], root_config: str = ROOT_CONFIG) -> str:
    """Explains a config error, with the nearest valid alternative.

    Args:
        error: Of the composing.
        argv: The command line.
        root_config: Name of the config that was composed.
    """
    from hydra.errors import MissingConfigException, OverrideParseException

    cause: BaseException = error.__cause__ or error
    key, text = str(getattr(cause, "full_key", None) or ""), str(error)
    failed = _resolved(error)
    if isinstance(failed, OSError) and failed.filename is not None:
        remedy = "If that is where the run was to be written, choose another place with `hydra.run.dir=…`."
        return f"Cannot use {failed.filename}: {failed.strerror}. {remedy}"
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override, text)
    if isinstance(error, MissingConfigException) or "Could not find" in text:
        return _explain_option(text)
    if "Config group override must be" in text:
        return _explain_no_option(argv)
    if "No match in the defaults list" in text:
        word = _first_quoted(text)
        return f"There is no group or key `{word}`.{suggest_key(word)} Groups: {', '.join(GROUPS)}."
    if re.search(r"not in struct|Key '.*' not in '\w+'", f"{text}\n{cause}"):
        word = key or _first_quoted(text)
        meant = suggest_key(word, argv, root_config)
        return f"There is no key `{word}`.{meant} `--cfg job` shows every key; `--help` says what they mean."
    if is_below_a_list(error):
        return f"An override sets a key below a list, which has none: {text}. Set the whole list."
    if "is not a subclass of" in str(cause):
        return NOT_A_VALUE.format(name=key)
    if key:
        return f"`{key}`: {str(cause).splitlines()[0].rstrip('.')}. `--help` says what is expected."
    return " ".join(text.split())


def is_below_a_list(error: BaseException) -> bool:
    """Whether the error says that an override treats a list as a mapping; OmegaConf has no class for that."""
    return re.match(r"Index '.*' \(str\) is not an int", str(error)) is not None


def _resolved(error: BaseException) -> BaseException:
    """Returns the error that a resolver raised, or `error` itself."""
    from omegaconf.errors import InterpolationResolutionError

    while isinstance(error, InterpolationResolutionError) and error.__context__ is not None:
        error = error.__context__
    return error


def _explain_no_option(argv: Sequence[str]) -> str:
    """Explains an override that gives a group nothing, or a number, where it needs an option."""
    chosen = next(filter(_is_no_choice, argv), "GROUP=null")
    group, _, value = chosen.partition("=")
    options = [option.name for option in options_of(group)]
    said = f"`{chosen}` chooses no option of the group `{group}`. Options: {', '.join(options)}."
    if value != "null" and (own := [key for key in keys_of(argv) if key.rpartition(".")[0] == group]):
        settable = [key for key in own if not key.rpartition(".")[2].startswith("_")]
        said += f" Its arguments are set one by one: {', '.join(f'`{key}=…`' for key in settable[:_SHOWN_KEYS])}."
    return said


def _is_no_choice(argument: str) -> bool:
    group, _, value = argument.partition("=")
    return group in OPTION_GROUPS and (value == "null" or re.fullmatch(r"[-+.\d_]+|true|false", value) is not None)


def _explain_syntax(override: str, text: str) -> str:
    name = override.partition("=")[0]
    if name == override:
        meant = f" Did you mean `{name}=…`?" if name in GROUPS or name in KEYS else ""
        return f"Cannot read `{override}`: expected an override, `key=value`.{meant} `--help` shows examples."
    return (
        f"Cannot read `{override}`: {text.splitlines()[0].rstrip('.')}. "
        f"Overrides are `key=value`; quote special characters twice: '{name}=\"…\"'."
    )


def _explain_option(text: str) -> str:
    found = re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    group, _, option = (found[1] if found else _first_quoted(text)).rpartition("/")
    listed = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    options = listed or [option.name for option in options_of(group)]
    known = f"{close_matches(option, options)} Options: {', '.join(options)}."
    return f"There is no option `{option}` in the group `{group}`.{known}"


def _first_quoted(text: str) -> str:
    found = QUOTED.search(text)
    return found[1] if found else text.split()[0]
