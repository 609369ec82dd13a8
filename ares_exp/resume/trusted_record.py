"""The trust boundary of a recorded run: what of its files may decide something on this machine.

A run directory may come from anybody. Values are taken from it: numbers, texts, names of options. It never names a
class that no option on this machine names, never reads a variable of this machine, never starts a program, never
brings an option of its own. What the user types now is not checked here: it is the user's own.

All that composes a command from a record goes through this module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.config.overrides import covers, dotted_items, leaves
from ares_exp.config.targets import classes_of_options
from ares_exp.errors import ConfigError
from ares_exp.records.secrets import MASK
from ares_exp.resume.recorded_run import PATH_KEY, RecordedRun, begins_where_started, recorded_config

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SCORERS = "env.scorers"
_NOT_OF_THE_RUN = ("defaults", "hydra")
"""Keys that set up Hydra itself."""
_IN_TEXT = re.compile(r"(\\*)\$\{")
_ESCAPED = re.compile(r"(?<!\\)\\\$\{")
_REFERENCE = re.compile(r"\$\{([\w.]+|hydra:(runtime\.output_dir|run\.dir))\}")
"""A reference to another config key, or to the run's directory. Other resolvers may read this machine, or write."""
_REFERENCE_OF_A_SWEEP = re.compile(r"\$\{([\w.]+|hydra:[\w.]+|now:[\w%:-]+)\}")
_OF_HYDRA = re.compile(r"hydra/[\w/]+|hydra\.(launcher|sweeper|verbose)(\..*)?")
_SPACE_OF_A_SWEEP = re.compile(r"hydra\.sweeper\.(params|search_space)(\..*)?")
_WORD = re.compile(r"[\w-]+")


def values_of(run: RecordedRun) -> dict[str, Any]:
    """Returns the recorded config of a run in a form to compose from.

    Its values are those that were recorded when the run began, as text: nothing in them is interpolated. But a
    reference to another key, or to the run's directory, stays a reference, so that a key that is typed now applies
    wherever it is referred to, and a new run writes in its own directory.

    Raises:
        ConfigError: The records are missing or broken.
    """
    values, composed = values_as_meant(run), run.composed_config()
    return {key: _text(value, composed.get(key)) for key, value in values.items() if key not in _NOT_OF_THE_RUN}


def values_as_meant(run: RecordedRun) -> dict[str, Any]:
    """Returns a run's recorded config, with relative paths that keep the meaning they had where it was started.

    Raises:
        ConfigError: The records are missing or broken.
    """
    try:
        values = recorded_config(run.path)
    except OSError as error:
        raise ConfigError(f"{run.path / 'config.yaml'}: {error.strerror}. Nobody knows what was played.") from error
    place = run.working_directory()
    given = {key for key, value in dotted_items(values) if value is not None}

    def meant(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: meant(f"{key}.{name}", one) for name, one in value.items()}
        if isinstance(value, list):
            return [meant(key, one) for one in value]
        return str(place / value) if isinstance(value, str) and value and begins_where_started(key, given) else value

    return values if place == Path.cwd() else {key: meant(key, value) for key, value in values.items()}


def _text(value: Any, composed: Any) -> Any:
    """Converts a resolved value to text, or returns its reference if that may be resolved again."""
    if isinstance(composed, str) and "${" in composed and "${" not in _REFERENCE.sub("", composed):
        return composed
    if isinstance(value, dict):
        below = composed if isinstance(composed, dict) else {}
        return {name: _text(one, below.get(name)) for name, one in value.items()}
    if isinstance(value, list):
        items: list[Any] = composed[: len(value)] if isinstance(composed, list) else []
        return [_text(one, other) for one, other in zip_longest(value, items)]
    return _IN_TEXT.sub(lambda found: f"{2 * found[1]}\\${{", value) if isinstance(value, str) else value


