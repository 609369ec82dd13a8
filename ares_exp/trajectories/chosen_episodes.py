"""Episodes named by an argument of the command line."""

from __future__ import annotations

from pathlib import Path

from ares_exp.errors import UserError
from ares_exp.records.latest_run import MEANING
from ares_exp.trajectories.episode_places import is_run
from ares_exp.trajectories.stored_episodes import StoredEpisode, StoredEpisodes, load

HELP = f"a file, a run directory, or either followed by /ID, where the start of the id is enough; {MEANING}"


def chosen_episodes(path: Path) -> StoredEpisodes:
    """Finds everything at `path`, or, if its last part is no file, the episodes whose id starts with it.

    Raises:
        TrajectoryFormatError: There is no such path, or a file that was asked for is broken.
        UserError: No episode's id starts so.
    """
    here = path.parent == Path() and not is_run(path.parent)  # a mistyped name is no reason to look through everything
    if path.exists() or not path.parent.exists() or path.parent == path or here:
        return load(path, partial=True, skip_broken=path.is_dir())
    episodes, prefix = load(path.parent, partial=True, skip_broken=True), path.name
    found = episodes.filter(where=lambda episode: episode.episode_id.startswith(prefix))
    if len(exact := found.filter(where=lambda episode: episode.episode_id == prefix)) == 1:
        return exact
    if not found:
        broken = next((problem for problem in episodes.left_out if f"/{prefix}" in problem), None)
        raise UserError(
            broken
            or f"Expected {path} to be a file, a folder or an episode's id in {path.parent}: there is no such file, "
            f"and of {len(episodes)} episodes in {path.parent} none has an id that starts with {prefix!r}."
        )
    return found


def chosen_episode(path: Path) -> StoredEpisode:
    """Finds the only episode that `path` means.

    Raises:
        TrajectoryFormatError, UserError: As above, or there are none or several.
    """
    episodes = chosen_episodes(path)
    if len(episodes) == 1:
        return episodes[0]
    if not episodes:
        raise UserError(f"Expected an episode, found none in {path}.{_left_out(episodes)}")
    raise UserError(
        f"Expected one episode, found {len(episodes)} in {path}: name one, such as {path_of_one(path, episodes)}. "
        f"`ares-exp show {path}` lists them."
    )


def path_of_one(path: Path, episodes: StoredEpisodes) -> Path:
    """Returns what to write for the first of several episodes that `path` means: it may end with part of an id."""
    return (path if path.exists() else path.parent) / episodes[0].episode_id


def _left_out(episodes: StoredEpisodes) -> str:
    return f" Left out: {episodes.left_out[0]}" if episodes.left_out else ""
