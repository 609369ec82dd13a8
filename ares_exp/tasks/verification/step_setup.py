"""The set-up of a step of a multi-step task, before its agent: files, script, health check."""

from __future__ import annotations

import posixpath
import shlex
from pathlib import Path

from ares_exp.containers.container import Container, User
from ares_exp.errors import StepSetupError
from ares_exp.tasks.environment_section import HealthCheck
from ares_exp.tasks.verification.health_check import await_health, longest_sec
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL

SETUP_SCRIPT = "setup.sh"
SETUP_TIMEOUT_SEC = 3600.0
"""Bound on the script of a step: the format has none."""
_SHOWN_OUTPUT_CHARS = 2000


def longest_set_up_sec(folder: Path, health_check: HealthCheck | None) -> float:
    """Computes the upper bound on `set_up_step`, in seconds."""
    has_script = (folder / "workdir" / SETUP_SCRIPT).exists()
    return SETUP_TIMEOUT_SEC * has_script + longest_sec(health_check)


async def set_up_step(
    container: Container, folder: Path, *, user: User | None, health_check: HealthCheck | None
) -> None:
    """Copies `workdir/` to the working directory, runs the `setup.sh` in it, then the step's health check.

    Args:
        container: The agent's.
        folder: `steps/<name>` of the task.
        user: Who runs the script: the step's agent user.
        health_check: The step's own.

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
            await _run_script(container, posixpath.join(workdir, SETUP_SCRIPT), step=folder.name, user=user)
    if health_check is not None:
        await await_health(health_check, container, user=user)


async def _run_script(container: Container, script: str, *, step: str, user: User | None) -> None:
    result = await container.exec(f"bash {shlex.quote(script)}", user=user, timeout_sec=SETUP_TIMEOUT_SEC)
    if result.exit_code == 0:
        return
    what = f"did not end within {SETUP_TIMEOUT_SEC:g} s" if result.timed_out else f"gave exit code {result.exit_code}"
    raise StepSetupError(
        f"{SETUP_SCRIPT} of step {step!r} {what}; the end of its output:\n"
        f"{result.output.strip()[-_SHOWN_OUTPUT_CHARS:] or 'nothing'}"
    )