def check_values(values: Mapping[str, Any], *, typed: Collection[str], config_dirs: Sequence[Path]) -> None:
    """Refuses secrets that are not on disk, and classes that no option of this machine names.

    Args:
        values: From `values_of`.
        typed: Keys that are set now: their recorded values do not count.
        config_dirs: The user's folders of options.

    Raises:
        ConfigError: With what is to be typed again.
    """
    recorded = [(key, one) for key, one in leaves(values) if not any(covers(new, key) for new in typed)]
    _refuse_masked([key for key, one in recorded if isinstance(one, str) and MASK in one])
    known = classes_of_options(config_dirs)
    is_typed = any(covers(new, SCORERS) for new in typed)
    functions = [] if is_typed else [(SCORERS, name) for name in functions_of_scorers(values.get("env"))]
    for key, one in [*(leaf for leaf in recorded if "_target_" in leaf[0].split(".")), *functions]:
        if one not in known:
            raise ConfigError(
                f"The recorded run names a class that no option here names, which is not taken over from a file: "
                f"`{key}={one!s:.100}`. Choose an option, or type it again if you trust it."
            )


def functions_of_scorers(env: Any) -> list[str]:
    """Returns the functions that the scorers of a recorded `env` are, where they are named without `_target_`."""
    scorers = env.get("scorers") if isinstance(env, Mapping) else None
    named = scorers.values() if isinstance(scorers, Mapping) else scorers if isinstance(scorers, list) else ()
    return [one for one in named if isinstance(one, str)]


def check_lines(lines: Sequence[Override]) -> None:
    """Refuses recorded overrides of a sweep that lack their secret, or could run, read or write something here.

    Raises:
        ConfigError: With what is to be typed again.
    """
    _refuse_masked([one.key_or_group for one in lines if MASK in str(one.input_line)])
    for one in lines:
        if (objection := _objection(one)) is not None:
            raise ConfigError(
                f"The recorded sweep {objection}, which is not taken over from a file: `{one.input_line}`. Type it "
                "again if you trust it."
            )


def check_config_dirs(run: RecordedRun) -> Sequence[Path]:
    """Returns the recorded folders of options. They name classes: a run cannot bring its own.

    Raises:
        ConfigError: One is gone, or is the run's own.
    """
    folders = run.config_dirs()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{run.path} was composed with the options in {folder}, which is no folder any more.")
        if not folder.is_absolute() or folder.resolve().is_relative_to(run.path.resolve()):
            raise ConfigError(f"Expected the folder of options of {run.path} outside of it, got {folder}.")
    return folders


def _refuse_masked(keys: Sequence[str]) -> None:
    if keys:
        again = " ".join(f"{key}=…" for key in keys)
        raise ConfigError(
            f"The recorded run was given secrets, which are not kept on disk, for {', '.join(keys)}. "
            f"Give them again ({again}), or leave one out with `~{keys[0]}`."
        )


def _objection(override: Override) -> str | None:
    """Describes what an override does that a file may not decide; `None` for a value, or a choice of a known option."""
    key, line = override.key_or_group, str(override.input_line)
    if "${" in _REFERENCE_OF_A_SWEEP.sub("", _ESCAPED.sub("", line)):
        return "reads something of this machine in an override"
    if "_target_" in line:
        return "names a class on its command line"
    is_choice = key.startswith("hydra") or ("." not in key and not PATH_KEY.search(key))
    if is_choice and ".." in re.findall(r"[\w.-]+", line):
        return "takes an option from elsewhere"
    if key.startswith("hydra") and not _is_launcher_or_sweeper(key, line, override.value()):
        return "sets up Hydra itself"
    return None


def _is_launcher_or_sweeper(key: str, line: str, value: Any) -> bool:
    """Whether a key of Hydra's chooses launcher or sweeper, or gives them a plain number or word.

    Hydra has keys for folders of options, for environment variables and for callbacks, and launchers have some for
    programs to start.
    """
    if _SPACE_OF_A_SWEEP.fullmatch(key):
        return line.count("hydra") == 1
    if key == "hydra.sweep.subdir":
        return not str(value).startswith("/")
    is_plain = bool(_WORD.fullmatch(value)) if isinstance(value, str) else not isinstance(value, list | dict)
    return is_plain and _OF_HYDRA.fullmatch(key) is not None
