"""The scoring of a finished stage: collects its artifacts (files to keep) and runs the verifier."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ares_exp.cancellation import finish
from ares_exp.containers.container import Container, ContainerFactoryBase, ContainerSpec
from ares_exp.containers.network_policy import NetworkPolicy
from ares_exp.containers.ownership import working_directory
from ares_exp.environments.agent_host import AgentHost
from ares_exp.errors import (
    ContainerError,
    ContainerLostError,
    EpisodeStateError,
    TransferError,
    VerifierTimeoutError,
)
from ares_exp.tasks.task_contract import Stage, Verdict
from ares_exp.tasks.verification.collection import MANIFEST, redacted
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL

VERIFIER_FOLDER = "verifier"
ARTIFACTS_FOLDER = "artifacts"
STEPS_FOLDER = "steps"
AGENT_FOLDER = "agent"
AGENT_FILES_SEC = 120.0
"""Time limit in seconds for copying the agent's files to the host."""
MAX_AGENT_FILE_KB = 16 * 1024
"""Size limit in KiB of an agent's file. A larger file is cut to its start and end, each a quarter of the limit."""

_logger = logging.getLogger(__name__)


def stage_dir(stage: Stage, output_dir: Path) -> Path:
    """Returns the directory of a stage on the host, where `output_dir` is the directory of its episode.

    This is `output_dir/steps/NAME`, or `output_dir` itself for a task with a single, unnamed stage.
    """
    return output_dir / STEPS_FOLDER / stage.name if stage.name else output_dir


