"""`SweBenchTask`: a row of SWE-bench as a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC
from ares_exp.errors import ConfigError, UnsupportedTaskError
from ares_exp.tasks.agent_context import AgentContext
from ares_exp.tasks.swebench.build_context import BuildOptions
from ares_exp.tasks.swebench.eval_commands import EvalPlan, plan_tests
from ares_exp.tasks.swebench.instance_images import image_name
from ares_exp.tasks.swebench.log_parsers import LOG_PARSERS
from ares_exp.tasks.swebench.official import official_version
from ares_exp.tasks.swebench.repository import REPOSITORY, set_up_repository
from ares_exp.tasks.swebench.rows import SweBenchRow
from ares_exp.tasks.swebench.stage import Conditions, SweBenchStage
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.verification.root_commands import make_log_dirs

START_TIMEOUT_SEC = 3600.0
"""Published images have some gigabytes, and the first to need one waits for it."""

LOG_DIRS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


@dataclass(frozen=True, slots=True)
class SweBenchOptions:
    """Options for all rows of a run.

    Attributes:
        hints: Whether the instruction has the discussion under the issue.
        agent_network: Whether agents have a network.
        image_template: Names of images; `None`: the row's, or by convention.
        build: How images are built; `None`: they are not.
        test_command: How tests are run, instead of what the row or its repository says.
        log_parser: What reads their output, likewise.
        test_timeout_sec: Bound on them.
        grader: `official`, `own`, or `auto`: the official harness for rows in its format, else ours.
    """

    hints: bool = False
    agent_network: Literal["public", "no-network"] = "public"
    image_template: str | None = None
    build: BuildOptions | None = None
    test_command: str | None = None
    log_parser: str | None = None
    test_timeout_sec: float = 1800.0
    grader: Literal["auto", "official", "own"] = "auto"


@dataclass(frozen=True, eq=False)
class SweBenchTask:
    """One row. Implements `ares_exp.tasks.task_contract.Task`.

    Attributes:
        row: The row.
        options: How it is played and graded.
        source: The data set that it is from.
    """

    row: SweBenchRow
    options: SweBenchOptions
    source: str

    @property
    def name(self) -> str:
        """The row's `instance_id`."""
        return self.row.instance_id

    @property
    def set_up_timeout_sec(self) -> float:
        """It takes a few commands."""
        return 0.0

    @property
    def context(self) -> AgentContext:
        """Agents are given nothing besides the instruction."""
        return AgentContext()

    @cached_property
    def _box(self) -> ContainerSpec:
        """A container of the row's image."""
        build = self.options.build
        return ContainerSpec(
            name=self.name,
            docker_image=image_name(self.row, self.options.image_template) if build is None else None,
            context_dir=build.context_dir(self.row) if build is not None else None,
            workdir=REPOSITORY,
            users=frozenset({"root"}),
            start_timeout_sec=START_TIMEOUT_SEC,
        )

    @cached_property
    def container_spec(self) -> ContainerSpec:
        """The specification of the agent's container."""
        return replace(self._box, phase_networks=frozenset({self.stages[0].agent_network}) - {PUBLIC})

    @property
    def needs_pytest(self) -> bool:
        """Whether a command of ours runs its tests by pytest."""
        plan = self.stages[0].conditions.plan
        return plan.probe is not None and "pytest" in plan.probe

    @cached_property
    def stages(self) -> tuple[SweBenchStage, ...]:
        """The only one.

        Raises:
            TaskError: Its test patch has no file to run.
        """
        options = self.options
        plan = plan_tests(self.row, test_command=options.test_command, log_parser=options.log_parser)
        conditions = Conditions(
            hints=options.hints,
            # Published images activate the environment with the packages of their repository in root's profile files.
            agent_shell="bash -lc" if options.build is None else None,
            agent_network=PUBLIC if options.agent_network == "public" else NO_NETWORK,
            test_timeout_sec=options.test_timeout_sec,
            plan=plan,
            is_official=self._is_official(plan),
        )
        return (SweBenchStage(self.row, conditions, self._box),)

    def _is_official(self, plan: EvalPlan) -> bool:
        """Whether the official harness grades: a row's own script, and formats that it alone can read."""
        return self.options.grader == "official" or plan.is_rows_own or plan.log_parser not in LOG_PARSERS

    @cached_property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the row, and of how it is played and graded."""
        build = self.options.build
        plan = self.stages[0].conditions.plan
        how = [self.options.hints, self._box.docker_image, plan.script, plan.log_parser, self.row.digest]
        how += [build.source(self.row), build.dockerfile] if build is not None else []
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

    def check_runnable(self, *, needs_solution: bool) -> None:
        """Checks, without starting anything, what would fail in the middle of an episode.

        Raises:
            UnsupportedTaskError: It is of the multimodal data set, or its grader is missing or does not fit.
            TaskError: It has no tests; or no fix, and one is needed.
        """
        if self.row.is_multimodal:
            raise UnsupportedTaskError(f"{self.name}: it is of the multimodal SWE-bench, which is not supported.")
        plan = self.stages[0].conditions.plan
        if self._is_official(plan):
            self._check_harness(plan)
        if needs_solution:
            self.stages[0].check_solution()

    def _check_harness(self, plan: EvalPlan) -> None:
        if self.options.grader == "own":
            raise UnsupportedTaskError(
                f"{self.name}: a row with an eval_script, or with output in the format {plan.log_parser}, is graded by "
                "the official harness alone: set env.grader=auto; or, for a repository of your own, env.test_command "
                "and env.log_parser."
            )
        if official_version() is None:
            raise UnsupportedTaskError(
                f"{self.name}: it is graded by the official harness, the package swebench (5 or newer), which is not "
                "installed: `pip install 'ares-exp[swebench]'`."
            )
        if plan.log_parser == "unittest":
            raise UnsupportedTaskError(
                f"{self.name}: the official harness does not read the format unittest. Set another env.log_parser."
            )

    async def set_up(self, container: Container) -> None:
        """Makes the log directories, and removes everything later than the base commit.

        Raises:
            ContainerError: The container failed, or its image is not that of the row.
        """
        await make_log_dirs(container, *LOG_DIRS)
        await set_up_repository(container, self.row.base_commit)

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the verdict itself."""
        return verdicts[-1]


def check_log_parser(name: str | None) -> str | None:
    """Returns the name unchanged.

    Raises:
        ConfigError: It is none of ours, and not of the form that the harness's have.
    """
    if name is not None and name not in LOG_PARSERS and not name.startswith("parse_log_"):
        raise ConfigError(f"Expected `env.log_parser` to be one of {', '.join(LOG_PARSERS)}, got {name!r:.100}.")
    return name
