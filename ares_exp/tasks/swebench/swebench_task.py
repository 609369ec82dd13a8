"""`SweBenchTask`, a task made from a row of SWE-bench, and `SweBenchStage`, which grades the agent's changes.

The agent's changes to the repository are copied out of its container as a patch. As in the official harness, the patch
is graded in a fresh container with the same image. Other changes in the agent's container have no effect on the tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import Container, ContainerSpec, Shell, User
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import AddTestsDirError, TaskError, TransferError, UnsupportedTaskError, VerifierTimeoutError
from ares_exp.tasks.swebench.official import Report, official_report, official_version, rewards, ungraded
from ares_exp.tasks.swebench.repository import REPOSITORY, agent_patch, apply_patch, set_up_repository, told
from ares_exp.tasks.swebench.rows import SweBenchRow
from ares_exp.tasks.task_contract import AgentContext, Verdict
from ares_exp.tasks.verification.root_commands import as_root, make_log_dirs
from ares_exp.tasks.verification.step_setup import SOLUTION_DIR, SOLVE_SCRIPT
from ares_exp.tasks.verification.verification import TESTS_DIR

AGENT_TIMEOUT_SEC = 3600.0
"""Time limit of agents in seconds, because the data sets do not set a limit. `timeouts.agent=…` overrides it."""

MODEL_PATCH = "model.patch"
NO_PATCH = "no_patch.txt"
LOG = "test_output.txt"
REPORT = "report.json"
REWARDS = "reward.json"

MAX_LOG_BYTES = 64 * 2**20
_GRADING_SEC = 900.0
"""Seconds that the verification may take in addition to the tests, for applying patches and for grading."""

END_MARKER = ">>>>> End Test Output"
EXIT_MARKER = ">>>>> Test Exit Code"
_TEST_ENV = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf8"}

_SOLVE = f"""#!/bin/sh
# The row's own fix, applied as the official harness applies patches.
cd {REPOSITORY} || exit 1
git -c safe.directory='*' apply --verbose {SOLUTION_DIR}/gold.patch ||
patch --batch --forward --fuzz=5 -p1 -i {SOLUTION_DIR}/gold.patch
"""


@dataclass(frozen=True, eq=False)
class SweBenchStage:
    """The only stage of a row's task. Implements `ares_exp.tasks.task_contract.Stage`.

    Attributes:
        row: Row of the data set, which describes the problem.
        hints: Whether the instruction includes the comments on the GitHub issue.
        agent_network: Network of the agent.
        test_timeout_sec: Time limit of the tests in seconds.
        verifier_spec: Specification of the container for the tests, which has the same image as the agent's container.
    """

    row: SweBenchRow
    hints: bool
    agent_network: NetworkPolicy
    test_timeout_sec: float
    verifier_spec: ContainerSpec

    name = ""
    agent_timeout_sec = AGENT_TIMEOUT_SEC
    start_timeout_sec = 60.0
    collect_timeout_sec = 600.0
    verifier_network = PUBLIC
    agent_user: User | None = None
    # In published images, root's profile files activate the environment with the packages of the repository.
    agent_shell: Shell | None = "bash -lc"

    @property
    def instruction(self) -> str:
        """The text of the issue and, if `hints` is true, the comments on it."""
        statement = self.row.problem_statement.rstrip()
        hints = self.row.hints_text.strip() if self.hints else ""
        where = (
            f"The repository in {REPOSITORY} has the following issue. Change its code so that the issue is resolved."
        )
        said = f"\n\nWhat was said under the issue:\n\n{hints}" if hints else ""
        return f"{where}\n\n{statement}{said}\n"

    @property
    def verifier_timeout_sec(self) -> float:
        """Time limit of the verification in seconds: the tests, the application of patches, and the grading."""
        return self.test_timeout_sec + _GRADING_SEC

    async def start(self, container: Container) -> None:
        """Does nothing, because `SweBenchTask.set_up` has already prepared the container."""

    def solution_env(self) -> Mapping[str, str]:
        """Returns an empty mapping, because the solution needs no variables."""
        return {}

    async def upload_solution(self, container: Container) -> Mapping[str, str]:
        """Uploads the row's fix and a script `/solution/solve.sh`, which applies the fix, to the container."""
        self.check_solution()
        await _upload(container, {"gold.patch": _ended(self.row.patch), SOLVE_SCRIPT: _SOLVE}, SOLUTION_DIR)
        await as_root(container, f"chmod +x {SOLUTION_DIR}/{SOLVE_SCRIPT}", purpose="make the solution executable")
        return {}

    def check_solution(self) -> None:
        """Raises `TaskError` if the row has no fix."""
        if not self.row.patch.strip():
            raise TaskError(f"{self.row.instance_id}: the row has no solution (`patch` is empty). Use another policy.")

    async def collect(self, container: Container, target: Path | None) -> None:
        """Writes the agent's changes to `model.patch`. If no patch can be made, writes the reason to `no_patch.txt`."""
        if target is None:
            return
        patch = await agent_patch(container, self.row.base_commit)

        def write() -> None:
            target.mkdir(parents=True, exist_ok=True)
            for name in (MODEL_PATCH, NO_PATCH):  # files of an earlier episode
                (target / name).unlink(missing_ok=True)
            if patch.problem is None:
                (target / MODEL_PATCH).write_bytes(patch.data)
            else:
                (target / NO_PATCH).write_text(patch.problem + "\n", encoding="utf-8")

        await in_thread(write)

    async def clear(self, container: Container) -> Sequence[str]:
        """Does nothing, because the verifier does not run in the agent's container."""
        return ()

    async def prepare_verifier(self, container: Container, artifacts: Path) -> None:
        """Uploads `model.patch` or `no_patch.txt`, which `collect` wrote, to the verifier's fresh container."""
        for name in (MODEL_PATCH, NO_PATCH):
            if await asyncio.to_thread((artifacts / name).is_file):
                await container.upload(artifacts / name, f"{TESTS_DIR}/{name}")

    async def verify(self, container: Container, output_dir: Path | None) -> Verdict:
        """Applies the agent's patch to a fresh repository, runs the tests, and grades their output.

        The tests run with the row's `eval_script`, which restores the test files and applies the test patch. Writes
        `test_output.txt`, `report.json` and `reward.json` to `output_dir`. If the tests run longer than
        `test_timeout_sec`, raises `VerifierTimeoutError`, as in the official harness.
        """
        row = self.row
        try:
            # The script ends with `git checkout`. It must therefore print the tests' exit code, which would be lost.
            marked = rf'ares_exp_exit_code=$?\n\g<0>\necho "{EXIT_MARKER}: $ares_exp_exit_code"'
            script = re.sub(rf"^.*{END_MARKER}.*$", marked, row.eval_script, count=1, flags=re.M)
            await _upload(container, {"eval.sh": script}, TESTS_DIR)
        except TransferError as error:
            raise AddTestsDirError(f"The tests of {row.instance_id} could not be copied: {error}") from error
        if (problem := await self._apply_patch(container)) is not None:
            report, log = ungraded(row, problem, patch_applied=False), ""
        else:
            run = await container.exec(
                f"bash {TESTS_DIR}/eval.sh",
                cwd=REPOSITORY,
                env=_TEST_ENV,
                user="root",
                timeout_sec=self.test_timeout_sec,
                max_output_bytes=MAX_LOG_BYTES,
                shell="bash -c",
            )
            log = run.output
            if run.timed_out:
                reason = f"The tests did not end within env.test_timeout_sec={self.test_timeout_sec:g} s."
                await self._keep(output_dir, ungraded(row, reason), log)
                raise VerifierTimeoutError(reason)
            report = await official_report(row, log)
        await self._keep(output_dir, report, log)
        scores = rewards(report)
        return Verdict(scores["reward"], scores, report["reason"])

    async def _apply_patch(self, container: Container) -> str | None:
        """Applies the agent's patch. Returns `None` or, if the patch cannot be applied, the reason."""
        patch, no_patch = f"{TESTS_DIR}/{MODEL_PATCH}", f"{TESTS_DIR}/{NO_PATCH}"
        missing = await container.exec(f"cat {no_patch}", user="root", timeout_sec=60, shell="bash -c")
        if missing.exit_code == 0:
            return missing.output.strip()
        is_empty = await container.exec(f"[ ! -s {patch} ]", user="root", timeout_sec=60, shell="bash -c")
        if is_empty.exit_code != 0 and (done := await apply_patch(container, patch)).exit_code != 0:
            return f"The agent's patch cannot be applied: {told(done)}"
        return None

    async def _keep(self, output_dir: Path | None, report: Report, log: str) -> None:
        if output_dir is None:
            return

        def write() -> None:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / LOG).write_text(log, encoding="utf-8", errors="surrogateescape")
            for name, content in ((REPORT, {self.row.instance_id: report}), (REWARDS, rewards(report))):
                (output_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

        await in_thread(write)

    def goes_on(self, verdict: Verdict) -> bool:
        """Returns false, because this is the only stage."""
        return False


async def _upload(container: Container, files: Mapping[str, str], target: str) -> None:
    """Writes text files (contents by name) to a directory in the container. Keeps their line breaks (LF or CRLF)."""
    async with working_directory("verifier") as folder:
        for name, text in files.items():
            await in_thread(partial((folder / name).write_text, text, encoding="utf-8", newline=""))
        await container.upload(folder, target)


def _ended(patch: str) -> str:
    """Adds a final line break to a patch that has none, because git requires it."""
    return patch if not patch or patch.endswith("\n") else f"{patch}\n"


START_TIMEOUT_SEC = 3600.0
"""Time limit in seconds for pulling an image of several gigabytes and starting its container."""

IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
LOG_DIRS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


@dataclass(frozen=True, eq=False)
class SweBenchTask:
    """A task made from a row of SWE-bench. Implements `ares_exp.tasks.task_contract.Task`.

    Attributes:
        row: Row of the data set, which describes the problem.
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
        """Specification of a new container with the row's image or, by default, SWE-bench's published image."""
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
        """`sha256:` and the hex digest of the row, the option `hints` and the name of the image."""
        how = [self.hints, self.fresh_spec.docker_image, self.row.digest]
        return f"sha256:{hashlib.sha256(json.dumps(how).encode()).hexdigest()}"

    def describe(self) -> Mapping[str, Any]:
        """Returns the name, data set, digest, repository and commit of the task, as JSON-ready data for records."""
        return {
            "format": "swebench",
            "name": self.name,
            "path": self.source,
            "digest": self.digest,
            "repo": self.row.repo,
            "base_commit": self.row.base_commit,
        }

    def check_runnable(self, *, needs_solution: bool, supported: frozenset[str] | None = None) -> None:
        """Checks the task before a run, so that its errors do not occur later in an episode.

        `supported` is ignored, because every agent supports SWE-bench tasks.

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
        """Creates the log directories, and prepares the git repository with `set_up_repository`."""
        await make_log_dirs(container, *LOG_DIRS)
        await set_up_repository(container, self.row.base_commit)

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the verdict of the only stage."""
        return verdicts[-1]
