"""Commands that continue a recorded run: `resume=<run>`, `resume=<sweep>`, `replay=<run>[/<episode>]`, `branch_from=…`.

This module calls these keys verbs. The command starts from the recorded config of the run, in which references to other
keys are kept (see `values_of`). An override on the command line replaces the recorded values of its key and of all keys
below it. For example, `policy.temperature=1` changes one value of the recorded policy, and `policy=other` drops all
recorded values of the policy.

A sweep has no single config, because its jobs differ. To resume a sweep, the command line that started it is run again,
and each job continues with its own recorded config (`keep_recorded`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ares_exp.config.options import config_dirs_of, folder_url
from ares_exp.config.overrides import covers, key_set_by, leaves, listed, parse_overrides, quoted
from ares_exp.config.schema import GROUPS
from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import run_path
from ares_exp.records.recorded_results import last_attempts
from ares_exp.records.run_dir import SWEEP_RECORD, RunDir
from ares_exp.records.secrets import MASK, scrub
from ares_exp.runs.resume.recorded_run import (
    EpisodeRef,
    RecordedRun,
    RecordedSweep,
    check_config_dirs,
    check_secrets,
    check_trust,
    check_values,
    is_folder_of_runs,
    is_trusted,
    starts_where_started,
    values_as_meant,
    values_of,
)
from ares_exp.runs.resume.session import BRANCH_KEYS, RESUME_KEYS, VERBS, config_differences

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

ASKED_FOR = (*VERBS, *BRANCH_KEYS, *RESUME_KEYS, "attempts")
"""Keys that name a recorded run and what to do with it. For a replay or branch, their recorded values are ignored."""
NO_SELECTION: Mapping[str, Any] = {"exclude": [], "limit": None}
"""Keys of `env` that select tasks, each with the value that selects all tasks."""
OF_ONE_SESSION = ("resume", "resume_redo", "resume_force", "hydra.run.dir", "hydra.sweep.dir", "hydra.mode")
"""Keys that apply only to one session. Their recorded values are ignored when a later session resumes the run."""

_GOES_ON = "the run continues in its directory"
FIXED: Mapping[str, Mapping[str, str]] = {
    "resume": {"hydra.run.dir": _GOES_ON, "hydra.sweep.dir": _GOES_ON},
    "replay": {
        "policy": "the recorded responses are the policy",
        **dict.fromkeys(BRANCH_KEYS, "it belongs to `branch_from=<run>/<episode>@<step>`"),
    },
    "branch_from": {"attempts": "use `branches` to set the number of branches"},
}
"""For each of `resume`, `replay` and `branch_from`: the keys that cannot be set together with it, and the reasons."""


class Command(NamedTuple):
    """A command line that Hydra can process, because `resume`, `replay` or `branch_from` has been replaced.

    Attributes:
        argv: Flags and overrides.
        source: Run or sweep that the command resumes, replays or branches; `None` for a new run.
        values: Recorded config, to which the overrides are applied; `None` to start from the root config.
        choices: Name of the recorded option of each config group.
    """

    argv: list[str]
    source: Path | None = None
    values: Mapping[str, Any] | None = None
    choices: Mapping[str, str] = {}


def compose_from_run(flags: Sequence[str], overrides: Sequence[str]) -> Command:
    """Converts a command line with `resume`, `replay` or `branch_from` to one that Hydra can process.

    Returns any other command line unchanged.

    Raises:
        ConfigError: The run, episode or step does not exist, a record cannot be used, or the verb cannot be combined
            with another override.
        hydra.errors.OverrideParseException: An argument is not a valid override.
    """
    as_typed = Command([*flags, *overrides])
    if not any(one.partition("=")[0].lstrip("+~") in (*VERBS, *BRANCH_KEYS) for one in overrides):
        return as_typed
    typed = parse_overrides(overrides)
    verbs = {one.key_or_group: one for one in typed if one.key_or_group in VERBS and one.value() is not None}
    if "resume" in verbs and isinstance(verbs["resume"].value(), bool):
        del verbs["resume"]  # `resume=true` does not name a run
    if not verbs:
        if alone := [one.key_or_group for one in typed if one.key_or_group in BRANCH_KEYS]:
            raise ConfigError(
                f"`{alone[0]}` has an effect only with a branch. Set `branch_from=<run>/<episode>@<step>`."
            )
        return as_typed
    if len(verbs) > 1:
        raise ConfigError(
            f"Expected only one of {', '.join(f'`{verb}=`' for verb in verbs)}, got several. Use one per command."
        )
    [(verb, named)] = verbs.items()
    if named.is_sweep_override():
        raise ConfigError(f"Expected `{verb}` to be one episode or run, got several. Use one command for each.")
    fixed = {"experiment": "the run is composed as before; set only the keys to change", **FIXED[verb]}
    for key in map(key_set_by, typed):
        if key in fixed:
            raise ConfigError(f"`{key}` cannot be set with `{verb}`: {fixed[key]}. Leave `{key}=…` out.")
    own = [one for one in typed if one is not named]
    forced = any(one.key_or_group == "resume_force" and one.value() is True for one in own)
    if verb == "resume":
        if not named.value():  # for example, an unset shell variable
            raise ConfigError(
                "Expected `resume=<run dir>`, got no directory. For the current directory, use `resume=.`."
            )
        return _resume(run_path(str(named.value())).expanduser(), flags, own, forced=forced)
    ref = EpisodeRef.parse(str(named.value()))
    check_trust(ref.run.path, forced=forced)
    needed, tasks = (_replay if verb == "replay" else _branch)(ref)
    values = {key: value for key, value in values_of(ref.run).items() if key not in ASKED_FOR}
    env = values.get("env")
    if isinstance(env, dict):
        values["env"] = {key: NO_SELECTION.get(key, value) for key, value in env.items()}
    if isinstance(env, dict) and "tasks" in env and not any(one.key_or_group == "env" for one in typed):
        needed = [*needed, f"env.tasks={listed(tasks)}"]  # otherwise, the job selects the tasks
    return _composed(ref.run, values, flags, needed, own)


def _resume(path: Path, flags: Sequence[str], typed: Sequence[Override], *, forced: bool) -> Command:
    place, is_sweep = path.absolute(), {"-m", "--multirun"} & {*flags}
    if (place / SWEEP_RECORD).is_file():
        return _resume_sweep(RecordedSweep(place), flags if is_sweep else [*flags, "-m"], typed)
    if is_sweep:
        raise ConfigError(f"{path} is a run, not a sweep. Leave `-m` out.")
    if place.is_dir() and not RunDir(place).has_run and not is_folder_of_runs(place):
        raise ConfigError(f"There is nothing to resume in {path}: no run started there. Start the run again.")
    run = RecordedRun(place)
    check_trust(place, forced=forced)
    values = {key: value for key, value in values_of(run).items() if key not in OF_ONE_SESSION}
    asked_anew = any(one.key_or_group in ("attempts", "branches") for one in typed)
    if not asked_anew and (attempts := last_attempts(RunDir(place))) is not None:
        values["attempts"] = attempts
    return _composed(run, values, flags, ["resume=true", f"hydra.run.dir={quoted(str(place))}"], typed)


def _resume_sweep(sweep: RecordedSweep, flags: Sequence[str], typed: Sequence[Override]) -> Command:
    from hydra.errors import OverrideParseException

    if not is_trusted(sweep.path):
        raise ConfigError(
            f"Expected a sweep that only you can write to, got {sweep.path}: it belongs to another user, or other "
            f"users can write to it. Repeat its command with `resume=true hydra.sweep.dir={sweep.path}`."
        )
    needed = parse_overrides(
        ["resume=true", f"hydra.sweep.dir={quoted(str(sweep.path))}", *_search_path(check_config_dirs(sweep))]
    )
    replaced = [*OF_ONE_SESSION, *map(key_set_by, (*needed, *typed))]
    try:
        lines = parse_overrides(sweep.overrides())
    except OverrideParseException as error:
        raise ConfigError(f"{sweep.path} recorded an override that cannot be read: `{error.override}`.") from error
    recorded = [one for one in lines if not any(covers(key, key_set_by(one)) for key in replaced)]
    check_secrets([one.key_or_group for one in recorded if MASK in str(one.input_line)])
    again = [*_from(sweep.working_directory(), recorded), *_not_typed(needed, typed)]
    return Command([*flags, *again, *(str(one.input_line) for one in typed)], source=sweep.path)


def _replay(ref: EpisodeRef) -> tuple[list[str], Collection[str]]:
    """Returns the overrides for a replay, and the names of its tasks. Without an episode, replays all attempts."""
    if ref.step is not None:
        raise ConfigError(f"`replay` runs whole episodes. Leave `@{ref.step}` out, or use `branch_from=`.")
    episodes = [ref.episode] if ref.episode is not None else list(ref.run.trajectories())
    if not episodes:
        other = next((f"{ref.run.path}/{one.episode_id}" for one in ref.run.trajectories(partial=True)), None)
        named = f" To replay an episode that did not end, name it: `replay={other}`." if other is not None else ""
        raise ConfigError(f"There is no trajectory of a finished episode in {ref.run.path}.{named}")
    attempts = Counter(episode.task_name for episode in episodes)
    needed = [
        f"replay={quoted(str(ref))}",
        "policy=replay",
        f"policy.trajectory={quoted(str(ref.run.path))}",
        f"policy.episode={'null' if ref.episode is None else quoted(ref.episode.episode_id)}",
        "policy.strict=false",
        f"attempts={max(attempts.values())}",
        "snapshot=none",
    ]
    return needed, attempts


def _branch(ref: EpisodeRef) -> tuple[list[str], Collection[str]]:
    """Returns the overrides that start the branches, and the name of the episode's task as the only task to run."""
    episode = ref.episode
    if episode is None or ref.step is None:
        have = "its episodes are in episodes.jsonl"
        if episode is not None:
            have = f"it has the steps 0 to {episode.last_step}"
        raise ConfigError(f"Expected `branch_from=<run>/<episode>@<step>`, got {ref}: {have}.")
    return [f"branch_from={quoted(str(ref))}", "attempts=${branches}"], [episode.task_name]


