"""`SweBenchTask`, a task made from a row of SWE-bench."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.errors import TaskError, UnsupportedTaskError
from ares_exp.tasks.swebench.official import official_version
from ares_exp.tasks.swebench.repository import REPOSITORY, set_up_repository
from ares_exp.tasks.swebench.rows import SweBenchRow
from ares_exp.tasks.swebench.stage import SweBenchStage
from ares_exp.tasks.task_contract import AgentContext, Verdict
from ares_exp.tasks.verification.root_commands import make_log_dirs

START_TIMEOUT_SEC = 3600.0
"""Time limit in seconds for pulling an image of several gigabytes and starting its container."""

IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
LOG_DIRS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


@dataclass(frozen=True, eq=False)
class SweBenchTask:
    """A task made from a row. Implements `ares_exp.tasks.task_contract.Task`.

    Attributes:
        row: The row.
        source: Name or path of the data set.
        hints: Whether the instruction includes the comments on the issue.
        agent_network: Network of the agents.
        test_timeout_sec: Time limit of the tests in seconds.
    """

    row: SweBenchRow
    source: str
    hints: bool = False
    agent_network: Literal["public", "no-network"] = "public"
    test_timeout_sec: float = 1800.0

    set_up_timeout_sec = 0.0

    @property
    def name(self) -> str:
        """The row's `instance_id`."""
        return self.row.instance_id

    @property
    def context(self) -> AgentContext:
        """An empty context, because agents only get the instruction."""
        return AgentContext()

    @cached_property
    def fresh_spec(self) -> ContainerSpec:
        """Specification of a container with the row's image or, if the row has none, with the published image."""
        published = IMAGE.format(id=self.name.lower().replace("__", "_1776_"))  # registries reject `__`
        return ContainerSpec(
            name=self.name,
            docker_image=self.row.image or published,
            workdir=REPOSITORY,
            users=frozenset({"root"}),
            start_timeout_sec=START_TIMEOUT_SEC,
        )

    @cached_property
    def container_spec(self) -> ContainerSpec:
        """The specification of the agent's container."""
        return replace(self.fresh_spec, phase_networks=frozenset({self.stages[0].agent_network}) - {PUBLIC})

    @cached_property
    def stages(self) -> tuple[SweBenchStage, ...]:
        """A tuple with the only stage."""
        network = PUBLIC if self.agent_network == "public" else NO_NETWORK
        return (SweBenchStage(self.row, self.hints, network, self.test_timeout_sec, self.fresh_spec),)

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the row, the hints option and the image."""
        how = [self.hints, self.fresh_spec.docker_image, self.row.digest]
        return f"sha256:{hashlib.sha256(json.dumps(how).encode()).hexdigest()}"

    def describe(self) -> Mapping[str, Any]:
        """Returns the JSON-ready identity of the task for records."""
        return {
            "format": "swebench",
            "name": self.name,
            "path": self.source,
            "digest": self.digest,
            "repo": self.row.repo,
            "base_commit": self.row.base_commit,
        }

    def check_runnable(self, *, needs_solution: bool, supported: frozenset[str] | None = None) -> None:
        """Checks the task for errors that an episode would otherwise encounter. Every agent supports SWE-bench tasks.

        Raises:
            UnsupportedTaskError: The row is from the multimodal data set, or the official harness is not installed.
            TaskError: The row has no test script, or the required fix is missing.
        """
        if self.row.is_multimodal:
            raise UnsupportedTaskError(f"{self.name}: the multimodal SWE-bench is not supported.")
        if not self.row.eval_script.strip():
            raise TaskError(
                f"{self.name}: the row has no `eval_script`, because the copy of the data "
                "set is old. Load the data set by its name (env.dataset=verified)."
            )
        if official_version() is None:
            raise UnsupportedTaskError(
                f"{self.name}: grading needs the official harness, the package swebench (5 or newer), which is "
                "not installed. Run `pip install 'ares-exp[swebench]'`."
            )
        if needs_solution:
            self.stages[0].check_solution()

    async def set_up(self, container: Container) -> None:
        """Creates the log directories, and removes everything from the history that is newer than the base commit."""
        await make_log_dirs(container, *LOG_DIRS)
        await set_up_repository(container, self.row.base_commit)

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the verdict of the only stage."""
        return verdicts[-1]
