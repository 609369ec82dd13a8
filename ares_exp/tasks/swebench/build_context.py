"""Build contexts for images of rows, for those who do not use the published ones: a Dockerfile, and the repository."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ares_exp.containers.user_cache import hold
from ares_exp.errors import ConfigError, GitError, PreflightError
from ares_exp.tasks.swebench.repository import REPOSITORY
from ares_exp.tasks.swebench.rows import SweBenchRow
from ares_exp.tasks.task_sources.cache import TaskCache, default_cache_dir
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_names import check_git_url

GITHUB = "https://github.com/{repo}.git"
_BASE_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}")
_FORMAT = 1
_INSTALLER = re.compile(r"\b(?:pip3?|uv|poetry|pdm|conda|mamba|make)\b")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options for building images.

    Attributes:
        base_image: What they start with.
        repository: Where repositories are: an address, with `{repo}` for `owner/name`; or a folder, the repository
            itself or with it at `owner/name`.
        setup: Shell commands before the repository is there: packages of the system.
        pip_packages: What `python -m pip install` is given, in the repository.
        install: Shell commands in the repository, last.
        cache_dir: The folder of contexts; `None`: `~/.cache/ares_exp/swebench`.
    """

    base_image: str = "python:3.12-slim"
    repository: str = GITHUB
    setup: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        """Refuses what is no name of an image."""
        if not _BASE_IMAGE.fullmatch(self.base_image):
            raise ConfigError(f"Expected `env.base_image` to be the name of an image, got {self.base_image!r:.200}.")

    @property
    def folder(self) -> Path:
        """The folder of contexts."""
        return self.cache_dir or default_cache_dir().with_name("swebench")

    def source(self, row: SweBenchRow) -> str:
        """Returns the address of the row's repository, or the path of its folder.

        Raises:
            ConfigError: `repository` is neither.
        """
        place = self.repository.replace("{repo}", row.repo)
        folder = Path(place).expanduser()
        if folder.is_dir():
            inside = folder / row.repo
            return str((inside if inside.is_dir() else folder).resolve())
        try:
            return check_git_url(place)
        except ValueError as error:
            raise ConfigError(f"`env.repository`: {error}; or a folder that is there.") from None

    @property
    def dockerfile(self) -> str:
        """The same for every row, so that the engine's cache has what comes before the repository."""
        pip = [json.dumps(["python", "-m", "pip", "install", "--no-cache-dir", *self.pip_packages])]
        lines = [
            f"FROM {self.base_image}",
            *(_run(command) for command in self.setup),
            f"COPY repository {REPOSITORY}/.git",
            f"WORKDIR {REPOSITORY}",
            _run("git reset --hard --quiet"),
            *(f"RUN {words}" for words in pip if self.pip_packages),
            *(_run(command) for command in self.install),
        ]
        return "\n".join(lines) + "\n"

    def may_install(self, package: str) -> bool:
        """Returns whether the options name a package, or have commands or files that may install any of Python's."""
        commands = " ".join((*self.setup, *self.install))
        named = package in " ".join((self.base_image, *self.pip_packages, commands))
        return named or _INSTALLER.search(commands) is not None or bool({"-r", "-e", "."} & {*self.pip_packages})

    def context_dir(self, row: SweBenchRow) -> Path:
        """Returns the folder of the row's context, there or not: a name for each content."""
        identity = json.dumps([_FORMAT, self.source(row), row.base_commit, self.dockerfile])
        return self.folder / "contexts" / hashlib.sha256(identity.encode()).hexdigest()[:32]


def _run(command: str) -> str:
    return f"RUN {json.dumps(['/bin/sh', '-ec', command])}"


def make_context(row: SweBenchRow, options: BuildOptions, git: Git) -> Path:
    """Returns the row's build context, made if it is not there. Blocking.

    It has the commits that lead to the base commit, and nothing that came later. Repositories that are not on this
    machine are copied once, into the cache.

    Raises:
        PreflightError: The repository cannot be had, lacks the commit, or the cache cannot be written.
    """
    place = options.context_dir(row)
    hold(options.folder)
    if place.is_dir():
        return place
    with TaskCache(place.parent).workspace() as workspace:
        made = workspace / "context"
        made.mkdir()
        _copy_history(row, options, git, made / "repository")
        (made / "Dockerfile").write_text(options.dockerfile, encoding="utf-8")
        try:
            made.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another process was faster
                raise PreflightError(f"Cannot write {place}: {error.strerror}. Set another env.cache_dir.") from error
    return place


def _copy_history(row: SweBenchRow, options: BuildOptions, git: Git, target: Path) -> None:
    source = options.source(row)
    try:
        if not Path(source).is_dir():
            source = str(_mirror(row, source, options, git))
        _init(git, target)
        _fetch(git, target, source, row.base_commit, "refs/heads/main")
        git.run("symbolic-ref", "HEAD", "refs/heads/main", git_dir=target)
        git.run("config", "core.bare", "false", git_dir=target)
    except GitError as error:
        raise GitError(
            f"{row.instance_id}: {source} does not give commit {row.base_commit}: {error} Set env.repository to where "
            "the repositories are, or env.build=false to use published images."
        ) from None


def _mirror(row: SweBenchRow, source: str, options: BuildOptions, git: Git) -> Path:
    """A copy of a remote repository as far as its commits were asked for."""
    mirror = options.folder / "repositories" / hashlib.sha256(source.encode()).hexdigest()[:32]
    _init(git, mirror)
    ref = f"refs/commits/{row.base_commit}"
    try:
        git.run("cat-file", "-e", f"{ref}^{{commit}}", git_dir=mirror)
    except GitError:
        _fetch(git, mirror, source, row.base_commit, ref)
    return mirror


def _init(git: Git, folder: Path) -> None:
    git.run("init", "--quiet", "--bare", "--template=", "--", str(folder))


def _fetch(git: Git, folder: Path, source: str, commit: str, ref: str) -> None:
    words = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--", source, f"{commit}:{ref}")
    git.run(*words, git_dir=folder, settings=("protocol.version=2",))
