"""The context manager `driven`: a run whose episodes are submitted by your code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.cancellation import finish
from ares_exp.errors import UserError
from ares_exp.policies.policy import Policy, as_policy
from ares_exp.runs.from_python import checked_overrides, only_run
from ares_exp.training.driver import EpisodeDriver

if TYPE_CHECKING:
    from ares_exp.llms.request import LLMClient
    from ares_exp.runs.trainer import TrainedRun


@asynccontextmanager
async def driven(
    overrides: Sequence[str] = (),
    *,
    policy: LLMClient | None = None,
    max_staleness: int | None = None,
    config_dirs: Sequence[str | Path] = (),
    quiet: bool = True,
) -> AsyncIterator[EpisodeDriver]:
    """Starts a run, or resumes one (`resume=outputs/first`), for episodes that you submit to its driver.

    ```
    async with ares_exp.driven(["env=harbor", "agent=tools"], policy=my_policy) as driver:
        async for episode in driver.submit(["hello-world"], n=8):
            learn_from(episode)
        await driver.update("1")
    ```

    When the body ends or raises an exception, running episodes are cancelled, all containers are released, and the run
    is closed. The run uses the event loop of the caller.

    Args:
        overrides: Overrides as on the command line. `attempts` has no effect.
        policy: Policy to use instead of an option of `policy`. It is closed at the end of the run.
        max_staleness: Maximum staleness of an episode, as for `EpisodeDriver`.
        config_dirs: Folders of options, as for `--config-dir`.
        quiet: Whether to print no progress and no summary.

    Yields:
        The driver.

    Raises:
        UserError: The overrides are invalid, or a part of the run cannot be used. No container was started.
    """
    from ares_exp.runs.composing import compose_job, run_log

    folders = [Path(folder) for folder in config_dirs]
    body = Body(max_staleness)
    given: dict[str, Any] = {"trainer": body}
    if policy is not None:
        given["policy"] = as_policy(policy)
    with only_run():
        job = await asyncio.to_thread(compose_job, checked_overrides(overrides), folders, quiet=quiet, given=given)
        with run_log(job.logging, overrides):
            running: asyncio.Task[Any] = asyncio.create_task(job.run.execute())
            try:
                yield await _started(running, body)
            except UserError:
                job.run.run_dir.discard()
                raise
            finally:
                body.ended.set()
                await finish(asyncio.wait({running}))
            running.result()


async def _started(running: asyncio.Task[Any], body: Body) -> EpisodeDriver:
    """Waits until the run has started, and returns its driver.

    Raises:
        UserError: The run ended before the driver was created. Other errors of the run are raised unchanged.
    """
    started: asyncio.Task[Any] = asyncio.create_task(body.started.wait())
    try:
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        started.cancel()
    if body.driver is None:
        await running
        raise UserError("The run was interrupted before it started.")
    return body.driver


class Body:
    """A trainer that provides a driver to the body of the caller's `with` statement."""

    def __init__(self, max_staleness: int | None) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.driver: EpisodeDriver | None = None
        self._max_staleness = max_staleness

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Accepts every policy and every task."""

    async def train(self, run: TrainedRun) -> None:
        """Provides a driver to the body of the `with` statement, and waits until the body ends."""
        async with EpisodeDriver(run, max_staleness=self._max_staleness) as driver:
            self.driver = driver
            self.started.set()
            await self.ended.wait()
