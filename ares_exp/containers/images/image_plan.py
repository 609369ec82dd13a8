"""The plan of a sandbox's image: how the Daytona service provides the image of a task, without a local engine.

| the task has | the source of the sandbox |
|---|---|
| anything, with `container.snapshot` set | this snapshot of the service |
| `docker_image` | this image |
| a Dockerfile that needs no file from its context | its text, built by the service |
| a Dockerfile that needs files | its text, with the files in the service's object store |
| the same, without an object store | the text before the first line that needs a file; `apply` does the rest |

The service keeps built images for a while, and uses them again for the same Dockerfile and files.

The service's SDK uploads the sources of `COPY` lines. It ignores `ADD`, variables, bind mounts and `.dockerignore`, and
loses links and empty directories. So this module finds the needed files by Docker's rules, and copies them to a
directory for the SDK. If necessary, it adds a stage to the Dockerfile that makes the SDK upload the whole directory.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ares_exp.cancellation import in_thread
from ares_exp.containers.container import ContainerSpec, Mount
from ares_exp.containers.images.dockerfile_instructions import (
    KNOWN,
    Instruction,
    find_dockerfile,
    find_syntax,
    ignored_patterns,
    instructions,
    json_words,
    names_not_ignored,
    read_text,
    split_flags,
    split_words,
    without_heredocs,
)
from ares_exp.containers.images.dockerfile_steps import (
    Base,
    Dockerfile,
    RunInContainer,
    RunStep,
    UploadToContainer,
    apply_step,
    check_sources,
    match_source,
    read_dockerfile,
    stage_context,
)
from ares_exp.containers.ownership import working_directory
from ares_exp.errors import ContainerStartError, TaskError, UnsupportedTaskError, UserError

_REMEDY = "Use container=docker for this task, or leave it out."
_PLATFORM_ARGS: Mapping[str, str] = {
    f"{whose}{what}": value
    for whose in ("TARGET", "BUILD")
    for what, value in {"PLATFORM": "linux/amd64", "OS": "linux", "ARCH": "amd64", "VARIANT": ""}.items()
}
"""Predefined build arguments (`TARGETARCH`, …), with the values that the service's builder uses."""

