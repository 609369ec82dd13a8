"""`resume=<run>`, `replay=<run>[/<episode>]`, `branch_from=<run>/<episode>@<step>`: from an earlier command line.

The earlier run's overrides come first, what the verb itself needs comes next, what is typed now comes last. There is
one rule: an override takes the place of earlier ones of its key and of every key below it. So `policy.temperature=1`
changes one number of the recorded policy, and `policy=other` drops all that was recorded of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ares_exp.episode_ref import EpisodeRef
from ares_exp.errors import ConfigError
from ares_exp.override_text import listed, quoted
from ares_exp.recorded_overrides import check_recorded_overrides
from ares_exp.recorded_run import (
    SWEEP_RECORD,
    RecordedRun,
    RecordedSweep,
    begins_where_started,
    is_folder_of_runs,
)
from ares_exp.run_dir import RunDir

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

VERBS = ("resume", "replay", "branch_from")
BRANCH_KEYS = ("branches", "branch_inject", "branch_edit", "branch_answer")
RESUME_KEYS = ("resume", "resume_redo", "resume_diverged", "resume_force")
ASKED_FOR = (*VERBS, *BRANCH_KEYS, *RESUME_KEYS, "attempts", "env.tasks", "env.exclude", "env.limit", "hydra")
"""What a run was asked for, and not how it was composed."""
OF_ONE_SESSION = ("resume", "resume_redo", "resume_force", "hydra.run.dir", "hydra.sweep.dir", "hydra.mode")
"""What was said of a session, and not of the run or the sweep."""


class DerivedCommand(NamedTuple):
    """A command line, ready for Hydra.

    Attributes:
        argv: Flags and overrides.
        source: The run that some of the overrides come from; `None` if all were typed.
    """

    argv: list[str]
    source: Path | None = None


def derive(flags: Sequence[str], overrides: Sequence[str]) -> DerivedCommand:
    """The command line that these mean: they themselves, unless one of the overrides is a verb.

    Raises:
        ConfigError: The run, episode or step does not exist; a recorded override cannot be used again; or the verb and
            what is typed with it do not go together.
        hydra.errors.OverrideParseException: Something typed is no override.
    """
    as_typed = DerivedCommand([*flags, *overrides])
    if not any(_key(one) in (*VERBS, *BRANCH_KEYS) for one in overrides):
        return as_typed
    typed = _parsed(overrides)
    verbs = {one.key_or_group: one for one in typed if one.key_or_group in VERBS and _is_verb(one)}
    if not verbs:
        if alone := [one.key_or_group for one in typed if one.key_or_group in BRANCH_KEYS]:
            raise ConfigError(f"`{alone[0]}` belongs to a branch: name one with `branch_from=<run>/<episode>@<step>`.")
        return as_typed
    if len(verbs) > 1:
        raise ConfigError(f"Expected one of {', '.join(f'`{verb}=`' for verb in verbs)}: a command does one thing.")
    [(verb, named)] = verbs.items()
    if named.is_sweep_override():
        raise ConfigError(f"Expected `{verb}` to be one episode or run, got a sweep. Give each a command of its own.")
    if verb == "resume":
        if not named.value():  # a variable of the shell that was not set, and no `.`
            raise ConfigError("Expected `resume=<run dir>`, got no directory. That in which you are is `resume=.`.")
        return _resume(Path(str(named.value())).expanduser(), flags, [one for one in typed if one is not named])
    ref = EpisodeRef.parse(str(named.value()))
    needed = (_replay if verb == "replay" else _branch)(ref, typed)
    own = [one for one in typed if one.key_or_group != verb]
    lines = _merged(_inherited(ref.run, ASKED_FOR), _parsed([*needed, *_search_path(ref.run)]), own)
    return DerivedCommand([*flags, *lines], source=ref.run.path)


def _is_verb(override: Override) -> bool:
    """`resume=true` names no run: it is a key like others."""
    value = override.value()
    return value is not None and not (override.key_or_group == "resume" and isinstance(value, bool))


def _resume(path: Path, flags: Sequence[str], typed: Sequence[Override]) -> DerivedCommand:
    """The command of the run, or of the sweep, once more, in its own directory."""
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        _refuse(typed, "resume", key, "the run goes on where it is")
    place = path.absolute()
    if (place / SWEEP_RECORD).is_file():
        run: RecordedRun = RecordedSweep(place)
        flags = flags if {"-m", "--multirun"} & {*flags} else [*flags, "-m"]
        needed = ["resume=true", f"hydra.sweep.dir={quoted(str(place))}"]
    else:
        if {"-m", "--multirun"} & {*flags}:
            raise ConfigError(f"{path} is one run and no sweep: leave `-m` out.")
        if place.is_dir() and not RunDir(place).has_run and not is_folder_of_runs(place):
            raise ConfigError(
                f"There is nothing to resume in {path}: its run was killed before it began, or there was none. Start "
                "it again."
            )
        run = RecordedRun(place)
        needed = ["resume=true", f"hydra.run.dir={quoted(str(place))}"]
    recorded = _inherited(run, OF_ONE_SESSION)
    return DerivedCommand([*flags, *_merged(recorded, _parsed([*needed, *_search_path(run)]), typed)], source=place)


def _replay(ref: EpisodeRef, typed: Sequence[Override]) -> list[str]:
    """What `replay=` is short for. All attempts that were recorded are played, unless `attempts=` says otherwise."""
    _refuse(typed, "replay", "policy", "the recorded answers are the policy")
    for key in BRANCH_KEYS:
        _refuse(typed, "replay", key, "it belongs to `branch_from=<run>/<episode>@<step>`")
    if ref.step is not None:
        raise ConfigError(f"A replay is of whole episodes: leave `@{ref.step}` out, or use `branch_from=`.")
    episodes = [ref.episode] if ref.episode is not None else list(ref.run.trajectories())
    if not episodes:
        others = [episode.episode_id for episode in ref.run.trajectories(partial=True)]
        named = f" One that did not end has to be named: `replay={ref.run.path}/{others[0]}`." if others else ""
        raise ConfigError(f"Expected the trajectory of an episode in {ref.run.path}, found none.{named}")
    attempts = Counter(episode.task_name for episode in episodes)
    return [
        f"replay={quoted(str(ref))}",
        "policy=replay",
        f"policy.trajectory={quoted(str(ref.run.path))}",
        f"policy.episode={'null' if ref.episode is None else quoted(ref.episode.episode_id)}",
        "policy.strict=false",
        f"env.tasks={listed(attempts)}",
        f"attempts={max(attempts.values())}",
        "snapshot=none",
    ]


def _branch(ref: EpisodeRef, typed: Sequence[Override]) -> list[str]:
    """What the composing of a branch needs; the branching itself is the job's."""
    _refuse(typed, "branch_from", "attempts", "`branches` is their number")
    episode = ref.episode
    if episode is None or ref.step is None:
        have = (
            f"it has the steps 0 to {episode.last_step}"
            if episode is not None
            else "its episodes are in episodes.jsonl"
        )
        raise ConfigError(f"Expected `branch_from=<run>/<episode>@<step>`, got {ref}: {have}.")
    return [
        f"branch_from={quoted(str(ref))}",
        f"env.tasks={listed([episode.task_name])}",
        "attempts=${branches}",
    ]


