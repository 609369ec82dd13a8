"""`SweBenchTask`, a task made from a row of SWE-bench, and `SweBenchStage`, which grades the agent's changes.

The agent's changes to the repository are copied out of its container as a patch. As in the official harness, the patch
is graded in a fresh container with the same image. Other changes in the agent's container have no effect on the tests.

Operations on the git repository in a container are shell scripts, which run as root and use the `git` of the container.
Test runs are graded with the official harness, which is the package `swebench`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from ares_exp.cancellation import in_thread
from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.container import Container, ContainerSpec, ExecResult, Shell, User
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.containers.ownership import short_lived_directory, working_directory
from ares_exp.errors import (
    AddTestsDirError,
    ContainerStartError,
    TaskError,
    TransferError,
    UnsupportedTaskError,
    VerifierError,
    VerifierTimeoutError,
)
from ares_exp.tasks.swebench.rows import SweBenchRow
from ares_exp.tasks.task_contract import AgentContext, Verdict
from ares_exp.tasks.verification.root_commands import as_root, make_log_dirs
from ares_exp.tasks.verification.step_setup import SOLUTION_DIR, SOLVE_SCRIPT
from ares_exp.tasks.verification.verification import REWARD_JSON, TESTS_DIR

REPOSITORY = "/testbed"
MAX_PATCH_BYTES = 32 * 2**20
_SET_UP_TIMEOUT_SEC = 1200.0
_GIT_TIMEOUT_SEC = 600.0
_LOG_CHARS = 2000

# The owner of the repository in the image may differ from the user who runs git there.
_ENV: Mapping[str, str] = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "LC_ALL": "C",
}

_START = "refs/ares_exp/start"
"""Name of a git ref to the files as they were before the agent started, including untracked files."""

# Defines `ours`: git with a new, separate git directory for the repository's files and objects. The agent may have
# changed or broken the repository's own configuration, hooks, attributes, index or owner. With `ours`, these cannot
# start programs or change file contents. Files that the repository ignores stay ignored.
_OURS = """
clean=$(mktemp -d)  # where a HOME is that has nothing in it either
trap 'rm -rf "$clean"' EXIT
export HOME="$clean" XDG_CONFIG_HOME="$clean" GIT_CONFIG_NOSYSTEM=1
folder=$(git rev-parse --git-common-dir 2>/dev/null) || folder=.git
folder=$(cd "$folder" 2>/dev/null && pwd) || { echo "there is no git repository any more" >&2; exit 5; }
if [ ${#BASE} -eq 40 ]; then export GIT_DEFAULT_HASH=sha1; else export GIT_DEFAULT_HASH=sha256; fi
git init -q --bare --template= "$clean/git"
mkdir "$clean/git/info"
if [ -f "$folder/info/exclude" ]; then cp "$folder/info/exclude" "$clean/git/info"; fi
ours() { GIT_DIR="$clean/git" GIT_WORK_TREE="$PWD" git "$@"; }
add_all() {
  ours add -A 2> "$clean/said" && return
  cat "$clean/said" >&2
  grep -q "does not have a commit checked out" "$clean/said" || return 1
  ours add -A --ignore-errors 2>/dev/null || :  # a repository without a commit inside of this one: left out
}
"""

# Removes refs and objects that are newer than the base commit, because they may contain the fix. Searching for
# unreachable commits takes a second in a repository of 400,000 objects. It is repacked only if such commits are found.
_SET_UP = f"""set -eu
git merge-base --is-ancestor "$BASE" HEAD || {{ echo "HEAD does not come from $BASE"; exit 3; }}
git remote | while read -r remote; do git remote remove "$remote"; done
newest=$(git show -s --format=%ct "$BASE")
git for-each-ref --no-merged HEAD --format='%(refname) %(committerdate:unix)%(*committerdate:unix)' |
  while read -r ref time; do [ "${{time:-0}}" -gt 0 ] && [ "$time" -le "$newest" ] || echo "delete $ref"; done |
  git update-ref --stdin
git reflog expire --expire=now --all
folder=$(git rev-parse --git-dir)
rm -f "$folder/FETCH_HEAD" "$folder/ORIG_HEAD"
has_more() {{
  stored=$(git cat-file --batch-all-objects --unordered --batch-check='%(objecttype)' | grep -c '^commit' || :)
  [ "$stored" -gt "$(git rev-list --count --all HEAD)" ]
}}
if has_more; then
  rm -f "$folder"/objects/pack/*.keep "$folder"/objects/pack/*.promisor
  git repack -adq
  git prune --expire=now
  if has_more; then echo "it keeps commits that nothing leads to"; exit 4; fi
fi
{_OURS}
export GIT_OBJECT_DIRECTORY="$folder/objects"
ours read-tree "$(git rev-parse HEAD)"
add_all
git update-ref {_START} "$(ours write-tree)"
"""

_PATCH = f"""set -eu
{_OURS}
export GIT_ALTERNATE_OBJECT_DIRECTORIES="$folder/objects"
start=$(git rev-parse --quiet --verify {_START} 2>/dev/null) || start=$(cat "$folder/{_START}" 2>/dev/null) || :
case "$start" in "" | *[!0-9a-f]*) start=$BASE ;; esac
ours cat-file -e "$start^{{tree}}" 2>/dev/null || start=$BASE
patch="$clean/patch"
ours read-tree "$start"
add_all
ours diff-index --cached -p --binary --full-index --no-renames --no-ext-diff --no-textconv "$start" > "$patch"
[ "$(wc -c < "$patch")" -le {MAX_PATCH_BYTES} ] || {{ echo "it is larger than {MAX_PATCH_BYTES:,} bytes" >&2; exit 4; }}
base64 < "$patch"
"""

_APPLY = """git apply --verbose --whitespace=nowarn "$PATCH" ||
git apply --verbose --whitespace=nowarn --3way "$PATCH"
"""


@dataclass(frozen=True, slots=True)
class AgentPatch:
    """An agent's changes as a patch (`git diff --binary`). If no patch could be created, `problem` is the reason."""

    data: bytes = b""
    problem: str | None = None


async def set_up_repository(container: Container, base_commit: str) -> None:
    """Prepares the repository for an agent: removes history that may contain the fix, and records the current files.

    Removes remotes, the reflog, unreachable objects, and branches and tags that are newer than the base commit.
    Commits that the creator of the image added on top of the base commit are kept. `agent_patch` later compares the
    agent's files with the recorded files.

    Raises:
        ContainerStartError: The image has no repository, or the repository lacks the commit.
        ContainerError: The container failed.
    """
    result = await _git(container, _SET_UP, timeout_sec=_SET_UP_TIMEOUT_SEC, BASE=base_commit)
    if result.exit_code != 0:
        raise ContainerStartError(
            f"The git repository in {REPOSITORY} cannot be set up at commit {base_commit}: {told(result)} "
            "Check the image of the row. It must contain git."
        )


async def agent_patch(container: Container, base_commit: str) -> AgentPatch:
    """Returns the agent's changes since `set_up_repository`, including new files, but not files that git ignores."""
    result = await _git(
        container, _PATCH, timeout_sec=_GIT_TIMEOUT_SEC, max_output_bytes=2 * MAX_PATCH_BYTES, BASE=base_commit
    )
    if result.exit_code != 0 or result.elided_bytes:
        return AgentPatch(problem=f"The patch cannot be read from the agent's repository: {told(result)}")
    try:
        return AgentPatch(base64.b64decode("".join(result.output.split()), validate=True))
    except (binascii.Error, ValueError):
        return AgentPatch(problem=("The patch cannot be read from the agent's repository: git printed invalid data."))


async def apply_patch(container: Container, path: str) -> ExecResult:
    """Applies the patch file at `path` in the container. Exit code 1 of the result means that it does not apply."""
    return await _git(container, _APPLY, timeout_sec=_GIT_TIMEOUT_SEC, PATCH=path)


async def _git(
    container: Container, script: str, *, timeout_sec: float, max_output_bytes: int = 2**20, **variables: str
) -> ExecResult:
    return await container.exec(
        script,
        cwd=REPOSITORY,
        env={**_ENV, **variables},
        user="root",
        timeout_sec=timeout_sec,
        max_output_bytes=max_output_bytes,
        shell="bash -c",
        separate_stderr=True,
    )


def told(result: ExecResult) -> str:
    """Returns the exit code of a command and the end of its output as one sentence, for messages."""
    ended = "it took too long" if result.timed_out else f"exit code {result.exit_code}"
    said = " ".join(f"{result.stderr or ''} {result.output if result.exit_code else ''}".split())[-_LOG_CHARS:]
    return f"{ended}: {said}." if said else f"{ended}."


_GRADE_TIMEOUT_SEC = 300.0
"""Time limit in seconds for grading one log, which is the output of one test run."""

_PROGRAM = Path(__file__).with_name("official_report.py")
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH")
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_DEFAULT_PARSER = "parse_log_pytest_v2"


Report = dict[str, Any]
"""The harness's report with `grader` (version of the harness) and `reason` (why grading was impossible, or `None`)."""


def rewards(report: Report) -> dict[str, float]:
    """Returns the rewards that follow from a report.

    `reward` is 1 if the issue is resolved, otherwise 0. `f2p` and `p2p` are the fractions of passed tests among the
    row's `FAIL_TO_PASS` and `PASS_TO_PASS`.
    """
    f2p, p2p = (_part(report["tests_status"][name]) for name in _TESTS)
    return {"reward": float(report["resolved"]), "f2p": f2p, "p2p": p2p}


def _part(tests: Mapping[str, Sequence[str]]) -> float:
    good, bad = len(tests["success"]), len(tests["failure"])
    return good / (good + bad) if good + bad else 1.0


def ungraded(row: SweBenchRow, reason: str, *, patch_applied: bool = True) -> Report:
    """Returns a report in which all tests have failed, for a test run that cannot be graded because of `reason`."""
    tests = zip(_TESTS, (row.fail_to_pass, row.pass_to_pass), strict=True)
    return {
        "patch_is_None": False,
        "patch_exists": True,
        "patch_successfully_applied": patch_applied,
        "resolved": False,
        "tests_status": {name: {"success": [], "failure": list(names)} for name, names in tests},
        "reason": reason,
        "grader": f"swebench {official_version()}",
    }


def official_version() -> str | None:
    """Returns the version of the installed harness, without importing it; `None` if it is missing or older than 5."""
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        return None
    major = version.partition(".")[0]
    return version if major.isdecimal() and int(major) >= 5 else None


async def official_report(row: SweBenchRow, log: str) -> Report:
    """Grades `log`, the output of a row's test script, in a child process. Raises `VerifierError` if this fails."""
    child = ChildProcess()
    return await child.stop_if_cancelled(asyncio.to_thread(_grade, child, row, log))


def _grade(child: ChildProcess, row: SweBenchRow, log: str) -> Report:
    request = {
        "instance_id": row.instance_id,
        "FAIL_TO_PASS": row.fail_to_pass,
        "PASS_TO_PASS": row.pass_to_pass,
        "log_parser": row.log_parser or _DEFAULT_PARSER,
        "eval_type": row.eval_type,
    }
    directory = short_lived_directory("verifier")
    try:
        paths = [directory.path / name for name in ("request.json", "log.txt", "report.json")]
        paths[0].write_text(json.dumps(request), encoding="utf-8")
        paths[1].write_text(log, encoding="utf-8", newline="")
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        child.run_python(_PROGRAM, [str(path) for path in paths], env=env, timeout_sec=_GRADE_TIMEOUT_SEC)
        report: Report = json.loads(paths[2].read_bytes())[row.instance_id]
    except ChildFailedError as error:
        raise VerifierError(f"The official harness could not grade {row.instance_id}: its process {error}.") from None
    except (OSError, ValueError, LookupError) as error:
        raise VerifierError(f"The official harness could not grade {row.instance_id}: {error}") from None
    finally:
        directory.remove()
    if "tests_status" not in report:
        why = report.get("infra_failure_reason")
        reason = "The official harness found no valid test run in the log"
        return ungraded(row, f"{reason} ({why})." if why else f"{reason}.")
    return {**report, "reason": None, "grader": f"swebench {official_version()}"}


AGENT_TIMEOUT_SEC = 3600.0
"""Time limit of agents in seconds, because the data sets do not set a limit. `timeouts.agent=…` overrides it."""

MODEL_PATCH = "model.patch"
NO_PATCH = "no_patch.txt"
LOG = "test_output.txt"
REPORT = "report.json"

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
            for name, content in ((REPORT, {self.row.instance_id: report}), (REWARD_JSON, rewards(report))):
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
