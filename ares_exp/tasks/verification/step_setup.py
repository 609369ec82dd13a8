"""Functions that prepare a container before its agent starts: health checks, step set-up, and solution upload."""

from __future__ import annotations

import asyncio
import logging
import posixpath
import shlex
import time
from pathlib import Path

from ares_exp.containers.container import Container, User
from ares_exp.errors import HealthcheckError, StepSetupError, TaskError
from ares_exp.tasks.task_files import UploadFilter, require_uploaded, uploadable
from ares_exp.tasks.task_toml import HealthCheck
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL, as_root

MAX_HEALTH_CHECK_SEC = 3600.0
"""Time limit in seconds for all tries of a health check together, because a task cannot set such a limit."""

_logger = logging.getLogger(__name__)


def longest_sec(check: HealthCheck | None) -> float:
    """Returns the maximum duration of all tries of a health check in seconds; 0 if there is no check."""
    if check is None:
        return 0.0
    once = whole_seconds(check.timeout_sec)
    if once is None:
        return MAX_HEALTH_CHECK_SEC
    counted = max(check.retries, 1) * (once + check.interval_sec)
    return min(check.start_period_sec + once + check.start_interval_sec + counted, MAX_HEALTH_CHECK_SEC)


async def await_health(check: HealthCheck, container: Container, *, user: User | None = None) -> None:
    """Repeats a health check until it succeeds or has failed too often.

    Failures within the check's `start_period_sec` are not counted.

    Raises:
        HealthcheckError: The check failed `retries` times, one try exceeded the check's `timeout_sec`, or all tries
            together exceeded `MAX_HEALTH_CHECK_SEC`.
        ContainerError: The container failed.
    """
    try:
        async with asyncio.timeout(MAX_HEALTH_CHECK_SEC):
            await _run(check, container, user)
    except TimeoutError:
        raise HealthcheckError(
            f"The health check `{check.command}` did not succeed within {MAX_HEALTH_CHECK_SEC:g} s."
        ) from None


async def _run(check: HealthCheck, container: Container, user: User | None) -> None:
    starts_to_count = time.monotonic() + check.start_period_sec
    failures = 0
    while True:
        counts = time.monotonic() >= starts_to_count
        result = await container.exec(check.command, user=user, timeout_sec=whole_seconds(check.timeout_sec))
        if result.timed_out:  # not counted as a failed attempt, because the state of its command is unknown
            raise HealthcheckError(
                f"The health check `{check.command}` did not end within its limit of {check.timeout_sec:g} s."
            )
        if result.exit_code == 0:
            return
        _logger.debug("The health check `%s` returned exit code %s: %s", check.command, result.exit_code, result.output)
        failures += counts
        if counts and failures >= check.retries:
            raise HealthcheckError(
                f"The health check `{check.command}` failed {failures} times, the last time with exit code "
                f"{result.exit_code}: {result.output.strip()[-_SHOWN_OUTPUT_CHARS:] or 'no output'}"
            )
        await asyncio.sleep(check.interval_sec if counts else check.start_interval_sec)


def whole_seconds(limit: float) -> float | None:
    """Rounds a time limit down to whole seconds, as Harbor does; `None` (no limit) if it is below 1 s or infinite."""
    return float(int(limit)) if 1 <= limit < float("inf") else None


SETUP_SCRIPT = "setup.sh"
SETUP_TIMEOUT_SEC = 3600.0
"""Time limit of the set-up script of a step in seconds, because a task cannot set such a limit."""
_SHOWN_OUTPUT_CHARS = 2000


def longest_set_up_sec(folder: Path, health_check: HealthCheck | None) -> float:
    """Returns the maximum duration of `set_up_step` in seconds."""
    has_script = (folder / "workdir" / SETUP_SCRIPT).exists()
    return SETUP_TIMEOUT_SEC * has_script + longest_sec(health_check)


async def set_up_step(
    container: Container, folder: Path, *, user: User | None, health_check: HealthCheck | None
) -> None:
    """Copies the step's `workdir/` to the working directory, then runs `setup.sh` and the step's health check.

    `folder` is the task's directory `steps/<name>`. `user` is the user of the step's agent.

    Raises:
        StepSetupError: The script failed or took too long.
        HealthcheckError: The check failed.
        ContainerError: The container failed.
    """
    files = folder / "workdir"
    if files.is_dir():
        here = await container.exec("pwd", user=user, timeout_sec=60, shell=PLAIN_SHELL)
        if here.exit_code != 0:
            raise StepSetupError(f"Step {folder.name!r} has no working directory: {here.output.strip()}.")
        workdir = (here.output.splitlines() or ["/"])[-1]
        await container.upload(files, workdir)
        if (files / SETUP_SCRIPT).exists():
            script = shlex.quote(posixpath.join(workdir, SETUP_SCRIPT))
            result = await container.exec(f"bash {script}", user=user, timeout_sec=SETUP_TIMEOUT_SEC)
            if result.exit_code != 0:
                late = f"did not end within {SETUP_TIMEOUT_SEC:g} s"
                raise StepSetupError(
                    f"{SETUP_SCRIPT} of step {folder.name!r} "
                    f"{late if result.timed_out else f'failed with exit code {result.exit_code}'}. Its last output:\n"
                    f"{result.output.strip()[-_SHOWN_OUTPUT_CHARS:] or 'no output'}"
                )
    if health_check is not None:
        await await_health(health_check, container, user=user)


SOLUTION_DIR = "/solution"
SOLVE_SCRIPT = "solve.sh"


def find_solution(root: Path, folder: Path) -> Path:
    """Returns the directory of the solution: `folder/solution` if it exists, otherwise `root/solution`.

    `folder` is the directory of the step, and `root` is the directory of the task.

    Raises:
        TaskError: The solution is missing, or its script is excluded from the upload.
    """
    own = folder / "solution"
    script = (own if own.is_dir() else root / "solution") / SOLVE_SCRIPT
    if not script.exists():
        raise TaskError(f"{script}: the task's solution is missing. Add it, or use a policy other than `oracle`.")
    require_uploaded(script, UploadFilter(root))
    return script.parent


async def upload_solution(container: Container, root: Path, folder: Path) -> None:
    """Uploads the solution (see `find_solution`) to `/solution` in the container, and makes its script executable."""
    async with uploadable(root, find_solution(root, folder)) as solution:
        await container.upload(solution, SOLUTION_DIR)
    await as_root(container, f"chmod +x {SOLUTION_DIR}/{SOLVE_SCRIPT}", purpose="make the solution executable")