def _composed(
    run: RecordedRun, values: dict[str, Any], flags: Sequence[str], needed: Sequence[str], typed: Sequence[Override]
) -> Command:
    folders = check_config_dirs(run)
    needed = _not_typed(parse_overrides([*needed, *_search_path(folders)]), typed)
    replacing = [*parse_overrides(needed), *typed]
    for one in replacing:
        _make_room(values, one)
    keys = [key_set_by(one) for one in replacing]
    check_values(run, values, typed=keys, config_dirs=[*folders, *config_dirs_of(flags)])
    chosen = {one.key_or_group for one in replacing}
    choices = {group: option for group, option in run.choices().items() if group not in chosen}
    lines = [*needed, *(_over(values, one) for one in typed)]
    return Command([*flags, *lines], run.path, values, choices)


def _make_room(values: dict[str, Any], override: Override) -> None:
    """Removes the recorded values that `override` replaces: a whole config group, or all values of a mapping."""
    key = key_set_by(override)
    if key in GROUPS:
        values.pop(key, None)
        return
    *above, last = key.split(".")
    place: Any = values
    for name in above:
        place = place.get(name) if isinstance(place, dict) else None
    if isinstance(place, dict) and isinstance(place.get(last), dict) and not override.is_delete():
        place[last] = None


