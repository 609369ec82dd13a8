"""Forks: several environments that continue from the same point of an episode."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ares_exp.cancellation import finish
from ares_exp.containers.ownership import OwnedDirectory, short_lived_directory
from ares_exp.environment import TimeStep
from ares_exp.environments.exporting import export_episode
from ares_exp.environments.restoring import Continuation
from ares_exp.errors import SnapshotError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment

EnvironmentT = TypeVar("EnvironmentT", bound="CodeEnvironment")


async def fork_episode(
    episode: EnvironmentT, time_step: TimeStep[LLMRequest], n: int, *, diversify: bool
) -> list[EnvironmentT]:
    """Makes environments that wait where the episode waits; see `CodeEnvironment.fork`.

    Args:
        episode: Their starting point.
        time_step: The pending one.
        n: How many, at least 1.
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
            seed = _seed_of(parent, branch) if diversify else None
            if (files := episode.setup.output_dir) is not None:
                files = files.with_name(f"{files.name}-fork-{parent}-{branch}")
            continuation = Continuation(
                snapshot, task=episode.task, lineage=lineage, new_seed=seed, on_release=shared.give_up
            )
            parts = replace(episode.setup, output_dir=files, start_from=continuation)
            made.append(type(episode).for_episode(episode.task, parts))
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


def _seed_of(snapshot_id: str, branch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{snapshot_id}/{branch}".encode()).digest()[:8], "big")