_REFUSAL = (
    "without the service's object store, the rest of the Dockerfile is executed in the running sandbox, which "
    "does not support {}"
)
_SHELLS_OWN = frozenset({"_", "HOME", "LOGNAME", "OLDPWD", "PWD", "SHLVL", "USER"})


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files that a Dockerfile needs from its build context, and the ways in which they can reach the sandbox.

    `first_line` is the first line that needs a file. `not_stored` is the reason why the service's object store cannot
    store the files; `None` if it can. `not_after` is the reason why the Dockerfile cannot be applied in a running
    sandbox from this line on; `None` if it can.
    """

    first_line: int
    files: Mapping[str, Path]
    not_stored: str | None
    not_after: str | None


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The image that a sandbox starts from, and the part of the Dockerfile to apply after its start.

    Attributes:
        snapshot, image, dockerfile: Source of the sandbox: name of a snapshot of the service, name of an image, or text
            of a Dockerfile to build. A snapshot takes precedence.
        context_dir: The task's directory, if it has a Dockerfile.
        env: Environment variables that the Dockerfile sets. The variables of its base image are unknown.
        workdir: Working directory of commands; `None` if the base image or the snapshot determines it.
        user: User of commands; root if the Dockerfile sets no user.
        local: Files that the Dockerfile needs from its context. `None` if it needs none, or if `stored` or
            `after_start` has already decided how to transfer them.
        built_lines: Number of Dockerfile lines that the service builds; `apply` applies the rest. `None`: all lines.
        warnings: Warnings for the user.
        layers: Local directories (mounts) that become the last layers of the image.
    """

    snapshot: str | None = None
    image: str | None = None
    dockerfile: str | None = None
    context_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str = "root"
    local: LocalFiles | None = None
    built_lines: int | None = None
    warnings: tuple[str, ...] = ()
    layers: tuple[Mount, ...] = ()

    @property
    def builds_after_start(self) -> bool:
        """Whether `apply` has lines of the Dockerfile to apply. It then needs the same network as an image build."""
        return self.built_lines is not None

    def stored(self, directory: Path, mounts: Sequence[Mount]) -> ImagePlan:
        """Returns the plan in which the service builds the whole Dockerfile with files in its object store. Blocking.

        The Dockerfile's files are copied to the empty `directory`, which must exist until the sandbox is created. If
        the store cannot store them, returns the plan of `after_start`. If the Dockerfile needs no files, `mounts`
        become the last layers of the image, except for directories that the store would change. Otherwise, `mounts` are
        ignored, because `COPY .` would copy them.
        """
        if self.dockerfile is None or (self.local is not None and self.local.not_stored is not None):
            return self.after_start()
        if self.local is None:
            return replace(self, layers=tuple(mount for mount in mounts if _is_stored_unchanged(mount)))
        try:
            copy_files(self.local.files, directory)
        except OSError as error:
            raise ContainerStartError(f"The build context {self.context_dir} could not be read: {error}.") from error
        found = list(instructions(self.dockerfile))
        return replace(self, dockerfile=as_read_by_sdk(self.dockerfile, found), local=None)

    def after_start(self) -> ImagePlan:
        """Returns the plan in which the service builds the lines before the first needed file; `apply` does the rest.

        Raises `UnsupportedTaskError` if the rest cannot be applied in a running sandbox.
        """
        if self.local is None:
            return self
        if self.local.not_after is not None:
            raise UnsupportedTaskError(f"{self.local.not_after}. {_REMEDY}")
        built = self.local.first_line - 1
        text = "".join((self.dockerfile or "").splitlines(keepends=True)[:built])
        return replace(self, dockerfile=text, local=None, built_lines=built)

    def with_kept_files(self, snapshot: str) -> ImagePlan:
        """Returns the plan for starting from the service's `snapshot`, which has all files of the finished image."""
        is_known = self.local is not None and self.local.not_after is not None
        return replace(replace(self, local=None) if is_known else self.after_start(), snapshot=snapshot)

    async def apply(
        self, run: RunInContainer, upload: UploadToContainer, *, workdir: str, restored: bool = False
    ) -> FinishedImage:
        """Applies the rest of the Dockerfile in the running sandbox. Returns the settings for later commands.

        `run` must run commands in a non-login shell. Its `env` is added to the sandbox's variables. `workdir` is the
        directory in which the sandbox's commands start by default. `restored` means that the sandbox already has all
        files, so that no step is applied.

        Raises:
            ContainerStartError: A command failed. The message contains the Dockerfile's line and the end of the output.
            ContainerError: The sandbox failed.
        """
        if self.built_lines is None or self.context_dir is None:
            return FinishedImage({}, self.workdir or workdir, self.user)
        own = await _variables(run)
        base = Base(own, workdir, built_lines=self.built_lines)
        folder = self.context_dir
        try:
            dockerfile = await asyncio.to_thread(_read_rest, folder / "Dockerfile", base)
            async with working_directory("build") as stage:
                context = await in_thread(lambda: stage_context(folder, stage))
                for step in () if restored else dockerfile.steps:
                    if isinstance(step, RunStep):
                        step = replace(step, env=_changed(step.env, own))
                    await apply_step(step, context, run, upload)
        except UserError as error:  # changed since the check, or by variables of the base image
            raise ContainerStartError(str(error)) from error
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ContainerStartError(f"The build context {folder} could not be read: {error}.") from error
        return FinishedImage(_changed(dockerfile.env, own), dockerfile.workdir, dockerfile.user)


def plan_image(spec: ContainerSpec, snapshot: str | None = None) -> ImagePlan:
    """Creates the image plan for `spec`. Blocks to read the task's Dockerfile and to list its context.

    `snapshot` is the name of a snapshot of the service that replaces the task's image. Raises `UnsupportedTaskError` if
    the task needs several services, or a feature that neither the service's builder nor a running sandbox supports, and
    `TaskError` if its Dockerfile is missing or malformed.
    """
    if spec.compose_file is not None:
        raise UnsupportedTaskError(
            f"Task {spec.name} needs several services ({spec.compose_file}), but container=daytona runs one sandbox "
            "per task. Use container=docker for this task, or leave it out."
        )
    if snapshot is not None:
        dockerfile = None if spec.context_dir is None else spec.context_dir / "Dockerfile"
        ignored = spec.docker_image or (dockerfile if dockerfile is not None and dockerfile.is_file() else None)
        warning = f"{spec.name}: {ignored} is not used, because container.snapshot={snapshot} is set"
        return ImagePlan(snapshot=snapshot, warnings=(warning,) if ignored else ())
    if spec.docker_image is not None:
        return _plan_for_image(spec.name, spec.docker_image)
    context = find_dockerfile(spec.name, spec.context_dir).parent
    try:
        return _plan_for_dockerfile(context)
    except OSError as error:
        raise TaskError(f"The build context {context} could not be read: {error}.") from error


