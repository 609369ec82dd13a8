"""One paragraph for each way in which a command line can fail to compose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from ares_exp.config.hydra_setup import ROOT_CONFIG
from ares_exp.config.options import conf_dir, find_options
from ares_exp.config.schema import GROUPS
from ares_exp.errors import close_matches

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
        chosen = next((argument for argument in argv if argument.endswith("=null")), "group=null")
        return f"`{chosen}` chooses no option: the empty choice of a group is `{chosen.partition('=')[0]}=none`."
    if "No match in the defaults list" in text:
        word = _first_quoted(text)
        return f"There is no group or key `{word}`.{close_matches(word, _known_keys())} Groups: {', '.join(GROUPS)}."
    if re.search(r"not in struct|not in 'ExperimentConfig'", f"{text}\n{cause}"):
        word = key or _first_quoted(text)
        known = close_matches(word, _known_keys(argv, root_config))
        return f"There is no key `{word}`.{known} `--cfg job` shows every key; `--help` says what they mean."
    if key:
        return f"`{key}`: {str(cause).splitlines()[0].rstrip('.')}. `--help` says what is expected."
    return " ".join(text.split())


def _resolved(error: BaseException) -> BaseException:
    """Returns the error that a resolver raised, or `error` itself."""
    from omegaconf.errors import InterpolationResolutionError

    while isinstance(error, InterpolationResolutionError) and error.__context__ is not None:
        error = error.__context__
    return error


def _explain_syntax(override: str, text: str) -> str:
    name = override.partition("=")[0]
    return (
        f"Cannot read `{override}`: {text.splitlines()[0].rstrip('.')}. "
        f"Overrides are `key=value`; quote special characters twice: '{name}=\"…\"'."
    )


def _explain_option(text: str) -> str:
    found = re.search(r"[Cc]ould not (?:find|load) '([^']+)'", text)
    group, _, option = (found[1] if found else _first_quoted(text)).rpartition("/")
    listed = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
    options = listed or [option.name for option in find_options(group)]
    known = f"{close_matches(option, options)} Options: {', '.join(options)}."
    return f"There is no option `{option}` in the group `{group}`.{known}"


def _first_quoted(text: str) -> str:
    found = QUOTED.search(text)
    return found[1] if found else text.split()[0]


def _known_keys(argv: Sequence[str] = (), root_config: str = ROOT_CONFIG) -> list[str]:
    """Lists every key of the config that `argv`'s choices of options compose to, as far as they compose."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    choices = [argument for argument in argv if argument.partition("=")[0] in GROUPS and "," not in argument]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for overrides in (choices, []):
            with suppress(HydraException):  # what the command line chooses may be the very thing that is wrong
                return _flatten(compose(root_config, overrides=overrides))
    return []


def _flatten(node: object, prefix: str = "") -> list[str]:
    from omegaconf import DictConfig

    if not isinstance(node, DictConfig):
        return []
    names: list[str] = []
    for name, value in node.items_ex(resolve=False):
        path = prefix + str(name)
        names += [path, *_flatten(value, f"{path}.")]
    return names
