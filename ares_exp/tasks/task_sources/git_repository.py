"""A git repository of tasks, copied commit by commit into the cache: without history, and without files.

The copy of a commit has its trees, and files that were read once. It needs no network any more; only files of tasks
that are checked out for the first time are fetched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ares_exp.errors import GitError, PreflightError
from ares_exp.tasks.task_sources.cache import TaskCache
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_names import is_commit

FOLDER, SYMLINK, SUBMODULE = "040000", "120000", "160000"
"""Modes of entries of a tree; others are files."""

_WITHOUT_PARTIAL_CLONES = ("huggingface.co",)
"""Hosts that leave files out of a copy when asked to, and do not give them later."""


class GitRepository:
    """One repository. Every method blocks, and raises `PreflightError` where the repository does not answer."""

    def __init__(self, git: Git, cache: TaskCache, url: str) -> None:
        """Names a repository.

        Args:
            git: Runs the commands.
            cache: Keeps the copies.
            url: Its address; checked.
        """
        self.url = url
        self._git = git
        self._cache = cache
        self._commits: dict[str | None, str] = {}
        self._trees: dict[str, Mapping[str, str]] = {}

    def commit(self, ref: str | None) -> str:
        """Returns all digits of the commit that `ref` names now; the cache has a copy of it then.

        Args:
            ref: A commit, a branch or a tag; `None`: the default branch.

        Raises:
            PreflightError: There is no such commit, or the repository does not answer.
        """
        if ref not in self._commits:
            commit = ref if ref is not None and is_commit(ref) else self._named(ref)
            has_copy = commit is not None and self._cache.repository(self.url, commit).is_dir()
            self._commits[ref] = commit if commit is not None and has_copy else self._copy(ref)
        return self._commits[ref]

    def tree(self, commit: str) -> Mapping[str, str]:
        """Returns the mode of every entry of a commit, folders included, by its path."""
        if commit not in self._trees:
            listed = self._run(commit, "ls-tree", "-r", "-t", "-z", commit)
            entries = (entry.partition(b"\t") for entry in listed.split(b"\0") if entry)
            self._trees[commit] = {os.fsdecode(path): about[:6].decode() for about, _, path in entries}
        return self._trees[commit]

    def read(self, commit: str, path: str) -> bytes:
        """Returns a file of a commit."""
        return self._run(commit, "cat-file", "blob", f"{commit}:{path}")

    def check_out(self, commit: str, paths: Iterable[str], folder: Path) -> Path:
        """Makes a directory with these folders of a commit as they are, links included, and not much else.

        Files in Git LFS are fetched, too, where its program is installed.

        Args:
            commit: The commit.
            paths: The folders.
            folder: Where it all happens; must not be there. Its owner removes it.
        """
        git_dir, work_tree = folder / "git", folder / "files"
        shutil.copytree(self._cache.repository(self.url, commit), git_dir)  # the index and the patterns are ours alone
        work_tree.mkdir()
        (git_dir / "info").mkdir(exist_ok=True)
        wanted = "".join(f"{_pattern(path)}\n" for path in paths)
        (git_dir / "info" / "sparse-checkout").write_text(wanted, encoding="utf-8", errors="surrogateescape")
        try:
            self._git.run(
                *("checkout", "--quiet", "--force", "--detach", commit),
                git_dir=git_dir,
                work_tree=work_tree,
                settings=("core.sparseCheckout=true", "core.sparseCheckoutCone=false", *_lfs_settings()),
            )
        except GitError as error:
            raise GitError(f"The files of {self.url} at {commit} cannot be fetched: {error}") from None
        return work_tree

    def _named(self, ref: str | None) -> str | None:
        """The commit that a branch or a tag is now; `None` when the repository names none."""
        names = ["HEAD"] if ref is None else [ref, f"refs/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}"]
        names += [f"refs/heads/{ref}"] if ref is not None else []
        try:
            answer = self._git.run("ls-remote", "--", self.url, *names)
        except GitError as error:
            raise self._unreachable(error) from None
        lines = (line.partition("\t") for line in answer.decode("utf-8", "replace").splitlines())
        found = {name: commit for commit, _, name in lines if is_commit(commit)}
        return next((found[name] for name in names if name in found), None)

    def _copy(self, ref: str | None) -> str:
        """Copies the commit that `ref` names into the cache."""
        partly = () if urlsplit(self.url).hostname in _WITHOUT_PARTIAL_CLONES else ("--filter=blob:none",)
        options = ("--bare", "--depth=1", *partly, "--single-branch", "--no-tags", "--template=", "--origin=origin")
        with self._cache.workspace() as workspace:
            made = workspace / "git"
            try:
                self._git.run("clone", "--quiet", *options, "--", self.url, str(made))
            except GitError as error:
                raise self._unreachable(error) from None
            try:
                if ref is not None:
                    self._git.run("fetch", "--quiet", "--depth=1", "--no-tags", "--", "origin", ref, git_dir=made)
                name = "HEAD" if ref is None else "FETCH_HEAD"
                found = self._git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", git_dir=made)
            except GitError as error:
                if ref is None:
                    raise GitError(
                        f"{self.url} has no commit on its default branch. Name a branch, a tag or a commit."
                    ) from None
                raise GitError(
                    f"{self.url} has no {ref!r} that can be fetched: {error} Expected a branch, a tag, or all 40 "
                    "digits of a commit."
                ) from None
            commit = found.decode().strip()
            self._cache.keep_repository(self.url, commit, made)
        return commit

    def _run(self, commit: str, *arguments: str) -> bytes:
        return self._git.run(*arguments, git_dir=self._cache.repository(self.url, commit))

    def _unreachable(self, error: PreflightError) -> GitError:
        return GitError(
            f"{self.url} cannot be copied: {error} Is the address right? Nothing is asked for here: for a private "
            "repository, git needs a credential helper or an SSH agent. A commit that was played before, named by all "
            "its digits, needs no network.",
            said=str(error),
        )


def has_lfs() -> bool:
    """Says whether the program of Git LFS is installed."""
    return shutil.which("git-lfs") is not None


def _pattern(path: str) -> str:
    """The pattern of a folder and all below it, in the syntax of .gitignore."""
    literally = re.sub(r"([*?[])", r"[\1]", path)
    return "/*" if path == "." else f"/{literally}/"


def _lfs_settings() -> tuple[str, ...]:
    """Has files of Git LFS fetched while they are checked out; without its program, their pointers stay."""
    program, smudge = ("git-lfs filter-process", "git-lfs smudge -- %f") if has_lfs() else ("", "")
    required = "true" if has_lfs() else "false"
    return (f"filter.lfs.process={program}", f"filter.lfs.smudge={smudge}", f"filter.lfs.required={required}")
