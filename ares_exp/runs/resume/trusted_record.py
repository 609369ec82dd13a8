"""Checks of recorded runs, so that the files of another user's run cannot do harm on this machine.

A run directory is trusted if it belongs to this user and no other user can write in it. Other run directories can only
be used with `resume_force=true`, and are treated as hostile. Their numbers, strings and names of options are used. A
class in their config is used only if an option on this machine names the same class. Untrusted sweeps are never
resumed. No record can define options, or read environment variables of this machine. All code that composes a command
from a record uses this module.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ares_exp.config.overrides import covers, dotted_items, leaves
from ares_exp.config.targets import classes_of_options
from ares_exp.errors import ConfigError
from ares_exp.records.record_files import broken
from ares_exp.records.run_dir import SWEEP_RECORD, RunDir
from ares_exp.records.secrets import MASK
from ares_exp.runs.resume.recorded_run import RecordedRun, recorded_config, starts_where_started

SCORERS = "env.scorers"
_NOT_OF_THE_RUN = ("defaults", "hydra")
"""Keys of a recorded config that configure Hydra instead of the run."""
_IN_TEXT = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{([\w.]+|hydra:(runtime\.output_dir|run\.dir))\}")
"""Pattern of references that are safe in a record: to config keys or to the run directory.

Other references, such as to environment variables, could read or change this machine.
"""


def is_trusted(run_dir: Path) -> bool:
    """Returns whether a run directory and its config files belong to this user, and no other user can write to them."""
    hydra = run_dir / ".hydra"
    records = [RunDir(run_dir).config, run_dir / SWEEP_RECORD, hydra, *(hydra.iterdir() if hydra.is_dir() else ())]
    found = [run_dir.stat(), *(path.lstat() for path in records if os.path.lexists(path))]
    return all(one.st_uid == os.getuid() and not _is_writable_by_others(one) for one in found)


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Returns whether other users can write to a file. A group that contains only this user does not count."""
    try:
        name, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(status.st_gid)
        is_own_group = group.gr_name == name and {*group.gr_mem} <= {name}
    except KeyError:
        is_own_group = False
    return bool(status.st_mode & (stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP))


def check_trust(run_dir: Path, *, forced: bool) -> None:
    """Raises `ConfigError` if a run directory is not trusted, unless `forced` is set (`resume_force=true`)."""
    if not forced and not is_trusted(run_dir):
        raise ConfigError(
            f"Expected a run directory that only you can write to, got {run_dir}: it belongs to another user, or other "
            "users can write to it. Use `resume_force=true` to use it anyway."
        )


def values_of(run: RecordedRun) -> dict[str, Any]:
    """Returns the recorded config of a run, as a base to which overrides can be applied.

    References to other config keys and to the run directory are kept, so that they use the new values. For example,
    `branches=4` also changes `attempts`, and a new run writes to its own directory. All other values are from the start
    of the run.

    Raises:
        ConfigError: The records are missing or broken.
    """
    values, composed = values_as_meant(run), run.composed_config()
    if missing := [key for key in composed if key not in values]:  # both are written when the run starts
        got = "a file without this key, because it was truncated or changed. Restore the file, or start another run"
        raise broken(RunDir(run.path).config, f"the key `{missing[0]}`", got)
    return {key: _text(value, composed.get(key)) for key, value in values.items() if key not in _NOT_OF_THE_RUN}


def values_as_meant(run: RecordedRun) -> dict[str, Any]:
    """Returns the recorded config of a run, with paths resolved against the folder in which the run was started.

    Raises:
        ConfigError: The records are missing or broken.
    """
    try:
        values = recorded_config(run.path)
    except OSError as error:
        raise ConfigError(f"{run.path / 'config.yaml'}: {error.strerror}. The config of the run is unknown.") from error
    place = run.working_directory()
    given = {key for key, value in dotted_items(values) if value is not None}

    def meant(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: meant(f"{key}.{name}", one) for name, one in value.items()}
        if isinstance(value, list):
            return [meant(key, one) for one in value]
        return str(place / value) if isinstance(value, str) and value and starts_where_started(key, given) else value

    return values if place == Path.cwd() else {key: meant(key, value) for key, value in values.items()}


def _text(value: Any, composed: Any) -> Any:
    """Returns the reference `composed` if it is safe to resolve again; if not, the recorded value with escaped `${`."""
    if isinstance(composed, str) and "${" in composed and "${" not in _REFERENCE.sub("", composed):
        return composed
    if isinstance(value, dict):
        below = composed if isinstance(composed, dict) else {}
        return {name: _text(one, below.get(name)) for name, one in value.items()}
    if isinstance(value, list):
        items: list[Any] = composed[: len(value)] if isinstance(composed, list) else []
        return [_text(one, other) for one, other in zip_longest(value, items)]
    return _IN_TEXT.sub(lambda found: f"{2 * found[1]}\\${{", value) if isinstance(value, str) else value


def check_values(
    run: RecordedRun, values: Mapping[str, Any], *, typed: Collection[str], config_dirs: Sequence[Path]
) -> None:
    """Checks that recorded values can be used. Keys in `typed` are not checked, because the user sets them now.

    Raises:
        ConfigError: A value is a masked secret, or the run is not trusted and names a class that no option on this
            machine names. The message names the keys to set.
    """
    recorded = [(key, one) for key, one in leaves(values) if not any(covers(new, key) for new in typed)]
    check_secrets([key for key, one in recorded if isinstance(one, str) and MASK in one])
    if is_trusted(run.path):
        return
    known = classes_of_options(config_dirs)
    is_typed = any(covers(new, SCORERS) for new in typed)
    functions = [] if is_typed else [(SCORERS, name) for name in _functions_of_scorers(values.get("env"))]
    for key, one in [*(leaf for leaf in recorded if "_target_" in leaf[0].split(".")), *functions]:
        if one not in known:
            raise ConfigError(
                "The recorded config names a class that is not part of an available option, so it is not "
                f"loaded: `{key}={one!s:.100}`. Choose an option, or repeat the override if you trust the "
                "class."
            )


def _functions_of_scorers(env: Any) -> list[str]:
    """Returns the scorers in a recorded `env` that are given only by the name of a function."""
    scorers = env.get("scorers") if isinstance(env, Mapping) else None
    named = scorers.values() if isinstance(scorers, Mapping) else scorers if isinstance(scorers, list) else ()
    return [one for one in named if isinstance(one, str)]


def check_config_dirs(run: RecordedRun) -> Sequence[Path]:
    """Returns the recorded folders of options, after checking that they exist outside of the run directory.

    A run must not bring its own options, because options name classes that are loaded.

    Raises:
        ConfigError: A folder is missing, or is in the run directory.
    """
    folders = run.config_dirs()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{run.path} was composed with the options in {folder}, which is missing now. Restore the folder."
            )
        if not folder.is_absolute() or folder.resolve().is_relative_to(run.path.resolve()):
            raise ConfigError(
                f"Expected the option folder of {run.path} to be outside of this run directory, got {folder}."
            )
    return folders


def check_secrets(keys: Sequence[str]) -> None:
    """Raises `ConfigError` if there are any `keys` whose recorded values are masked secrets."""
    if keys:
        again = " ".join(f"{key}=…" for key in keys)
        raise ConfigError(
            f"The recorded run had secrets for {', '.join(keys)}, which are not stored on disk. "
            f"Set them again ({again}), or remove one with `~{keys[0]}`."
        )
