"""The solution of a task, which the oracle plays."""

from __future__ import annotations

from pathlib import Path

from ares_exp.containers.container import Container
from ares_exp.errors import TaskError
from ares_exp.tasks.task_files import UploadFilter, require_uploaded, uploadable
from ares_exp.tasks.verification.root_commands import as_root

SOLUTION_DIR = "/solution"
SOLVE_SCRIPT = "solve.sh"


def find_solution(root: Path, folder: Path) -> Path:
    """Finds the directory with the solution: the step's, where it has one, or the task's.

    Args:
        root: The task directory.
        folder: That of the step; of a task without steps the same.

    Raises:
        TaskError: There is none, or its script is left out of what is uploaded.
    """
    own = folder / "solution"
    script = (own if own.is_dir() else root / "solution") / SOLVE_SCRIPT
    if not script.exists():
        raise TaskError(
            f"{script}: expected the task's solution, found no file. Write one; only "
            "policies other than `oracle` do without."
        )
    require_uploaded(script, UploadFilter(root))
    return script.parent


async def upload_solution(container: Container, root: Path, folder: Path) -> None:
    """Puts the solution into the container, ready to run as `/solution/solve.sh`; see `find_solution`.

    Raises:
        TaskError: There is none.
        ContainerError: The container failed.
    """
    async with uploadable(root, find_solution(root, folder)) as solution:
        await container.upload(solution, SOLUTION_DIR)
    await as_root(container, f"chmod +x {SOLUTION_DIR}/{SOLVE_SCRIPT}")
