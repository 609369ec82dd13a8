"""What a verifier's own container is made from."""

from __future__ import annotations

from pathlib import Path

from ares_exp.tasks.task_files import CONTAINER_DEFINITIONS
from ares_exp.tasks.task_toml import VerifierSection


def verifier_image(*places: tuple[VerifierSection, Path]) -> tuple[str | None, Path | None]:
    """The first prebuilt image, or directory with the definition of one; neither: it is as the agent's container.

    Args:
        places: `[verifier]` and the `tests/` directory beside it: those of the step, then those of the task.
    """
    for section, tests in places:
        if section.environment is not None and section.environment.docker_image:
            return section.environment.docker_image, None
        if any((tests / name).exists() for name in CONTAINER_DEFINITIONS):
            return None, tests
    return None, None
