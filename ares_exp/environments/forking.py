"""Forks: several environments that continue from the same point of an episode."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ares_exp.cancellation import finish
from ares_exp.containers.owned_directory import OwnedDirectory, short_lived_directory
from ares_exp.environment import TimeStep
from ares_exp.environments.episode_setup import EpisodeSetup
from ares_exp.environments.exporting import export_episode
from ares_exp.environments.restoring import Continuation
from ares_exp.errors import SnapshotError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment

EnvironmentT = TypeVar("EnvironmentT", bound="CodeEnvironment")


async def fork_episode(
    episode: CodeEnvironment,
    time_step: TimeStep[LLMRequest],
    n: int,
    make: Callable[[EpisodeSetup, Continuation], EnvironmentT],
    *,
    diversify: bool,
) -> list[EnvironmentT]:
    """Makes environments that wait where the episode waits; see `CodeEnvironment.fork`.

    Args:
        episode: Their starting point.
        time_step: The pending one.
        n: How many, at least 1.
        make: Makes one, not reset yet.
        diversify: Whether their agents draw different values.
    """
    factory = episode.setup.code_agent_factory
    if not factory.can_be_restored:
        raise SnapshotUnsupportedError(
            f"Episodes of {factory.name} cannot be forked: the agent is a process in its container, and cannot be put "
            "into another one. Branch a recorded run (`branch_from=`), which plays its answers again."
        )
    making = asyncio.create_task(asyncio.to_thread(_directory))
    made: list[EnvironmentT] = []
    try:
        await finish(asyncio.wait({making}))  # even when the caller is cancelled: it has to be removed
        shared = _Shared(making.result(), n)
        snapshot = await export_episode(episode, time_step, shared.path, None)
        parent = snapshot.snapshot_id  # the episode itself has no name here: the point where it was forked has
        for branch in range(n):
            lineage = {
                "root": episode.lineage.get("root", parent),
                "parent": parent,
                "step": episode.step_count,
                "branch": branch,
            }
            seed = _seed_of(snapshot.snapshot_id, branch) if diversify else None
            made.append(
                make(
                    _setup_of(episode.setup, f"{snapshot.snapshot_id}-{branch}"),
                    Continuation(
                        snapshot,
                        task=episode.task,
                        lineage=lineage,
                        new_seed=seed,
                        on_release=shared.give_up,
                    ),
                )
            )
        async with asyncio.TaskGroup() as resets:
            for environment in made:
                resets.create_task(environment.reset())
    except BaseException as error:
        await finish(_close_all(made))
        if making.done() and not making.cancelled() and making.exception() is None:
            await finish(asyncio.to_thread(making.result().remove))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return made


class _Shared:
    """The directory that the environments of a fork have in common.

    Attributes:
        path: The directory. Contents that its containers started with are read from there when they are captured.
    """

    def __init__(self, directory: OwnedDirectory, users: int) -> None:
        self.path = directory.path
        self._directory = directory
        self._users = users

    async def give_up(self) -> None:
        """Releases the episode of one environment; the last one removes the directory."""
        self._users -= 1
        if not self._users:
            await asyncio.to_thread(self._directory.remove)


def _directory() -> OwnedDirectory:
    try:
        return short_lived_directory("fork")
    except OSError as error:
        raise SnapshotError(f"Cannot make a directory for a fork: {error.strerror or error}.") from None


async def _close_all(environments: Sequence[CodeEnvironment]) -> None:
    await asyncio.gather(*(environment.close() for environment in environments), return_exceptions=True)


def _setup_of(setup: EpisodeSetup, name: str) -> EpisodeSetup:
    """Copies the setup, with a separate directory for the verifier's files."""
    if setup.output_dir is None:
        return setup
    return replace(setup, output_dir=setup.output_dir.with_name(f"{setup.output_dir.name}-fork-{name}"))


def _seed_of(snapshot_id: str, branch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{snapshot_id}/{branch}".encode()).digest()[:8], "big")
