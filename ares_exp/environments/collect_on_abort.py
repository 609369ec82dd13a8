"""The collection of artifacts from an episode that ends before it is scored.

Its agent raised, the policy failed, or it was interrupted: such episodes are looked into most.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ares_exp.containers.container import Container
from ares_exp.environments.agent_host import AgentHost
from ares_exp.environments.scoring.episode_scoring import artifacts_of, keep_agent_files, stage_dir
from ares_exp.tasks.task_contract import Stage
from ares_exp.tasks.verification.manifest import MANIFEST

COLLECT_SEC = 60.0
INTERRUPTED_COLLECT_SEC = 5.0
"""The bound where the caller is being cancelled: by Ctrl-C, say."""

_logger = logging.getLogger(__name__)


async def collect_on_abort(
    stage: Stage, host: AgentHost, container: Container, output_dir: Path, *, agent_files_dir: str | None = None
) -> None:
    """Stops the agent, runs the collect hooks and collects the artifacts of its stage, unless they are there already.

    A failure, or reaching the bound, is logged, no more. A further cancellation ends it.

    Args:
        stage: The stage in progress.
        host: Host of its agent.
        container: Container of its agent.
        output_dir: The directory of the episode on the host.
        agent_files_dir: The directory in the container that is kept for the agent's records, or `None`.
    """
    target = artifacts_of(stage, output_dir)
    task = asyncio.current_task()
    is_interrupted = task is not None and task.cancelling() > 0
    try:
        async with asyncio.timeout(INTERRUPTED_COLLECT_SEC if is_interrupted else COLLECT_SEC):
            await host.cancel()
            await keep_agent_files(container, agent_files_dir, stage_dir(stage, output_dir))
            if not await asyncio.to_thread((target / MANIFEST).exists):
                await stage.collect(container, target)
    except Exception as error:  # whatever it is, the episode has ended for another reason
        _logger.info("Not all artifacts of an episode that broke off were collected: %s", error or "it took too long")