def _over(values: Mapping[str, Any], override: Override) -> str:
    """Formats an override for Hydra. Adds `+` if Hydra would otherwise reject it because of the recorded values."""
    line = str(override.input_line)
    if override.package is None:
        return f"+{line}" if override.is_add() else line
    # The recorded option that requires this option is not composed again.
    is_new = not line.startswith(("+", "~")) and key_set_by(override).split(".")[0] in values
    return f"+{line}" if is_new else line


def _not_typed(needed: Sequence[Override], typed: Sequence[Override]) -> list[str]:
    return [str(one.input_line) for one in needed if not any(covers(key_set_by(new), key_set_by(one)) for new in typed)]


def _search_path(folders: Sequence[Path]) -> list[str]:
    return [f"hydra.searchpath={listed(map(folder_url, folders))}"] if folders else []


def _from(place: Path, recorded: Sequence[Override]) -> list[str]:
    """Returns a sweep's recorded overrides, with relative paths resolved against `place`, where it was started."""
    given = {one.key_or_group for one in recorded if one.value() is not None}
    lines = []
    for one in recorded:
        value: Any = one.value()
        line, paths = str(one.input_line), value if isinstance(value, list) else [value]
        starts_there = place != Path.cwd() and starts_where_started(one.key_or_group, given)
        if starts_there and all(isinstance(path, str) and path and "${" not in path for path in paths):
            meant = [str(place / path) for path in paths]
            line = f"{line.partition('=')[0]}={listed(meant) if isinstance(value, list) else quoted(meant[0])}"
        lines.append(line)
    return lines


def keep_recorded(config: DictConfig, run_dir: RunDir, overrides: Sequence[str]) -> list[str]:
    """Makes a resumed run or job use its recorded config, except for keys that the user sets now.

    Changes `config`. Secrets, and values whose classes have changed, are not restored. If other differences affect
    results, `open_session` later rejects the config.

    Returns:
        The top-level keys whose options or defaults on disk have changed since the start of the run.
    """
    from omegaconf import OmegaConf, open_dict

    try:
        run = RecordedRun(run_dir.path)
        before, recorded = run.overrides(), values_as_meant(run)
    except ConfigError:
        return []
    typed = {re.split("[./@=]", one.lstrip("+~"))[0] for one in overrides if one not in before}
    if "experiment" in typed:
        return []
    changed = []
    composed = scrub(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)))
    differing = dict.fromkeys(key.partition(".")[0] for key, *_ in config_differences(recorded, composed))
    for name in (key for key in differing if key in recorded and key in composed and key not in typed):
        was, now = recorded[name], composed[name]
        is_kept = all(not isinstance(leaf, str) or ("${" not in leaf and MASK not in leaf) for _, leaf in leaves(was))
        if is_kept and _classes(now) == _classes(was):
            with open_dict(config):
                OmegaConf.update(config, name, was, merge=False)
            changed.append(name)
    if not {"attempts", "branches"} & typed and (attempts := last_attempts(run_dir)) is not None:
        config.attempts = attempts
    return changed


def _classes(value: Any) -> list[Any]:
    return [one for key, one in leaves(value) if key.endswith("_target_")]