def _is_stored_unchanged(mount: Mount) -> bool:
    try:
        for child in mount.source.iterdir():
            _collect(child.name, child, None, {})
    except UnsupportedTaskError:
        return False
    except OSError as error:
        raise ContainerStartError(f"{mount.source} could not be read: {error}.") from error
    return True


def _plan_for_image(name: str, image: str) -> ImagePlan:
    if not image or re.search(r"[\s$]", image):
        raise TaskError(f"Task {name}: expected the name of an image as docker_image, got {image!r}.")
    tag = image.rpartition("/")[2].partition(":")[2]
    warning = (
        f"{name}: {image} has no fixed version, and Daytona continues to use the first image that it received "
        "under this name. Add a tag or a digest"
    )
    return ImagePlan(image=image, warnings=(warning,) if "@" not in image and tag in ("", "latest") else ())


def _plan_for_dockerfile(context: Path) -> ImagePlan:
    path = context / "Dockerfile"
    text = read_text(path)
    if (syntax := find_syntax(text)).is_foreign:
        raise UnsupportedTaskError(
            f"{path}, line {syntax.line}: the Dockerfile syntax {syntax.frontend} is not supported. {_REMEDY}"
        )
    found = list(instructions(text))
    for name, _, line, _ in found:
        if name not in KNOWN:
            raise TaskError(f"{path}, line {line}: expected a Dockerfile instruction, got {name}.")
    whole = _read_rest(path, Base(workdir="", built_lines=sys.maxsize))
    plan = ImagePlan(
        dockerfile=text,
        context_dir=context,
        env=whole.env,
        workdir=whole.workdir if whole.workdir.startswith("/") else None,
        user=whole.user or "root",
    )
    sources = [source for instruction in found for source in local_sources(instruction)]
    if not sources:
        return plan
    files: Mapping[str, Path] = {}
    not_stored, not_after = None, None
    first = sources[0].line
    try:
        files = find_files(sources, context)
        check_as_read_by_sdk(found)
    except UnsupportedTaskError as error:
        not_stored = f"its files cannot be stored in the service's object store: {error}"
    try:
        check_sources(_read_rest(path, Base(workdir="", built_lines=first - 1)), context)
    except UnsupportedTaskError as error:
        not_after = str(error)
    if not_stored is not None and not_after is not None:
        raise UnsupportedTaskError(f"{path}: {not_stored}; and {not_after}. {_REMEDY}")
    warnings = (
        (f"{not_after}. To build this Dockerfile, Daytona needs an object store",) if not_after is not None else ()
    )
    return replace(plan, local=LocalFiles(first, files, not_stored, not_after), warnings=warnings)


@dataclass(frozen=True, slots=True)
class FinishedImage:
    """The settings of commands in a sandbox after its Dockerfile: directory, user and changed environment variables."""

    env: Mapping[str, str]
    workdir: str
    user: str


def _read_rest(path: Path, base: Base) -> Dockerfile:
    return read_dockerfile(path, replace(base, args=_PLATFORM_ARGS), refusal=_REFUSAL)


async def _variables(run: RunInContainer) -> dict[str, str]:
    """Returns the sandbox's environment variables, except for variables that a shell or a login sets."""
    result = await run("cat /proc/self/environ")
    if result.exit_code != 0 or result.elided_bytes:
        raise ContainerStartError(f"The environment variables of the sandbox could not be read: {result.output[-500:]}")
    pairs = (entry.partition("=") for entry in result.output.split("\0"))
    return {
        name: value for name, _, value in pairs if name.isascii() and name.isidentifier() and name not in _SHELLS_OWN
    }


def _changed(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if own.get(name) != value}


