"""The steps of a Dockerfile, applied in a running container."""

from __future__ import annotations

import glob
import posixpath
import shlex
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from ares_exp.containers.container import ExecResult
from ares_exp.containers.images.dockerfile_instructions import ignored_patterns
from ares_exp.containers.images.dockerfile_reading import CopyStep, Dockerfile, MakeDirectoryStep, RunStep, Step
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError

_LAST_LINES = 20


RunInContainer = Callable[..., Awaitable[ExecResult]]
"""Function that runs one command with the keywords `env`, `cwd` and `user` of `Container.exec`.

The command sees only the given variables. By default, it runs as root, in `/`, with only the container's PATH.
"""

UploadToContainer = Callable[[Path, str], Awaitable[None]]
"""Function that copies like `Container.upload`."""


def check_sources(dockerfile: Dockerfile, context: Path) -> None:
    """Raises `TaskError` if a source of a COPY is missing, or leads out of the context."""
    for step in dockerfile.steps:
        if isinstance(step, CopyStep):
            find_sources(step, context)


def find_sources(step: CopyStep, context: Path) -> list[Path]:
    """Finds the files and directories of the context that a COPY names, in order, with links resolved.

    Raises `TaskError` if a source is missing, or leads out of the context.
    """
    found = [path.resolve() for source in step.sources for path in match_source(source, context, step.line)]
    if len(found) > 1 and not step.target.endswith("/"):
        raise TaskError(
            f"{context}/Dockerfile, line {step.line}: several sources need a target that ends with '/', "
            f"got {step.target!r}."
        )
    return found


def match_source(source: str, context: Path, line: int) -> list[Path]:
    """Finds the paths below `context.resolve()` that match one source of a COPY on a line.

    Raises `TaskError` if no path matches, or a path leads out of the context, directly or through a link.
    """
    root = context.resolve()
    pattern = posixpath.normpath(source.lstrip("/"))
    if pattern.split("/")[0] == "..":
        raise UnsupportedTaskError(
            f"{context}/Dockerfile, line {line}: {source!r} leads out of the build context {context}."
        )
    paths = sorted(root.glob(pattern)) if glob.has_magic(pattern) else [root / pattern]
    found = [path for path in paths if path.exists()]
    if not found:
        raise TaskError(f"{context}/Dockerfile, line {line}: nothing in {context} matches {source!r}.")
    if any(not path.resolve().is_relative_to(root) for path in found):
        raise UnsupportedTaskError(
            f"{context}/Dockerfile, line {line}: {source!r} leads out of the build context {context}."
        )
    return found


def stage_context(context: Path, directory: Path) -> Path:
    """Returns the context without ignored files: a copy in `directory`, or the context itself."""
    names = names_not_ignored(context)
    if names is None:
        return context
    for name in sorted(names):
        source, target = context / name, directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and not source.is_symlink():
            target.mkdir(exist_ok=True)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
    return directory


def names_not_ignored(context: Path) -> set[str] | None:
    """Returns the relative paths that a context's `.dockerignore` keeps; `None` if it is missing. Blocking."""
    patterns = ignored_patterns(context)
    if patterns is None:
        return None
    from docker.utils.build import exclude_paths

    return set(exclude_paths(str(context), patterns))


async def apply_step(step: Step, context: Path, run: RunInContainer, upload: UploadToContainer) -> None:
    """Applies one step. Raises `ContainerStartError` with the end of its output if a command failed."""
    if isinstance(step, RunStep):
        command = f"exec {shlex.join(step.argv)}"
        result = await run(command, env=step.env, cwd=step.workdir, user=step.user)
        _expect_success(result, step, f"RUN {step.argv[-1]}")
    elif isinstance(step, MakeDirectoryStep):
        _expect_success(await run(f"mkdir -p -- {shlex.quote(step.path)}"), step, f"creating {step.path}")
    else:
        await _copy(step, context, run, upload)


async def _copy(step: CopyStep, context: Path, run: RunInContainer, upload: UploadToContainer) -> None:
    copied: list[str] = []
    is_directory = step.target.endswith("/")
    for source in find_sources(step, context):
        if source.is_dir():
            await upload(source, step.target)
            copied += [posixpath.join(step.target, child.name) for child in source.iterdir()]
            continue
        if not is_directory:
            is_directory = (await run(f"test -d {shlex.quote(step.target)}")).exit_code == 0
        target = posixpath.join(step.target, source.name) if is_directory else step.target
        await upload(source, target)
        copied.append(target)
    for program, setting in (("chmod", step.chmod), ("chown", step.chown)):
        if setting and copied:
            result = await run(f"{program} -R {shlex.quote(setting)} -- {shlex.join(copied)}")
            _expect_success(result, step, f"COPY --{program}={setting}")


def _expect_success(result: ExecResult, step: Step, what: str) -> None:
    if result.exit_code == 0:
        return
    output = "\n".join(result.output.splitlines()[-_LAST_LINES:])
    raise ContainerStartError(
        f"Dockerfile, line {step.line}: {what}: exit code {result.exit_code}. Last lines:\n{output}"
    )
