"""The Dockerfile of a task for `container=local`, and refusals of tasks that need an engine."""

from __future__ import annotations

from collections.abc import Mapping

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.images.dockerfile_reading import Base, Dockerfile, read_dockerfile
from ares_exp.containers.local.bubblewrap import is_privileged
from ares_exp.containers.local.container_process import ROOT_NAMES
from ares_exp.containers.local.host_root import SEARCH_PATH
from ares_exp.errors import TaskError, UnsupportedTaskError

BASE_ENV: Mapping[str, str] = {"PATH": SEARCH_PATH}
"""Variables of a container without a Dockerfile."""

ONLY_ROOT = "An ordinary user's local container has only the user root: run as root, or use container=docker."
_REMEDY = "Use container=docker for this task."


def read_task_dockerfile(spec: ContainerSpec, *, backend: str = "local") -> Dockerfile | None:
    """Reads the task's Dockerfile; `None` for a spec without one.

    Args:
        spec: The task's container.
        backend: The option's name, for messages.

    Raises:
        UnsupportedTaskError: It needs an engine.
        TaskError: The Dockerfile is missing or malformed.
    """
    if spec.compose_file is not None:
        raise UnsupportedTaskError(f"{spec.compose_file}: container={backend} runs no compose files. {_REMEDY}")
    context = spec.context_dir
    if context is not None and (context / "Dockerfile").is_file():
        refusal = f"container={backend} applies a Dockerfile to the host's root and cannot do {{}}. {_REMEDY}"
        dockerfile = read_dockerfile(context / "Dockerfile", Base(BASE_ENV), refusal=refusal)
        if backend == "local" and dockerfile.user not in ROOT_NAMES and not is_privileged():
            raise UnsupportedTaskError(f"{context / 'Dockerfile'}: USER {dockerfile.user}. {ONLY_ROOT}")
        return dockerfile
    if spec.docker_image is not None:
        raise UnsupportedTaskError(f"{spec.name}: container={backend} runs no images ({spec.docker_image}). {_REMEDY}")
    if context is not None:
        raise TaskError(f"{spec.name}: expected a Dockerfile in {context}, found none.")
    return None