def _refuse(typed: Sequence[Override], verb: str, key: str, reason: str) -> None:
    if any(_place(one) == key for one in typed):
        raise ConfigError(f"`{key}` cannot be set with `{verb}`: {reason}. Leave `{key}=…` out.")


def _inherited(run: RecordedRun, dropped: Sequence[str]) -> list[Override]:
    """The recorded overrides but for the dropped keys, its relative paths made absolute if need be."""
    from hydra.errors import OverrideParseException

    try:
        recorded = _parsed(run.overrides())
    except OverrideParseException as error:
        raise ConfigError(f"{run.path} recorded an override that cannot be read: `{error.override}`.") from error
    kept = [one for one in recorded if not any(_covers(key, _place(one)) for key in dropped)]
    place = run.working_directory() if kept else Path.cwd()
    given = {one.key_or_group for one in recorded if one.value() is not None}
    return kept if place == Path.cwd() else _parsed([_from(place, one, given) for one in kept])


def _from(place: Path, override: Override, given: Collection[str]) -> str:
    """The override as it was meant in the folder where it was typed, among others of the keys `given`."""
    value, line = override.value(), str(override.input_line)
    given_paths = value if isinstance(value, list) else [value]
    paths = [path for path in given_paths if isinstance(path, str) and path]
    if len(paths) < len(given_paths):
        return line
    if not begins_where_started(override.key_or_group, given) or any("${" in path for path in paths):
        return line
    if all(Path(path).is_absolute() for path in paths):
        return line
    meant = [str(place / path) for path in paths]
    return f"{line.partition('=')[0]}={listed(meant) if isinstance(value, list) else quoted(meant[0])}"


def _search_path(run: RecordedRun) -> list[str]:
    """The recorded folders of options, if there are any. They name classes: a run cannot bring its own."""
    folders = run.config_dirs()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{run.path} was composed with the options in {folder}, which is no folder any more.")
        if not folder.is_absolute() or folder.resolve().is_relative_to(run.path.resolve()):
            raise ConfigError(f"Expected the folder of options of {run.path} outside of it, got {folder}.")
    return [f"hydra.searchpath={listed(f'file://{folder}' for folder in folders)}"] if folders else []


def _merged(recorded: Sequence[Override], needed: Sequence[Override], typed: Sequence[Override]) -> list[str]:
    """The lines of all, those left out that a later one replaces."""
    from hydra.core.override_parser.types import OverrideType

    later = [*needed, *typed]
    kept = [one for one in recorded if not any(_covers(_place(new), _place(one)) for new in later)]
    check_recorded_overrides(kept)
    kept += [one for one in needed if not any(_covers(_place(new), _place(one)) for new in typed)]
    added = {_place(one): one.type for one in recorded if one.type in (OverrideType.ADD, OverrideType.FORCE_ADD)}
    lines = [str(one.input_line) for one in kept]
    for one in typed:
        if _place(one) not in added:
            lines.append(str(one.input_line))
        elif one.type is not OverrideType.DEL:  # the recorded override had made the key: it is made anew, or not at all
            lines.append(f"++{str(one.input_line).lstrip('+')}")
    return lines


def _place(override: Override) -> str:
    """The key that it sets: of `policy@env.oracle=…` that where the option goes."""
    package = override.package
    return override.key_or_group if not package or package.startswith("_") else str(package)


def _covers(key: str, other: str) -> bool:
    return other == key or other.startswith((f"{key}.", f"{key}/"))


def _parsed(lines: Sequence[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed: list[Override] = OverridesParser.create().parse_overrides(overrides=list(lines))
    return parsed


def _key(line: str) -> str:
    return line.partition("=")[0].lstrip("+~")
