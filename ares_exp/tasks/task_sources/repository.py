"""A git repository of tasks, which is asked for no more than is not known of it already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ares_exp.errors import PreflightError
from ares_exp.tasks.task_sources.git_checkout import GitCheckout
from ares_exp.tasks.task_sources.git_command import Git
from ares_exp.tasks.task_sources.git_names import is_commit
from ares_exp.tasks.task_sources.repository_notes import RepositoryNotes

QUESTION_SEC = 30.0
"""What the question where a branch or a tag is may take, where an older answer is at hand."""


class Repository:
    """A repository: its notes, and a copy of it that is made when they do not say enough.

    With a commit in full whose tree is noted nothing is asked. Where a branch or a tag was noted before, one question
    tells whether it is still there; without an answer it is taken to be.
    """

    def __init__(
        self,
        url: str,
        git: Git,
        notes: RepositoryNotes,
        make_copy: Callable[[], GitCheckout],
        report: Callable[[str], None],
    ) -> None:
        """Asks nothing yet.

        Args:
            url: Its address; checked.
            git: Runs the commands.
            notes: What is known of it.
            make_copy: Copies it; called once at most.
            report: Is told when it does not answer, and an older answer is taken.
        """
        self.url = url
        self._git = git
        self._notes = notes
        self._make_copy = make_copy
        self._report = report
        self._copy: GitCheckout | None = None
        self._commits: dict[str | None, str] = {}

    def commit(self, ref: str | None) -> str:
        """All digits of the commit that `ref` names now, or named when the repository last answered. Blocking.

        Args:
            ref: A commit, a branch or a tag; `None`: the default branch.

        Raises:
            PreflightError: There is no such commit, or nobody knows.
        """
        if ref not in self._commits:
            self._commits[ref] = self._known(ref) or self._asked(ref)
        return self._commits[ref]

    def tree(self, commit: str) -> Mapping[str, str]:
        """As `GitCheckout.tree`, for a commit that `commit` has returned."""
        tree = self._notes.tree(commit)
        if tree is None:
            tree = self._copy_with(commit).tree(commit)
            self._notes.note_tree(commit, tree)
        return tree

    def read(self, commit: str, path: str) -> bytes:
        """As `GitCheckout.read`, for a commit that `commit` has returned."""
        data = self._notes.file(commit, path)
        if data is None:
            data = self._copy_with(commit).read(commit, path)
            self._notes.note_file(commit, path, data)
        return data

    def check_out(self, commit: str, paths: Iterable[str]) -> Path:
        """As `GitCheckout.check_out`, for a commit that `commit` has returned."""
        return self._copy_with(commit).check_out(commit, paths)

    def _known(self, ref: str | None) -> str | None:
        """The commit, if it can be told without a copy."""
        if ref is not None and is_commit(ref):
            return ref if self._notes.tree(ref) is not None else None
        noted = self._notes.sighting(ref)
        if noted is None or self._copy is not None:
            return None
        try:
            now = self._question(ref)
        except PreflightError as error:
            if self._git.is_stopped:
                raise
            what = "its default branch" if ref is None else f"its {ref!r}"
            self._report(
                f"{self.url} gave no answer, so {what} is taken to be commit {noted.commit}, as on {noted.time}. "
                f"To play that commit for certain, name it. {error}"
            )
            return noted.commit
        if now != noted.commit:
            return None
        self._notes.note_sighting(ref, now)
        return now

    def _question(self, ref: str | None) -> str | None:
        """The commit that a ref is now; `None` when it is not said."""
        names = ["HEAD"] if ref is None else [ref, f"refs/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}"]
        names += [f"refs/heads/{ref}"] if ref is not None else []
        answer = self._git.run("ls-remote", "--", self.url, *names, at_most_sec=QUESTION_SEC)
        lines = (line.partition("\t") for line in answer.decode("utf-8", "replace").splitlines())
        found = {name: commit for commit, _, name in lines if is_commit(commit)}
        return next((found[name] for name in names if name in found), None)

    def _asked(self, ref: str | None) -> str:
        commit = self._copied().commit(ref)
        if not is_commit(ref):
            self._notes.note_sighting(ref, commit)
        return commit

    def _copied(self) -> GitCheckout:
        if self._copy is None:
            self._copy = self._make_copy()
        return self._copy

    def _copy_with(self, commit: str) -> GitCheckout:
        """The copy, which has a commit: by the name that it was asked for, as not every server gives it by its own."""
        copy = self._copied()
        for ref in [ref for ref, known in self._commits.items() if known == commit]:
            if copy.commit(ref) == commit:
                return copy
        copy.commit(commit)
        return copy
