"""The end of a stage: functions that run collect hooks, and copy artifacts to the host and the verifier's container.

An artifact is a file or directory to keep. A collect hook is a command of the task that prepares artifacts. Secrets in
the copied files are masked. The file `manifest.json` contains the status of each artifact.
"""

from __future__ import annotations

import asyncio
import json
import logging
import posixpath
import shlex
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import pydantic

from ares_exp.cancellation import finish, in_thread
from ares_exp.containers.archive import remove, unpack_directory
from ares_exp.containers.container import ComposedContainer, Container, ServiceContainer
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import ContainerDiedError, ContainerError, TransferError
from ares_exp.records.secrets import EPISODE_KEY_PREFIX, MASK, mask_episode_keys
from ares_exp.tasks.task_toml import MAIN_SERVICE, Artifact, CollectHook
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL, as_root
from ares_exp.tasks.verification.step_setup import whole_seconds

_logger = logging.getLogger(__name__)

MAX_REDACTED_BYTES = 64 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


@asynccontextmanager
async def redacted(folder: Path, secrets: Sequence[str]) -> AsyncIterator[None]:
    """Masks `secrets` in `folder` after the `async with` block has copied files into it, even if the block fails."""
    try:
        yield
    except BaseException:
        await finish(asyncio.to_thread(redact, folder, secrets))
        raise
    await in_thread(lambda: redact(folder, secrets))


def redact(folder: Path, secrets: Sequence[str]) -> None:
    """Masks `secrets` and API keys in all files in `folder` and its subdirectories. Blocking.

    The API keys are the keys that ares_exp generates for the requests of each episode's agent. A file that contains a
    secret or a key, but is larger than `MAX_REDACTED_BYTES`, is deleted.
    """
    words = [secret.encode(errors="surrogateescape") for secret in secrets]
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file() or not _holds_any(path, [EPISODE_KEY_PREFIX.encode(), *words]):
            continue
        if path.stat().st_size > MAX_REDACTED_BYTES:
            path.unlink()
            continue
        data = mask_episode_keys(path.read_bytes())
        for word in words:
            data = data.replace(word, MASK.encode())
        path.write_bytes(data)


def _holds_any(path: Path, words: Sequence[bytes]) -> bool:
    overlap = max(map(len, words)) - 1
    seen = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            seen = seen[-overlap:] + chunk
            if any(word in seen for word in words):
                return True
    return False


MANIFEST = "manifest.json"

ArtifactKind = Literal["file", "directory"]
ArtifactStatus = Literal["ok", "failed", "empty", "skipped"]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The entry of one artifact in `manifest.json`.

    Attributes:
        source: Path in the container.
        destination: Path on the host, relative to the directory of the stage: `artifacts/…`.
        type: Kind of the artifact. If the artifact is missing, the kind is guessed from its path.
        status: `ok`; `failed` if it was not collected, for example because it is missing; `skipped` if another artifact
            already uses its path on the host; `empty` for an empty `/logs/artifacts`.
        service: Name of the service, if the task sets it; otherwise `None`, which means the agent's container.
        exclude: Patterns of the files that were left out of a directory.
    """

    source: str
    destination: str
    type: ArtifactKind
    status: ArtifactStatus
    service: str | None
    exclude: tuple[str, ...] | None

    @classmethod
    def of(cls, artifact: Artifact, place: str, kind: ArtifactKind, status: ArtifactStatus) -> ManifestEntry:
        """Creates the entry of an artifact. `place` is its path relative to `artifacts/`."""
        return cls(
            source=artifact.source,
            destination=f"artifacts/{place}" if place != "." else "artifacts",
            type=kind,
            status=status,
            service=artifact.service if "service" in artifact.model_fields_set else None,
            exclude=artifact.exclude if kind == "directory" else (),
        )


def write_manifest(folder: Path, entries: Sequence[ManifestEntry]) -> None:
    """Writes `manifest.json` for the artifacts in `folder`. Blocking."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(entry) for entry in entries], indent=2)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")


def read_manifest(folder: Path) -> list[ManifestEntry]:
    """Reads the entries of `manifest.json` in `folder`; empty if the file does not exist. Blocking."""
    if not (folder / MANIFEST).exists():
        return []
    return pydantic.TypeAdapter(list[ManifestEntry]).validate_json((folder / MANIFEST).read_bytes())


ARTIFACTS_DIR = "/logs/artifacts"
"""Directory in the container that is collected for every task, even if the task does not list it."""


def with_conventional(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Returns the artifacts of a task, preceded by `/logs/artifacts` unless they already contain it."""
    named = list(artifacts)
    return named if any(map(is_conventional, named)) else [Artifact(source=ARTIFACTS_DIR), *named]


def is_conventional(artifact: Artifact) -> bool:
    """Returns whether an artifact is `/logs/artifacts` in the agent's container."""
    return artifact.service == MAIN_SERVICE and artifact.source.rstrip("/") == ARTIFACTS_DIR


def place_of(artifact: Artifact) -> PurePosixPath:
    """Returns an artifact's path below `artifacts/` on the host: its `destination` or, by default, its `source`."""
    path = PurePosixPath(artifact.destination or artifact.source)
    return path.relative_to(path.anchor) if path.is_absolute() else path


class Places:
    """The paths on the host that are already used, so that no artifact overwrites another artifact or the manifest."""

    def __init__(self) -> None:
        self._taken: list[tuple[PurePosixPath, Artifact | None]] = [(PurePosixPath(MANIFEST), None)]

    def take(self, artifact: Artifact) -> Artifact | str | None:
        """Reserves the path of an artifact on the host, and returns `None` if the path is free.

        If another artifact has reserved this path, a path inside it or a directory above it, reserves nothing and
        returns that artifact. If the path conflicts with the manifest, returns `manifest.json`.
        """
        place, source = place_of(artifact), PurePosixPath(artifact.source)
        for taken, by in self._taken:
            is_again = by is not None and PurePosixPath(by.source) == source and covers(by, artifact)
            if (taken.is_relative_to(place) or place.is_relative_to(taken)) and not is_again:
                return by or MANIFEST
        self._taken.append((place, artifact))
        return None


def covers(first: Artifact, second: Artifact) -> bool:
    """Returns whether a copy of `first` already contains `second` at the right path, so that `second` can be skipped.

    For example, a copy of the directory `/out` contains `/out/log.txt`.
    """
    source, within = PurePosixPath(first.source), PurePosixPath(second.source)
    if first.service != second.service or not within.is_relative_to(source):
        return False
    if within == source:
        return place_of(first) == place_of(second) and first.exclude == second.exclude
    return not first.exclude and place_of(second) == place_of(first) / within.relative_to(source)


MAX_HOOK_SEC = 1800.0
"""Maximum time limit of a hook in seconds. Also the limit of a hook whose own limit is infinite or below 1 second."""
_SHOWN_OUTPUT_CHARS = 500


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