async def keep_agent_files(container: Container, files_dir: str | None, target: Path | None) -> None:
    """Copies the agent's own files, such as its logs, from `files_dir` in the container to `target/agent` on the host.

    Does nothing if `files_dir` or `target` is `None`. Copies only the start and the end of files that are larger than
    `MAX_AGENT_FILE_KB`. If the copy fails or takes too long, logs a warning. If the container has died, raises
    `ContainerDiedError`.
    """
    if files_dir is None or target is None:
        return
    folder = target / AGENT_FOLDER
    try:
        async with asyncio.timeout(AGENT_FILES_SEC), redacted(folder, ()):
            cut = await container.exec(_cut_script(files_dir), user="root", timeout_sec=None, shell=PLAIN_SHELL)
            if cut.exit_code == 0 and cut.output:
                _logger.warning(
                    "Files of the agent that are larger than %d MiB were shortened in the copy: %.500s",
                    *(MAX_AGENT_FILE_KB // 1024, cut.output.strip()),
                )
                files_dir = _cut_dir(files_dir)
            await container.download(files_dir, folder)
    except (TransferError, TimeoutError) as error:
        _logger.warning(
            "The files that the agent left in %s were not saved: %s", files_dir, error or "it took too long"
        )


def _cut_dir(files_dir: str) -> str:
    return f"{files_dir.rstrip('/')}.ares_exp-cut"


def _cut_script(files_dir: str) -> str:
    """Returns a script for the container that makes a copy of `files_dir` in which large files are shortened.

    The script prints the names of the shortened files. In the copy, small files are hard links. If no file is large,
    the script makes no copy and prints nothing.
    """
    source, cut, part = shlex.quote(files_dir), shlex.quote(_cut_dir(files_dir)), MAX_AGENT_FILE_KB * 256
    copy = f'{{ head -c {part} "$0"; printf "\n[cut by ares_exp]\n"; tail -c {part} "$0"; }} >{cut}/"$0"; echo "$0"'
    return (
        f'cd {source} && rm -rf {cut} && [ -n "$(find . -type f -size +{MAX_AGENT_FILE_KB}k | head -n 1)" ] && '
        f"find . -type d -exec mkdir -p {cut}/{{}} \\; && "
        f"find . -type f ! -size +{MAX_AGENT_FILE_KB}k -exec ln {{}} {cut}/{{}} \\; && "
        f"find . -type f -size +{MAX_AGENT_FILE_KB}k -exec sh -c {shlex.quote(copy)} {{}} \\;"
    )


class Scoring:
    """Scores one stage, in the agent's container or in a separate container for the verifier."""

    def __init__(
        self,
        stage: Stage,
        *,
        container_factory: ContainerFactoryBase,
        agents_spec: ContainerSpec,
        verifier_spec: ContainerSpec | None,
        timeout_sec: float | None,
        output_dir: Path | None,
        agent_files_dir: str | None = None,
    ) -> None:
        """Prepares the scoring, without starting anything.

        Args:
            stage: The finished stage.
            container_factory: Factory of the verifier's separate container.
            agents_spec: Specification of the agent's container.
            verifier_spec: Specification of the verifier's separate container. With `None`, the verifier runs in the
                agent's container.
            timeout_sec: Time limit of the verifier in seconds; `None` for no limit.
            output_dir: Directory of the episode on the host, or `None`.
            agent_files_dir: See `keep_agent_files`.
        """
        self._agent_files_dir = agent_files_dir
        self._output_dir = stage_dir(stage, output_dir) if output_dir is not None else None
        self._container: Container | None = None
        self._is_released = False
        self._stage = stage
        self._container_factory = container_factory
        self._agents_spec = agents_spec
        self._verifier_spec = verifier_spec
        self._timeout_sec = timeout_sec

    async def run(self, agents: Container, *, verify: bool, is_last: bool) -> Verdict | None:
        """Collects the artifacts and runs the verifier.

        Args:
            agents: The agent's container, in which the agent's processes have ended.
            verify: Whether the verifier runs. If not, only the artifacts are collected, and the verdict is `None`.
            is_last: Whether the agent's container is no longer needed after the artifacts are collected. It is then
                stopped before a separate verifier container starts.

        Raises:
            VerifierError: The verifier wrote no usable reward, or did not finish in time.
            ContainerError: A container failed.
            EpisodeStateError: `release` was called before the verifier's separate container was made.
        """
        await keep_agent_files(agents, self._agent_files_dir, self._output_dir)
        kept = self._output_dir / ARTIFACTS_FOLDER if self._output_dir is not None else None
        if self._verifier_spec is None or not verify:
            if verify:
                await self._clear(agents)
            await self._collect(agents, kept)
            return await self._verify(agents, self._agents_spec.network) if verify else None
        async with working_directory("verifier") if kept is None else nullcontext(kept) as artifacts:
            await self._collect(agents, artifacts)
            if is_last:
                await finish(agents.stop())
            async with self._started(self._verifier_spec) as container:
                await self._stage.prepare_verifier(container, artifacts)
                return await self._verify(container, self._verifier_spec.network)

    async def release(self) -> None:
        """Removes the verifier's separate container, and prevents the start of another container. Idempotent."""
        self._is_released = True
        if self._container is not None:
            await finish(self._container.stop())

    @asynccontextmanager
    async def _started(self, spec: ContainerSpec) -> AsyncIterator[Container]:
        """Starts a second container next to the agent's container, and removes it after the `async with` block."""
        if self._is_released:
            raise EpisodeStateError("The environment was closed while its episode was being scored.")
        container = self._container = self._container_factory(spec)
        try:
            await container.start()
            yield container
        finally:
            await finish(container.stop())  # also if `release` was called during the start

    async def _clear(self, agents: Container) -> None:
        """Restores the verifier's folders in the agent's container to their content in the image.

        This prevents an agent from placing files there that change the result of the tests. The original files come
        from a new container of the same image.
        """
        cleared = await self._stage.clear(agents)
        if self._container_factory.max_containers == 1:
            return  # no second container can start; such a backend rejects tasks whose image fills these folders
        for folder in cleared:
            fresh_spec = replace(self._agents_spec, changes=None, gpus=None)
            async with working_directory("verifier") as copy, self._started(fresh_spec) as fresh:
                looked = await fresh.exec(f"test -d {folder}", user="root", cwd="/", timeout_sec=60, shell=PLAIN_SHELL)
                if looked.exit_code == 0:
                    await fresh.download(folder, copy)
                    await agents.upload(copy, folder)

    async def _collect(self, agents: Container, target: Path | None) -> None:
        limit = asyncio.timeout(self._stage.collect_timeout_sec)
        try:
            async with limit:
                await self._stage.collect(agents, target)
        except TimeoutError:
            if not limit.expired():
                raise
            _logger.warning("Not all artifacts were collected within %g s.", self._stage.collect_timeout_sec)

    async def _verify(self, container: Container, network_after: NetworkPolicy) -> Verdict:
        """Runs the verifier with its own network and time limit. Afterwards, sets the network to `network_after`."""
        limit = asyncio.timeout(self._timeout_sec)
        try:
            async with limit:
                try:
                    await container.set_network(self._stage.verifier_network)
                    folder = self._output_dir / VERIFIER_FOLDER if self._output_dir is not None else None
                    return await self._stage.verify(container, folder)
                finally:
                    await finish(container.set_network(network_after))
        except TimeoutError:
            if not limit.expired():
                raise
            await _raise_if_lost(container)
            raise VerifierTimeoutError(
                f"The verifier did not finish within its limit of {self._timeout_sec:g} s."
            ) from None


async def _raise_if_lost(container: Container) -> None:
    """Raises `ContainerLostError` if the real cause of a test timeout is that the container was lost."""
    try:
        await container.exec("true", user="root", cwd="/", timeout_sec=60, shell=PLAIN_SHELL)
    except ContainerLostError:
        raise
    except ContainerError:
        return


COLLECT_SEC = 60.0
INTERRUPTED_COLLECT_SEC = 5.0
"""Time limit in seconds of `collect_on_abort` if the caller is being cancelled, for example by Ctrl-C."""


async def collect_on_abort(
    stage: Stage, host: AgentHost, container: Container, output_dir: Path, *, agent_files_dir: str | None = None
) -> None:
    """Saves the files of an episode that ended before it was scored, for example after an error or Ctrl-C.

    Stops the agent, and copies the agent's files and the stage's artifacts to the host. Failures and timeouts are only
    logged. If the caller is cancelled again, the collection stops.
    """
    folder = stage_dir(stage, output_dir)
    target = folder / ARTIFACTS_FOLDER
    task = asyncio.current_task()
    is_interrupted = task is not None and task.cancelling() > 0
    try:
        async with asyncio.timeout(INTERRUPTED_COLLECT_SEC if is_interrupted else COLLECT_SEC):
            await host.cancel()
            await keep_agent_files(container, agent_files_dir, folder)
            if not await asyncio.to_thread((target / MANIFEST).exists):
                await stage.collect(container, target)
    except Exception as error:  # not fatal: the episode has ended for another reason
        _logger.info("Not all artifacts of an interrupted episode were collected: %s", error or "it took too long")
