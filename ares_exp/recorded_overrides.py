"""Which overrides that a run recorded are taken over. A run may come from anybody: none may make it start a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ares_exp.errors import ConfigError
from ares_exp.recorded_run import PATH_KEY
from ares_exp.secrets import MASK

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_ONLY_TEXT = re.compile(r"(?<!\\)\\\$\{")
_HARMLESS_REFERENCE = re.compile(r"\$\{(hydra:|now:)?[\w./%:-]+\}")
"""To another key, or to what says nothing of this machine; any other resolver may read it, or write there."""
_OF_HYDRA = re.compile(r"hydra/[\w/]+|hydra\.(launcher|sweeper|verbose|sweep\.subdir)(\..*)?")
_SPACE_OF_A_SWEEP = re.compile(r"hydra\.sweeper\.(params|search_space)(\..*)?")
_WORD = re.compile(r"[\w-]+")


def check_recorded_overrides(recorded: Sequence[Override]) -> None:
    """Refuses what is on disk without its secret, and what could run, read or write something of this machine.

    Raises:
        ConfigError: With what is to be typed again.
    """
    if masked := [one.key_or_group for one in recorded if MASK in str(one.input_line)]:
        again = " ".join(f"{key}=…" for key in masked)
        raise ConfigError(
            f"The recorded run was given secrets, which are not kept on disk, for {', '.join(masked)}. "
            f"Give them again ({again}), or leave one out with `~{masked[0]}`."
        )
    rules: tuple[tuple[Callable[[Override], bool], str], ...] = (
        (_reads_this_machine, "reads something of this machine in an override"),
        (_names_a_class, "names a class on its command line"),
        (_leaves_the_options, "takes an option from elsewhere"),
        (_sets_up_hydra, "sets up Hydra itself"),
    )
    for breaks, what in rules:
        if broken := [str(one.input_line) for one in recorded if breaks(one)]:
            raise ConfigError(
                f"The recorded run {what}, which is not taken over from a file: `{broken[0]}`. Type it again if you "
                "trust it."
            )


def _reads_this_machine(override: Override) -> bool:
    return "${" in _HARMLESS_REFERENCE.sub("", _ONLY_TEXT.sub("", str(override.input_line)))


def _names_a_class(override: Override) -> bool:
    return "_target_" in str(override.input_line)


def _leaves_the_options(override: Override) -> bool:
    """Whether it chooses an option, or something else where no path belongs, by a path that leads upwards."""
    key = override.key_or_group
    chooses = key.startswith("hydra") or ("." not in key and not PATH_KEY.search(key))
    return chooses and ".." in re.findall(r"[\w.-]+", str(override.input_line))


def _sets_up_hydra(override: Override) -> bool:
    """Whether it is one of Hydra's own, but neither a choice nor a plain number or word for launcher or sweeper.

    Hydra has keys for folders of options, for environment variables and for callbacks, and launchers have some for
    programs to start.
    """
    key, line = override.key_or_group, str(override.input_line)
    if not key.startswith("hydra"):
        return False
    if _SPACE_OF_A_SWEEP.fullmatch(key):
        return line.count("hydra") > 1
    if not _OF_HYDRA.fullmatch(key):
        return True
    value = override.value()
    if key == "hydra.sweep.subdir":
        return str(value).startswith("/")
    return (isinstance(value, str) and not _WORD.fullmatch(value)) or isinstance(value, list | dict)
