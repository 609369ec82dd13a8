"""The rest of a Dockerfile, starting at the first line that needs a local file, applied in a running sandbox."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ares_exp.cancellation import finish
from ares_exp.containers.images.dockerfile_reading import Base, Dockerfile, RunStep, Step, read_dockerfile
from ares_exp.containers.images.dockerfile_steps import RunInContainer, UploadToContainer, apply_step
from ares_exp.containers.images.image_context import copy_not_ignored
from ares_exp.containers.ownership import OwnedDirectory
from ares_exp.errors import ContainerStartError, UserError

PLATFORM_ARGS: Mapping[str, str] = {
    f"{whose}{what}": value
    for whose in ("TARGET", "BUILD")
    for what, value in {"PLATFORM": "linux/amd64", "OS": "linux", "ARCH": "amd64", "VARIANT": ""}.items()
}
"""Predefined build arguments, with the values of the service's builder."""

_REFUSAL = (
    "without the service's object store, the rest of the Dockerfile is executed in the running sandbox, which "
    "does not support {}"
)
_SHELLS_OWN = frozenset({"_", "HOME", "LOGNAME", "OLDPWD", "PWD", "SHLVL", "USER"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class FinishedImage:
    """The defaults of commands in a finished sandbox. `env` has only variables that the sandbox itself lacks."""

    env: Mapping[str, str]
    workdir: str
    user: str


def read_rest(path: Path, base: Base) -> Dockerfile:
    """Reads a Dockerfile whose first `base.built_lines` lines the service builds. See `read_dockerfile`."""
    return read_dockerfile(path, replace(base, args=PLATFORM_ARGS), refusal=_REFUSAL)


async def do_rest(
    context_dir: Path, built_lines: int, run: RunInContainer, upload: UploadToContainer, *, workdir: str, restored: bool
) -> FinishedImage:
    """Applies the rest of the Dockerfile in `context_dir` after its first `built_lines`; see `ImagePlan.apply`."""
    own = await _variables(run)
    base = Base(own, workdir, built_lines=built_lines)
    staging = asyncio.create_task(asyncio.to_thread(copy_not_ignored, context_dir))
    try:
        dockerfile = await asyncio.to_thread(read_rest, context_dir / "Dockerfile", base)
        context, _ = await asyncio.shield(staging)
        for step in () if restored else dockerfile.steps:
            await apply_step(_on_top(step, own), context, run, upload)
    except UserError as error:  # changed since the check, or by variables of the base image
        raise ContainerStartError(str(error)) from error
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        raise ContainerStartError(f"The build context {context_dir} could not be read: {error}.") from error
    finally:
        await finish(_clean_up(staging))
    return FinishedImage(_changed(dockerfile.env, own), dockerfile.workdir, dockerfile.user)


async def _variables(run: RunInContainer) -> dict[str, str]:
    """Returns the sandbox's variables, without variables that shells set themselves or for a user."""
    result = await run("cat /proc/self/environ")
    if result.exit_code != 0 or result.elided_bytes:
        raise ContainerStartError(f"The variables of the sandbox could not be read: {result.output[-500:]}")
    pairs = (entry.partition("=") for entry in result.output.split("\0"))
    return {name: value for name, _, value in pairs if _NAME.fullmatch(name) and name not in _SHELLS_OWN}


async def _clean_up(staging: asyncio.Task[tuple[Path, OwnedDirectory]]) -> None:
    _, directory = await staging
    await asyncio.to_thread(directory.remove)


def _on_top(step: Step, own: Mapping[str, str]) -> Step:
    return replace(step, env=_changed(step.env, own)) if isinstance(step, RunStep) else step


def _changed(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if own.get(name) != value}