_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A file, directory or pattern in the build context that the instruction on `line` needs."""

    line: int
    pattern: str


def local_sources(instruction: Instruction) -> list[LocalSource]:
    """Returns the sources that an instruction needs from the context; `.` (all files) for a source with a variable."""
    flags, rest = split_flags(instruction.value)
    if instruction.name == "RUN":
        patterns = [source for name, setting in flags if name == "mount" for source in _mounted(setting)]
    elif instruction.name in ("COPY", "ADD") and not any(name == "from" for name, _ in flags):
        words = _words(instruction, without_heredocs(rest))
        patterns = [word for word in words[:-1] if not (instruction.name == "ADD" and _REMOTE.match(word))]
    else:
        return []
    return [LocalSource(instruction.line, "." if "$" in pattern else pattern) for pattern in patterns]


def _mounted(setting: str) -> Iterator[str]:
    options = {part.partition("=")[0]: part.partition("=")[2] for part in setting.split(",")}
    if options.get("type", "bind") == "bind" and "from" not in options:
        yield options.get("source") or options.get("src") or "."


def _words(instruction: Instruction, text: str) -> tuple[str, ...]:
    from dockerfile_parse.util import WordSplitter

    if words := json_words(text):
        return words
    try:
        return tuple(w if "$" in w else str(WordSplitter(w, args={}, envs={}).dequote()) for w in split_words(text))
    except ValueError as error:
        raise TaskError(f"Dockerfile, line {instruction.line}: {instruction.name}: {error}.") from error


def find_files(sources: list[LocalSource], context: Path) -> Mapping[str, Path]:
    """Returns the files that `sources` match, by their names in the context. Applies `.dockerignore`. Blocking.

    Raises `TaskError` if a source is missing. Raises `UnsupportedTaskError` if a source leads out of the context, or if
    Daytona's SDK would change or lose it: a link in a directory, an empty directory, a device, or a name that is not
    UTF-8.
    """
    root = context.resolve()
    kept = {root / name for name in names_not_ignored(root)} if ignored_patterns(root) else None
    found: dict[str, Path] = {}
    for source in sources:
        for path in match_source(source.pattern, context, source.line):
            _collect(path.relative_to(root).as_posix(), path.resolve(), kept, found)
    return found


def check_as_read_by_sdk(found: Sequence[Instruction]) -> None:
    """Raises `UnsupportedTaskError` if the SDK would find other sources of a COPY than Docker does."""
    for instruction in found:
        sources = local_sources(instruction) if instruction.name == "COPY" else []
        if sources and ("$" in instruction.value or any(source.pattern.startswith("/") for source in sources)):
            raise UnsupportedTaskError(
                f"line {instruction.line} has a variable or a leading slash in the source of a COPY, which the SDK "
                "interprets differently from Docker"
            )


def as_read_by_sdk(text: str, found: Sequence[Instruction]) -> str:
    """Returns the Dockerfile's text. If needed, adds an unused stage that makes the SDK upload the whole directory.

    This is needed because the SDK finds only the sources of a plain `COPY`, but another instruction, or a `COPY` with a
    here-document, may also need files.
    """
    for instruction in found:
        if local_sources(instruction) and (instruction.name != "COPY" or "<<" in instruction.value):
            lines = text.splitlines(keepends=True)
            first = next(one.line for one in found if one.name == "FROM") - 1
            return "".join((*lines[:first], "FROM scratch AS ares-exp-context\nCOPY . /\n", *lines[first:]))
    return text


def _collect(name: str, path: Path, kept: set[Path] | None, found: dict[str, Path]) -> None:
    children = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
    for child in children:
        _collect(child.name if name == "." else f"{name}/{child.name}", child, kept, found)
    if children or (kept is not None and path not in kept):
        return
    if path.is_symlink() or not path.is_file():
        raise _lost(f"the {'link' if path.is_symlink() else 'empty directory' if path.is_dir() else 'device'} {name}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _lost(f"the name {name!r}, which is not UTF-8,") from error
    found[name] = path


def _lost(what: str) -> UnsupportedTaskError:
    return UnsupportedTaskError(f"{what} cannot be sent to the Daytona service")


def copy_files(files: Mapping[str, Path], directory: Path) -> None:
    """Copies files into `directory`. The keys of `files` are relative paths in this directory. Blocking.

    The order is fixed, because the SDK's hash of an upload depends on the order in which the directory lists the files.
    """
    for name in sorted(files):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(files[name], target)
