"""The end of a stage: functions that run collect hooks, and copy artifacts to the host and the verifier's container.

An artifact is a file or directory to keep. A collect hook is a command of the task that prepares artifacts.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import shlex
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path, PurePosixPath

from ares_exp.cancellation import finish, in_thread
from ares_exp.containers.archive import remove, unpack_directory
from ares_exp.containers.container import ComposedContainer, Container, ServiceContainer
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import ContainerDiedError, ContainerError, TransferError
from ares_exp.tasks.task_toml import MAIN_SERVICE, Artifact, CollectHook
from ares_exp.tasks.verification.manifest import (
    MANIFEST,
    ArtifactKind,
    ArtifactStatus,
    ManifestEntry,
    Places,
    covers,
    is_conventional,
    place_of,
    read_manifest,
    write_manifest,
)
from ares_exp.tasks.verification.redaction import redacted
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL, as_root
from ares_exp.tasks.verification.step_setup import whole_seconds

MAX_HOOK_SEC = 1800.0
"""Maximum time limit of a hook in seconds. Also the limit of a hook whose own limit is infinite or below 1 second."""
_SHOWN_OUTPUT_CHARS = 500

_logger = logging.getLogger(__name__)


def hook_limit_sec(hook: CollectHook) -> float:
    """Returns the effective time limit of a hook in whole seconds, at most `MAX_HOOK_SEC`."""
    return min(whole_seconds(hook.timeout_sec) or MAX_HOOK_SEC, MAX_HOOK_SEC)


async def run_hooks(hooks: Iterable[CollectHook], container: Container) -> None:
    """Runs collect hooks one after the other. A failure is only logged, unless the agent's container has died."""
    for hook in hooks:
        try:
            service = service_of(container, hook.service)
            result = await service.exec(hook.command, user=hook.user, timeout_sec=hook_limit_sec(hook))
        except (ContainerError, ValueError) as error:
            if isinstance(error, ContainerDiedError) and hook.service == MAIN_SERVICE:
                raise
            _logger.warning("The collect hook `%s` in %s failed: %s", hook.command, hook.service, error)
            continue
        if result.exit_code != 0:
            ending = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
            output = result.output.strip()[-_SHOWN_OUTPUT_CHARS:]
            _logger.warning("The collect hook `%s` in %s %s: %s", hook.command, hook.service, ending, output)


def service_of(container: Container, name: str) -> Container | ServiceContainer:
    """Returns a service of a container with a compose file, by its name. The service `main` is the container itself."""
    if name == MAIN_SERVICE:
        return container
    if not isinstance(container, ComposedContainer):
        raise ContainerError(f"The container has no service {name!r}, because it has no compose file.")
    return container.service(name)


COLLECT_TIMEOUT_SEC = 600.0
"""Time limit in seconds for copying all artifacts of a stage. The hooks have separate time limits."""
_PACK_TIMEOUT_SEC = 600.0


async def collect(
    container: Container,
    target: Path | None,
    *,
    hooks: Sequence[CollectHook],
    artifacts: Sequence[Artifact],
    secrets: Sequence[str],
    stops_main: bool,
) -> None:
    """Runs the collect hooks and copies the artifacts, first of the agent's container, then of the other services.

    Args:
        container: The agent's container. If the task has several services, this is the service `main`.
        target: Directory on the host for the artifacts and their manifest; `None` only runs the hooks.
        hooks: Hooks in the order in which they run.
        artifacts: Artifacts to copy. If several have the same path on the host, only the first is copied.
        secrets: Values to mask in the saved files.
        stops_main: Whether the agent's container is stopped before the other services are processed, so that the agent
            cannot influence their hooks and artifacts.

    Raises:
        ContainerDiedError: The agent's container has died.
    """
    places, entries = Places(), list[ManifestEntry]()
    services = {hook.service for hook in hooks} | {item.service for item in artifacts}
    has_others = bool(services - {MAIN_SERVICE})
    async with redacted(target, secrets) if target is not None else nullcontext():
        if target is not None:
            await in_thread(lambda: _clear(target, artifacts))
        for of_main in (True, False) if has_others else (True,):
            if stops_main and not of_main:
                await _stop_main(container)
            await run_hooks([hook for hook in hooks if (hook.service == MAIN_SERVICE) == of_main], container)
            if target is not None:
                for artifact in (item for item in artifacts if (item.service == MAIN_SERVICE) == of_main):
                    kind, status = await _collect(container, artifact, target, places)
                    entries.append(ManifestEntry.of(artifact, str(place_of(artifact)), kind, status))
    if target is not None:
        await in_thread(lambda: write_manifest(target, entries))


async def _stop_main(container: Container) -> None:
    try:
        if isinstance(container, ComposedContainer):
            await container.service(MAIN_SERVICE).stop()
    except ContainerError as error:
        _logger.warning(
            "The agent's container could not be stopped before the artifacts of services were collected: %s", error
        )


def _clear(target: Path, artifacts: Iterable[Artifact]) -> None:
    """Removes an earlier episode's files from the artifacts' paths, so that the verifier never gets them."""
    (target / MANIFEST).unlink(missing_ok=True)
    for artifact in artifacts:
        place = target.joinpath(place_of(artifact))
        if Places().take(artifact) is None and place.parent.resolve().is_relative_to(target.resolve()):
            remove(place)


