"""The base image of captured changes, found by its id."""

from __future__ import annotations

from typing import Any

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker.container_lifetime import why_it_stays
from ares_exp.containers.docker.engine import Engine, in_thread
from ares_exp.containers.docker.image import ensure_image
from ares_exp.errors import ContainerStartError, SnapshotMismatchError

_REMEDY = (
    "Bring the image back (`docker save` where it still is, `docker load` here), or start the task anew. A run that "
    "takes snapshots needs container.keep_image=true, and its images left on the engine."
)


async def find_base(engine: Engine, spec: ContainerSpec, *, keep: bool) -> dict[str, Any]:
    """Inspects the image that `spec.changes` are relative to.

    A missing image is pulled or built like any image of a task, and has to have the same id.

    Args:
        engine: The engine.
        spec: With `changes`.
        keep: Whether an image built for this is kept.

    Raises:
        SnapshotMismatchError: It cannot be found or made; with both ids if another one was.
    """
    assert spec.changes is not None
    base = spec.changes.delta.base
    if not base.startswith("sha256:"):
        raise SnapshotMismatchError(
            f"Expected the changed files of {spec.name} to be relative to a Docker image (sha256:…), got {base}. "
            "Restore them on the backend that they were captured on."
        )
    found = await in_thread(lambda: _inspect(engine, base), abandon=True)
    if found is not None:
        return found
    what = f"The changed files of {spec.name} are relative to the image {base}, which the engine does not have"
    try:
        image = await ensure_image(
            engine, name=spec.name, docker_image=spec.docker_image, context_dir=spec.context_dir, keep=keep
        )
    except ContainerStartError as error:
        raise SnapshotMismatchError(f"{what}. Its task's image cannot replace it: {error} {_REMEDY}") from error
    found = await in_thread(lambda: _inspect(engine, image), abandon=True)
    if found is not None and found["Id"] == base:
        return found
    if spec.docker_image is None and not keep:
        await in_thread(lambda: why_it_stays(lambda: engine.api.remove_image(image)), lane="removals")
    other = found["Id"] if found is not None else "gone"
    raise SnapshotMismatchError(f"{what}. Its task's image {image} is now {other}. {_REMEDY}")


def name_of(image: dict[str, Any], spec: ContainerSpec) -> str:
    """Returns a readable name of an image: the task's if it still refers to it, else another, else the id."""
    names: list[str] = image.get("RepoTags") or [image["Id"]]
    return spec.docker_image if spec.docker_image in names else names[0]


def _inspect(engine: Engine, image: str) -> dict[str, Any] | None:
    from docker.errors import ImageNotFound

    try:
        found: dict[str, Any] = engine.api.inspect_image(image)
    except ImageNotFound:
        return None
    return found
