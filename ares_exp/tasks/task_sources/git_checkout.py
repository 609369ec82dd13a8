"""A git repository, copied without history and without files; single folders of it are checked out."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from ares_exp.errors import GitError
from ares_exp.tasks.task_sources.git_command import Git

FOLDER, SYMLINK, SUBMODULE = "040000", "120000", "160000"
"""Modes of entries of a tree; others are files."""

_WITHOUT_PARTIAL_CLONES = ("huggingface.co",)
"""Hosts that leave files out of a copy when asked to, and do not give them later."""


class GitCheckout:
    """A shallow copy of one repository, which asks the remote for files only when they are checked out."""

    def __init__(self, git: Git, folder: Path, url: str) -> None:
        """Copies the newest commit of the default branch, without its files. Blocking.

        Args:
            git: Runs the commands.
            folder: Where the copy goes; must not be there. Its owner removes it.
            url: The repository; checked.

        Raises:
            PreflightError: It cannot be copied.
        """
        self.url = url
        self._git = git
        self._git_dir = folder / "git"
        self._folder = folder
        self._checkouts = 0
        self._commits: dict[str | None, str] = {}
        self._trees: dict[str, Mapping[str, str]] = {}
        folder.mkdir()
        partly = () if urlsplit(url).hostname in _WITHOUT_PARTIAL_CLONES else ("--filter=blob:none",)
        options = ("--bare", "--depth=1", *partly, "--single-branch", "--no-tags", "--template=", "--origin=origin")
        try:
            git.run("clone", "--quiet", *options, "--", url, str(self._git_dir))
        except GitError as error:
            raise GitError(
                f"{url} cannot be copied: {error} Is the address right? Nothing is asked for here: for a private "
                "repository, git needs a credential helper or an SSH agent."
            ) from None
        with suppress(GitError):  # the repository is empty, or its default branch is
            newest = self._commit_at("HEAD")
            self._commits |= {None: newest, newest: newest}

    def commit(self, ref: str | None) -> str:
        """All digits of the commit that `ref` names now, which is fetched. Blocking.

        Args:
            ref: A commit, a branch or a tag; `None`: the default branch.

        Raises:
            PreflightError: There is no such commit, or it cannot be fetched.
        """
        if ref in self._commits:
            return self._commits[ref]
        if ref is None:
            raise GitError(f"{self.url} has no commit on its default branch. Name a branch, a tag or a commit.")
        try:
            self._run("fetch", "--quiet", "--depth=1", "--no-tags", "--", "origin", ref)
            commit = self._commit_at("FETCH_HEAD")
        except GitError as error:
            raise GitError(
                f"{self.url} has no {ref!r} that can be fetched: {error} Expected a branch, a tag, or all 40 digits of "
                "a commit."
            ) from None
        self._commits |= {ref: commit, commit: commit}
        return commit

    def _commit_at(self, name: str) -> str:
        return self._run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()

    def tree(self, commit: str) -> Mapping[str, str]:
        """The mode of every entry of a commit, folders included, by its path. Blocking.

        Raises:
            PreflightError: It cannot be listed; or is too long.
        """
        if commit not in self._trees:
            listed = self._run("ls-tree", "-r", "-t", "-z", commit)
            entries = (entry.partition(b"\t") for entry in listed.split(b"\0") if entry)
            self._trees[commit] = {os.fsdecode(path): about[:6].decode() for about, _, path in entries}
        return self._trees[commit]

    def read(self, commit: str, path: str) -> bytes:
        """A file of a commit. Blocking.

        Raises:
            PreflightError: It cannot be fetched; or is too long.
        """
        return self._run("cat-file", "blob", f"{commit}:{path}")

    def check_out(self, commit: str, paths: Iterable[str]) -> Path:
        """Makes a directory with these folders of a commit as they are, links included, and not much else. Blocking.

        Files that are in Git LFS are fetched, too, where its program is installed.

        Raises:
            PreflightError: The files cannot be fetched.
        """
        self._checkouts += 1
        work_tree = self._folder / f"files-{self._checkouts}"
        work_tree.mkdir()
        info = self._git_dir / "info"
        info.mkdir(exist_ok=True)
        wanted = "".join(f"{_pattern(path)}\n" for path in paths)
        (info / "sparse-checkout").write_text(wanted, encoding="utf-8", errors="surrogateescape")
        (self._git_dir / "index").unlink(missing_ok=True)
        try:
            self._git.run(
                *("checkout", "--quiet", "--force", "--detach", commit),
                git_dir=self._git_dir,
                work_tree=work_tree,
                settings=("core.sparseCheckout=true", "core.sparseCheckoutCone=false", *_lfs_settings()),
            )
        except GitError as error:
            raise GitError(f"The files of {self.url} at {commit} cannot be fetched: {error}") from None
        return work_tree

    def _run(self, *arguments: str) -> bytes:
        return self._git.run(*arguments, git_dir=self._git_dir)


def _pattern(path: str) -> str:
    """The pattern of a folder and all below it, in the syntax of .gitignore."""
    if path == ".":
        return "/*"
    literally = re.sub(r"([*?[])", r"[\1]", path)
    return f"/{literally}/"


def has_lfs() -> bool:
    """Whether the program of Git LFS is installed."""
    return shutil.which("git-lfs") is not None


def _lfs_settings() -> tuple[str, ...]:
    """Has files of Git LFS fetched while they are checked out; without its program, their pointers stay."""
    program = "git-lfs filter-process" if has_lfs() else ""
    smudge = "git-lfs smudge -- %f" if has_lfs() else ""
    required = "true" if has_lfs() else "false"
    return (f"filter.lfs.process={program}", f"filter.lfs.smudge={smudge}", f"filter.lfs.required={required}")