async def _collect(
    container: Container, artifact: Artifact, folder: Path, places: Places
) -> tuple[ArtifactKind, ArtifactStatus]:
    """Copies an artifact to its path in `folder` on the host, unless this path is already used."""
    source, kind = artifact.source, _guess(artifact)
    if (first := places.take(artifact)) is not None:
        if isinstance(first, str) or not covers(first, artifact):
            owner = first if isinstance(first, str) else first.source
            _logger.warning(
                "The artifact %s is not collected, because %s already uses its path on the host.", source, owner
            )
        return kind, "skipped"
    try:
        service = service_of(container, artifact.service)
        kind, is_empty, exists = await _look(service, artifact)
        if not exists:
            _logger.info("The artifact %s of %s was not collected: it does not exist.", source, artifact.service)
            return kind, "failed"
        place = folder.joinpath(place_of(artifact))
        await in_thread(lambda: _make_way(place, folder))
        if is_empty and is_conventional(artifact):
            await in_thread(lambda: place.mkdir(parents=True, exist_ok=True))
            return kind, "empty"
        if kind == "directory" and artifact.exclude:
            await _download_without(service, artifact, place)
        else:
            await service.download(source, place)
    except (ContainerError, OSError, ValueError) as error:
        if isinstance(error, ContainerDiedError) and artifact.service == MAIN_SERVICE:
            raise
        _logger.warning("The artifact %s of %s was not collected: %s", source, artifact.service, error)
        return kind, "failed"
    return "directory" if place.is_dir() else "file", "ok"


def _guess(artifact: Artifact) -> ArtifactKind:
    return "file" if PurePosixPath(artifact.source).suffix else "directory"


async def _look(service: Container | ServiceContainer, artifact: Artifact) -> tuple[ArtifactKind, bool, bool]:
    """Returns the kind of an artifact, whether it is an empty directory, and whether it exists.

    If this check fails in a service other than `main`, guesses the kind from the path, and assumes that the artifact
    exists and is not empty.
    """
    path = shlex.quote(artifact.source)
    try:
        command = f"test -e {path} || exit 3; test -d {path} || exit 4; ls -A {path} | head -c 100"
        result = await service.exec(command, user="root", timeout_sec=60, shell=PLAIN_SHELL)
    except ContainerError:
        if artifact.service == MAIN_SERVICE:
            raise
        return _guess(artifact), False, True
    if result.exit_code == 0:
        return "directory", not result.output.strip(), True
    return "file", False, result.exit_code != 3


def _make_way(place: Path, folder: Path) -> None:
    """Creates the parent directory of `place`. Raises `TransferError` if links lead from `place` out of `folder`.

    `place` is an artifact's path on the host, and `folder` is the directory of all artifacts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise TransferError(f"Expected {place} to be inside {folder}, but a link points outside of it.")
    if place != folder:
        place.parent.mkdir(parents=True, exist_ok=True)


async def _download_without(service: Container | ServiceContainer, artifact: Artifact, target: Path) -> None:
    """Downloads a directory without files that match its `exclude` patterns (in the syntax of `tar --exclude`)."""
    patterns = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude)
    pack = f'tar -cf "$f" {patterns} -C {shlex.quote(artifact.source)} . || [ $? -eq 1 ]'  # 1: a file changed meanwhile
    packed = await service.exec(
        f'f=$(mktemp) && {{ {pack}; }} && printf "\\n%s" "$f"',
        user="root",
        timeout_sec=_PACK_TIMEOUT_SEC,
        shell=PLAIN_SHELL,
    )
    if packed.exit_code != 0:
        raise TransferError(f"Cannot pack {artifact.source}: {packed.output.strip()[-500:]}")
    archive = packed.output.rpartition("\n")[2]
    try:
        async with working_directory("transfer") as folder:
            await service.download(archive, folder / "packed")
            with (folder / "packed").open("rb") as stream:
                await in_thread(lambda: unpack_directory(stream, target))
    finally:
        removal = f"rm -f {shlex.quote(archive)}"
        await finish(service.exec(removal, user="root", timeout_sec=60, shell=PLAIN_SHELL))


async def deliver_artifacts(container: Container, folder: Path) -> None:
    """Uploads the artifacts in `folder` to their original paths in the verifier's separate container.

    `Container.download` has already removed setuid bits, special files, and links that point outside of an artifact.
    """
    for entry in await asyncio.to_thread(read_manifest, folder):  # empty if the collection took too long
        if entry.status in ("ok", "empty"):
            await _deliver(container, entry, folder / entry.destination.removeprefix("artifacts").lstrip("/"))


async def _deliver(container: Container, entry: ManifestEntry, path: Path) -> None:
    """Uploads one artifact, from `path` on the host, to its original path in the verifier's container.

    For a directory, the directory in the container is emptied and made writable. For a file, its parent directory is
    made writable. A file that has the path of a directory, or the reverse, is removed first.
    """
    source, parent = shlex.quote(entry.source), shlex.quote(posixpath.dirname(entry.source) or ".")
    if entry.type == "directory":
        made = f"mkdir -p -- {source} && chmod 777 {source} && find {source} -mindepth 1 -delete"
        command = f"[ -d {source} ] || rm -f -- {source}; {made}"
    else:
        command = f"mkdir -p -- {parent} && chmod 777 {parent} && if [ -d {source} ]; then rm -rf -- {source}; fi"
    await as_root(container, command, purpose=f"make room for {entry.source}", cwd=None)
    await container.upload(path, entry.source)
