"""Git repositories of tasks. Commits are cached without history and files, and requested tasks are copied from them."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ares_exp.containers.user_cache import announce
from ares_exp.errors import GitError, PreflightError, TaskError, close_matches
from ares_exp.records.terminal_text import count_of
from ares_exp.tasks.task_contract import TaskOrigin
from ares_exp.tasks.task_sources.cache import TaskCache
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_names import GitTask, is_commit
from ares_exp.tasks.task_toml import TASK_TOML
from ares_exp.tasks.task_warnings import TaskWarnings

FOLDER, SYMLINK, SUBMODULE = "040000", "120000", "160000"
"""Modes of entries in a git tree. Entries with other modes are files."""

MAX_ENTRIES = 100_000
MAX_BYTES = 20 * 10**9
"""Limits on the number of files and on the size of one task."""

_WITHOUT_PARTIAL_CLONES = ("huggingface.co",)
"""Hosts that do not support partial clones: they leave out files, but do not send them later."""


@dataclass
class Fetched:
    """The result of fetching tasks.

    Attributes:
        places: Directory and origin of each fetched task.
        problems: Errors of tasks that could not be fetched, by task name.
    """

    places: dict[GitTask, tuple[Path, TaskOrigin]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Repositories:
    """Accesses repositories by validated URLs. All methods block, and raise `PreflightError` if git fails."""

    def __init__(self, git: Git, cache: TaskCache) -> None:
        """Creates the object, without accessing any repository.

        Args:
            git: Runner of git commands.
            cache: Cache of commits and tasks.
        """
        self._git = git
        self._cache = cache
        self._commits: dict[tuple[str, str | None], str] = {}

    def commit(self, url: str, ref: str | None) -> str:
        """Returns the full hash of the commit that `ref` currently names, and copies the commit into the cache.

        Args:
            url: URL of the repository.
            ref: A commit, a branch or a tag; `None` for the default branch.
        """
        if (url, ref) not in self._commits:
            commit = ref if ref is not None and is_commit(ref) else self._named(url, ref)
            has_copy = self._cache.has(self._cache.commit(url, commit))
            self._commits[url, ref] = commit if has_copy else self._copy(url, ref or "HEAD", commit)
        return self._commits[url, ref]

    def tree(self, url: str, commit: str) -> Mapping[str, str]:
        """Returns the mode of every file and folder of a cached commit, by path."""
        listed = self._git.run("ls-tree", "-r", "-t", "-z", commit, git_dir=self._cache.commit(url, commit))
        entries = (entry.partition(b"\t") for entry in listed.split(b"\0") if entry)
        return {os.fsdecode(path): about[:6].decode() for about, _, path in entries}

    def read(self, url: str, commit: str, path: str) -> bytes:
        """Returns the content of a file of a cached commit."""
        return self._git.run("cat-file", "blob", f"{commit}:{path}", git_dir=self._cache.commit(url, commit))

    def fetch(self, tasks: Sequence[GitTask], report: Callable[[str], None]) -> Fetched:
        """Copies tasks into the cache, unless it has them.

        Args:
            tasks: The tasks.
            report: Callback for warnings about submodules, whose files are not fetched.
        """
        found, submodules = Fetched(), TaskWarnings()
        groups: dict[tuple[str, str | None], list[GitTask]] = {}
        for task in tasks:
            groups.setdefault((task.url, task.ref), []).append(task)
        for (url, ref), group in groups.items():
            if ref is not None and is_commit(ref) and not self._missing(group, ref, found):
                continue
            commit = self.commit(url, ref)
            if missing := self._missing(group, commit, found):
                announce(f"Fetching {count_of(len(missing), 'task')} of {url} at {commit[:12]}.")
                self._fetch(url, commit, missing, found, submodules)
        submodules.tell(report)
        return found

    def _named(self, url: str, ref: str | None) -> str:
        """Returns the current commit of a branch or a tag, or of the default branch if `ref` is `None`."""
        names = ["HEAD"] if ref is None else [ref, f"refs/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}"]
        names += [f"refs/heads/{ref}"] if ref is not None else []
        try:
            response = self._git.run("ls-remote", "--", url, *names)
        except GitError as error:
            raise _unreachable(url, error) from None
        lines = (line.partition("\t") for line in response.decode("utf-8", "replace").splitlines())
        found = {name: commit for commit, _, name in lines if is_commit(commit)}
        if commit := next((found[name] for name in names if name in found), None):
            return commit
        if ref is None:
            raise GitError(f"{url} has no commit on its default branch. Name a branch, a tag or a commit.")
        raise GitError(f"{url} has no {ref!r}. Expected a branch, a tag, or all 40 digits of a commit.")

    def _copy(self, url: str, ref: str, commit: str) -> str:
        """Copies a commit into the cache. Returns the copied commit, which differs if the branch has moved."""
        is_partial = urlsplit(url).hostname not in _WITHOUT_PARTIAL_CLONES
        options = ("--depth=1", "--no-tags", *(("--filter=blob:none",) if is_partial else ()))
        digits = ("--object-format=sha256",) if len(commit) > 40 else ()  # length of a SHA-1 hash
        announce(f"Fetching the list of files of {url} at {commit[:12]} to {self._cache.folder}.")
        with self._cache.workspace() as workspace:
            made = workspace / "git"
            self._git.run("init", "--quiet", "--bare", "--template=", *digits, "--", str(made))
            self._git.run("remote", "add", "--", "origin", url, git_dir=made)
            try:
                self._git.run("fetch", "--quiet", *options, "--", "origin", ref, git_dir=made)
                found = self._git.run("rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}", git_dir=made)
            except GitError as error:
                raise _unreachable(url, error, ref) from None
            commit = found.decode().strip()
            self._cache.keep(made, self._cache.commit(url, commit))
        return commit

    def _missing(self, group: Sequence[GitTask], commit: str, found: Fetched) -> list[GitTask]:
        """Returns the tasks that are not in the cache. Adds the cached tasks to `found`."""
        places = {task: (self._cache.task(task.at(commit), task.name), task.at(commit)) for task in group}
        found.places |= {task: place for task, place in places.items() if self._cache.has(place[0])}
        return [task for task in group if task not in found.places]

    def _fetch(self, url: str, commit: str, tasks: Sequence[GitTask], found: Fetched, submodules: TaskWarnings) -> None:
        tree = self.tree(url, commit)
        complaints = {task: _complaint(task.path, tree) for task in tasks}
        found.problems |= {task.name: f"{url} at {commit}: {text}" for task, text in complaints.items() if text}
        wanted = [task for task, text in complaints.items() if text is None]
        for path in (path for path, mode in tree.items() if mode == SUBMODULE):
            for task in (task for task in wanted if task.path == "." or path.startswith(f"{task.path}/")):
                submodules.add(task.name, [f"{path} is a submodule, whose files are not fetched"])
        if not wanted:
            return
        with self._cache.workspace() as workspace:
            files = self._check_out(url, commit, [task.path for task in wanted], workspace)
            for number, task in enumerate(wanted):
                made = workspace / str(number)
                try:
                    _check_size(files / task.path)
                    shutil.copytree(files / task.path, made, symlinks=True)
                except (TaskError, OSError) as error:
                    found.problems[task.name] = f"{url} at {commit}: {task.path}: {error}"
                else:
                    origin = task.at(commit)
                    found.places[task] = self._cache.task(origin, task.name), origin
                    self._cache.keep(made, found.places[task][0])

    def _check_out(self, url: str, commit: str, paths: Sequence[str], workspace: Path) -> Path:
        """Checks out folders of a commit, including links. Few other files are checked out."""
        git_dir, work_tree = workspace / "git", workspace / "files"
        shutil.copytree(self._cache.commit(url, commit), git_dir)  # the cached commit must not be changed
        work_tree.mkdir()
        patterns = "".join(f"{_pattern(path)}\n" for path in paths)
        (git_dir / "info").mkdir(exist_ok=True)
        (git_dir / "info" / "sparse-checkout").write_text(patterns, encoding="utf-8", errors="surrogateescape")
        try:
            self._git.run(
                *("checkout", "--quiet", "--force", "--detach", commit),
                git_dir=git_dir,
                work_tree=work_tree,
                settings=("core.sparseCheckout=true", "core.sparseCheckoutCone=false"),
            )
        except GitError as error:
            raise GitError(f"The files of {url} at {commit} cannot be fetched: {error}") from None
        return work_tree


def _unreachable(url: str, error: PreflightError, ref: str | None = None) -> GitError:
    what = f"{ref!r} of {url}" if ref is not None else url
    return GitError(
        f"{what} cannot be copied: {error} Is the address right? A ref is a branch, a tag, or all 40 digits of a "
        "commit. Git does not prompt: for a private repository, it needs a credential helper or an SSH agent. A commit "
        "that was fetched before, named by all its digits, needs no network.",
        said=str(error),
    )


def _pattern(path: str) -> str:
    """Returns a pattern in the syntax of .gitignore that matches a folder and everything in it."""
    literally = re.sub(r"([*?[])", r"[\1]", path)
    return "/*" if path == "." else f"/{literally}/"


def _check_size(task: Path) -> None:
    count = size = 0
    for directory, folders, names in os.walk(task):
        count += len(folders) + len(names)
        size += sum(Path(directory, name).lstat().st_size for name in names)
        if count > MAX_ENTRIES or size > MAX_BYTES:
            raise TaskError(f"expected at most {MAX_ENTRIES:,} files of {MAX_BYTES:,} bytes in all, got more")


def _complaint(path: str, tree: Mapping[str, str]) -> str | None:
    """Returns the reason that a path of a commit is not a task; `None` if it is a task."""
    parts = [] if path == "." else path.split("/")
    for depth in range(1, len(parts) + 1):
        prefix = "/".join(parts[:depth])
        mode = tree.get(prefix)
        if mode == SYMLINK:
            return f"expected a path without symbolic links, but {prefix} is one"
        if mode is None:
            folders = [posixpath.dirname(one) for one in tree if posixpath.basename(one) == TASK_TOML]
            return f"there is no {path}.{close_matches(path, folders)}"
        if mode != FOLDER:
            return f"expected {prefix} to be a folder, got {'a submodule' if mode == SUBMODULE else 'a file'}"
    if posixpath.normpath(f"{path}/{TASK_TOML}") not in tree:
        return (
            f"expected a task, found no {TASK_TOML} in `{path}`. A folder of tasks: `env.repo=<repository> "
            f"env.path={path}`"
        )
    return None
