"""Git repositories of tasks, and their cache, which contains one clone per commit.

Only the requested tasks are checked out in a clone. A clone contains no history. If the server supports partial clones,
a clone contains only the files that are checked out. Each clone has a bare repository, `<folder>/<key>/git`, and the
checked-out files, `<folder>/<key>/files/<repository name>`. The key is a hash of the URL and the commit, so the files
never change after they are checked out.

URLs, refs and paths of repositories are untrusted, and are validated first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.user_cache import announce, changing, hold, user_cache_dir, workspace
from ares_exp.errors import GitError, PreflightError, close_matches
from ares_exp.records.terminal_text import count_of
from ares_exp.tasks.task_set import TaskWarnings
from ares_exp.tasks.task_toml import TASK_TOML

GIT_PROTOCOLS = ("https", "http", "ssh", "git", "file")

FORMS = "org/name[@ref], an address such as https://host/org/name[/tree/<ref>/<folder>], or git@host:org/name[@ref]"

_COMMIT = re.compile(r"[0-9a-fA-F]{40}|[0-9a-fA-F]{64}")
_SCP = re.compile(r"([\w.][\w.-]*@)?[\w.][\w.-]*:[^:]+")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_ORG_AND_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_CHARACTERS = 1000


def is_commit(ref: str | None) -> bool:
    """Returns whether `ref` is the full hash of a commit. Any other ref is a branch or tag, which may move."""
    return ref is not None and _COMMIT.fullmatch(ref) is not None


def check_git_url(url: str) -> str:
    """Validates the URL of a repository, and returns it unchanged.

    Raises:
        ValueError: The text is not a URL with a supported protocol, or contains a password or an HTTP user name (which
            may be a token). Such secrets would be written to every record of a run.
    """
    scheme, separator, _ = url.partition("://")
    if url.startswith("-") or _UNPRINTABLE.search(url) or len(url) > _MAX_CHARACTERS:
        raise ValueError(f"expected the address of a git repository, got {url!r:.100}")
    if not separator:
        if _SCP.fullmatch(url):
            return url
        raise ValueError(
            f"expected the address of a git repository ({', '.join(f'{one}://' for one in GIT_PROTOCOLS)} or "
            f"user@host:path), got {url!r:.100}. For a local repository, use file:///…"
        )
    if scheme not in GIT_PROTOCOLS:
        raise ValueError(f"expected one of the protocols {', '.join(GIT_PROTOCOLS)}, got {scheme!r:.100}")
    try:
        parts = urlsplit(url)
        user, password, host = parts.username, parts.password, parts.hostname or ""
    except ValueError as error:
        raise ValueError(f"expected the address of a git repository, got an invalid URL ({error})") from None
    if password is not None or (user is not None and scheme in ("https", "http")):
        raise ValueError(
            f"expected a URL without a user name or password, got one for {host!r:.100}. Use git's credential helper "
            "or an SSH URL"
        )
    if (host.startswith("-") or (user or "").startswith("-")) or (not host and scheme != "file"):
        raise ValueError(f"expected an address with a host, got {url!r:.100}")
    return url


def check_git_ref(ref: str) -> str:
    """Validates a branch, a tag or a commit, and returns it. Commits are converted to lower case.

    Raises:
        ValueError: The text is not a valid name in git, or has a special meaning in git.
    """
    if is_commit(ref):
        return ref.lower()
    wrong = not ref or ref.startswith(("-", "+", "/", ".")) or ref.endswith(("/", ".", ".lock")) or _NO_REF.search(ref)
    if wrong or len(ref) > _MAX_CHARACTERS:
        raise ValueError(f"expected a commit, a branch or a tag, got {ref!r:.100}")
    return ref


def check_inner_path(path: str) -> str:
    """Validates a path in a repository, and returns the normalised path; `.` for the repository itself.

    Raises:
        ValueError: The path is absolute, points outside of the repository, or is invalid.
    """
    shortest = posixpath.normpath(path) if path else "."
    if (
        shortest.startswith("/")
        or shortest.split("/", 1)[0] == ".."
        or any(not character.isprintable() or character == "\\" for character in path)
        or len(path) > _MAX_CHARACTERS
    ):
        raise ValueError(f"expected a relative path that stays inside the repository, got {path!r:.100}")
    return shortest


@dataclass(frozen=True, slots=True)
class GitTask:
    """The location of a task in a git repository. The task's files may not have been fetched yet.

    Attributes:
        url: URL of the repository.
        ref: A commit, a branch or a tag; `None` for the default branch.
        path: Folder of the task in the repository; `.` for the repository itself.
    """

    url: str
    ref: str | None
    path: str

    @property
    def name(self) -> str:
        """Name of the task: the base name of its folder or, if the repository is the task, the repository's name."""
        if self.path != ".":
            return posixpath.basename(self.path)
        return re.split(r"[/:]", self.url.rstrip("/"))[-1].removesuffix(".git").strip(".") or "repository"


@dataclass(frozen=True, slots=True)
class RepositoryReference:
    """The parsed value of `env.repo`.

    Attributes:
        url: URL of the repository.
        ref: A commit, a branch or a tag; `None` for the default branch.
        folder: Folder of tasks in the repository; `None` if the value does not name a folder.
    """

    url: str
    ref: str | None = None
    folder: str | None = None

    @classmethod
    def parse(cls, text: str) -> RepositoryReference:
        """Parses `env.repo`. Raises `ValueError` if it has none of the `FORMS`, such as `org/name@ref`."""
        if not text or text.startswith((".", "/", "~", "-")):
            raise ValueError(
                f"expected a repository ({FORMS}), got {text!r:.100}. For a local folder of tasks, use "
                "`env.path`. For a local repository, use file:///…"
            )
        place, at, tail = text.rpartition("@")
        if not at or not place or "/" in tail or ":" in tail:  # the `@` of a user name
            place, ref = text, None
        else:
            ref = check_git_ref(tail)
        if "://" in place:
            return _of_address(place, ref)
        if ":" in place:
            return cls(check_git_url(place), ref)
        if "." in place.partition("/")[0]:
            return _of_address(f"https://{place}", ref)
        if not _ORG_AND_NAME.fullmatch(place):
            raise ValueError(f"expected a repository ({FORMS}), got {text!r:.100}")
        return cls(check_git_url(f"https://github.com/{place.removesuffix('.git')}.git"), ref)


def _of_address(address: str, ref: str | None) -> RepositoryReference:
    scheme = address.partition("://")[0]
    check_git_url(address)
    if scheme == "file":
        return RepositoryReference(address, ref)
    parts = urlsplit(address)
    names = [name for name in parts.path.split("/") if name]
    where = names.index("tree") if "tree" in names else len(names)
    repository, rest = names[:where], names[where + 1 :]
    if not repository:
        raise ValueError(f"expected a repository ({FORMS}), got {address!r:.100}")
    if rest and ref is not None:
        raise ValueError(f"expected one ref, got {ref!r} and {rest[0]!r}. Remove `@{ref}` or `/tree/{rest[0]}`")
    folder = check_inner_path("/".join(rest[1:])) if rest[1:] else None
    url = f"{scheme}://{parts.netloc}/{'/'.join(repository)}"
    return RepositoryReference(check_git_url(url), check_git_ref(rest[0]) if rest else ref, folder)


# Variables that git commands get, so that the user's credentials, proxies and keys apply. Other variables of git are
# removed, because they may select another repository (for example, if a git hook starts the run) or change the output.
_PASSED_ON = ("GIT_ASKPASS", "GIT_CONFIG", "GIT_PROXY", "GIT_SSH", "GIT_SSL")
_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "GIT_ALLOW_PROTOCOL": ":".join(GIT_PROTOCOLS),  # not ext:: and fd::, which start programs
    "LC_ALL": "C",
}
_SETTINGS = (
    *("core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"),
    *("submodule.recurse=false", "fetch.recurseSubmodules=false", "advice.detachedHead=false"),
    *("core.autocrlf=false", "core.eol=lf"),  # the same files on every machine
)


class Git:
    """Runs git commands, one after the other.

    Attributes:
        timeout_sec: Time limit in seconds of one command.
        stop: Function that kills the running command, and prevents the start of further commands.
        stopped: Event that `stop` sets.
    """

    def __init__(self, *, timeout_sec: float) -> None:
        self.timeout_sec = timeout_sec
        self._child = ChildProcess()
        self.stop, self.stopped = self._child.stop, self._child.stopped

    def run(
        self,
        *arguments: str,
        git_dir: Path | None = None,
        work_tree: Path | None = None,
        settings: Sequence[str] = (),
    ) -> bytes:
        """Runs `git` with `arguments` and returns its stdout. Blocking.

        Each of `settings` has the form `name=value`, as for `git -c`. Untrusted arguments must be validated, or come
        after `--`, so that git does not read them as options.

        Raises:
            PreflightError: Git is missing, failed (`GitError`), took too long, printed too much, or was stopped.
        """
        program = shutil.which("git")
        if program is None:
            raise PreflightError(
                "Tasks in git repositories need the program `git`, which is not on PATH. Install git, or "
                "use a local folder with `env.path=<folder>`."
            )
        places = [f"--git-dir={git_dir}"] if git_dir is not None else []
        places += [f"--work-tree={work_tree}"] if work_tree is not None else []
        options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith(_PASSED_ON)
        }
        what = f"`git {arguments[0]}`"
        try:
            ended = self._child.run(
                [program, *places, *options, *arguments], env=env | _ENVIRONMENT, timeout_sec=self.timeout_sec
            )
        except ChildFailedError as error:
            raise PreflightError(
                f"{what} {error}. Check that the repository is reachable, or set a higher `env.git_timeout_sec`."
            ) from None
        if ended.exit_code != 0:
            said = " ".join(ended.errors[-4:]).rstrip(".") or "it printed nothing"
            raise GitError(f"{what} failed with exit code {ended.exit_code}: {said}.")
        return ended.output


FOLDER, SUBMODULE = "040000", "160000"
"""Git modes of a folder and of a submodule in `Repositories.tree`."""

_WITHOUT_PARTIAL_CLONES = ("huggingface.co",)
"""Hosts whose partial clones do not work, because these hosts never send the files that a clone omits."""


def default_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/ares_exp/tasks`, or `~/.cache/ares_exp/tasks` if the variable is not set."""
    return user_cache_dir() / "tasks"


class Repositories:
    """Fetches tasks from git repositories into the cache. The caller must validate the URLs.

    All methods block, and raise `PreflightError` if git fails. Several processes may use the same cache. The cache is
    never cleaned while a process that used it is still running.
    """

    def __init__(self, git: Git, folder: Path) -> None:
        """Stores `git` and the folder of the cache. The folder is created on first use."""
        self._git = git
        self._folder = folder

    def commit(self, url: str, ref: str | None) -> str:
        """Returns the full hash of the commit to which `ref` refers, and clones this commit if it is not in the cache.

        `ref` is a commit, a branch or a tag. `None` means the default branch.
        """
        commit = ref if ref is not None and is_commit(ref) else self._named(url, ref)
        if not self._git_dir(url, commit).is_dir():
            return self._clone(url, ref or "HEAD", commit)
        hold(self._folder)
        return commit

    def tree(self, url: str, commit: str) -> Mapping[str, str]:
        """Returns the git mode (such as `040000` for a folder) of every file and folder in a cloned commit, by path."""
        listed = self._git.run("ls-tree", "-r", "-t", "-z", commit, git_dir=self._git_dir(url, commit))
        entries = (entry.partition(b"\t") for entry in listed.split(b"\0") if entry)
        return {os.fsdecode(path): about[:6].decode() for about, _, path in entries}

    def read(self, url: str, commit: str, path: str) -> bytes:
        """Returns the content of a file in a cloned commit."""
        return self._git.run("cat-file", "blob", f"{commit}:{path}", git_dir=self._git_dir(url, commit))

    def fetch(
        self, tasks: Sequence[GitTask], report: Callable[[str], None]
    ) -> tuple[dict[GitTask, tuple[Path, str]], dict[str, str]]:
        """Checks out tasks that are not cached. Warns with `report` about their submodules, which are not fetched.

        Returns the directory and commit of each task, and errors by the name of the task.
        """
        places, problems, submodules = dict[GitTask, tuple[Path, str]](), dict[str, str](), TaskWarnings()
        groups: dict[tuple[str, str | None], list[GitTask]] = {}
        for task in tasks:
            groups.setdefault((task.url, task.ref), []).append(task)
        for (url, ref), group in groups.items():
            commit = self.commit(url, ref)
            tree = self.tree(url, commit)
            wanted = []
            for task in group:
                if (complaint := _complaint(task.path, tree)) is not None:
                    problems[task.name] = f"{url} at {commit}: {complaint}"
                    continue
                wanted.append(task.path)
                places[task] = self._files(url, commit) / task.path, commit
                inside = "" if task.path == "." else f"{task.path}/"
                modules = [path for path, mode in tree.items() if mode == SUBMODULE and path.startswith(inside)]
                submodules.add(task.name, (f"{path} is a submodule, whose files are not fetched" for path in modules))
            if wanted:
                self._check_out(url, commit, wanted, tree)
        submodules.tell(report)
        return places, problems

    def _clone_dir(self, url: str, commit: str) -> Path:
        return self._folder / hashlib.sha256(json.dumps([url, commit]).encode()).hexdigest()[:32]

    def _git_dir(self, url: str, commit: str) -> Path:
        return self._clone_dir(url, commit) / "git"

    def _files(self, url: str, commit: str) -> Path:
        name = GitTask(url, commit, ".").name
        return self._clone_dir(url, commit) / "files" / name  # the name of the task, if the repository is the task

    def _named(self, url: str, ref: str | None) -> str:
        """Asks the server for the current commit of a branch or a tag. `None` means the default branch."""
        names = ["HEAD"]
        if ref is not None:
            names = [ref, f"refs/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}"]
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
        raise GitError(f"{url} has no branch or tag {ref!r}. Set a branch, a tag, or all 40 digits of a commit.")

    def _clone(self, url: str, ref: str, commit: str) -> str:
        """Clones the commit to which `ref` refers, without checking out files, and returns its hash.

        The hash differs from `commit`, the expected hash, if the branch or tag has moved in the meantime.
        """
        is_partial = urlsplit(url).hostname not in _WITHOUT_PARTIAL_CLONES
        options = ("--depth=1", "--no-tags", *(("--filter=blob:none",) if is_partial else ()))
        digits = ("--object-format=sha256",) if len(commit) > 40 else ()  # length of a SHA-1 hash
        announce(f"Fetching the list of files of {url} at {commit[:12]} to {self._folder}.")
        with workspace(self._folder, "fetch") as place:
            git_dir = place / "clone" / "git"
            self._git.run("init", "--quiet", "--bare", "--template=", *digits, "--", str(git_dir))
            self._git.run("remote", "add", "--", "origin", url, git_dir=git_dir)
            try:
                self._git.run("fetch", "--quiet", *options, "--", "origin", ref, git_dir=git_dir)
                found = self._git.run("rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}", git_dir=git_dir)
            except GitError as error:
                raise _unreachable(url, error, ref) from None
            commit = found.decode().strip()
            try:
                git_dir.parent.rename(self._clone_dir(url, commit))
            except OSError as error:  # another process may have made the same clone
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        return commit

    def _check_out(self, url: str, commit: str, paths: Sequence[str], tree: Mapping[str, str]) -> None:
        """Checks out folders (`paths`) of a clone, in addition to the folders that earlier calls have checked out.

        No network is needed if every folder already contains a task.toml, because git downloads all files before it
        writes the first file. This also applies if an earlier call was interrupted.
        """
        files, git_dir = self._files(url, commit), self._git_dir(url, commit)
        unfinished = git_dir / "unfinished"  # exists during a call, and after a call that failed or was killed
        if not {*paths} - _present(files, tree) and not unfinished.exists():
            return
        try:
            with changing(git_dir, stop=self._git.stopped, timeout_sec=self._git.timeout_sec):
                present = _present(files, tree)
                if missing := len({*paths} - present):
                    announce(f"Fetching {count_of(missing, 'task')} of {url} at {commit[:12]}.")
                unfinished.touch()
                files.mkdir(parents=True, exist_ok=True)
                (git_dir / "index.lock").unlink(missing_ok=True)  # left by a killed process
                (git_dir / "info").mkdir(exist_ok=True)
                patterns = "".join(f"{_pattern(path)}\n" for path in sorted({*paths} | present))
                (git_dir / "info" / "sparse-checkout").write_text(patterns, encoding="utf-8", errors="surrogateescape")
                self._git.run(
                    *("checkout", "--quiet", "--force", "--detach", commit),
                    git_dir=git_dir,
                    work_tree=files,
                    settings=("core.sparseCheckout=true", "core.sparseCheckoutCone=false"),
                )
                unfinished.unlink()
        except GitError as error:
            raise GitError(f"The files of {url} at {commit} cannot be fetched: {error}") from None
        except TimeoutError as error:
            raise PreflightError(
                f"The files of {url} cannot be fetched: {error} Wait until that process has ended."
            ) from None


def _present(files: Path, tree: Mapping[str, str]) -> set[str]:
    """Returns the task folders in `tree` whose task.toml is checked out in `files`. Other files may be missing."""
    folders = (posixpath.dirname(path) or "." for path in tree if posixpath.basename(path) == TASK_TOML)
    return {folder for folder in folders if os.path.lexists(files / folder / TASK_TOML)}


def _unreachable(url: str, error: PreflightError, ref: str | None = None) -> GitError:
    what = f"{ref!r} of {url}" if ref is not None else url
    return GitError(
        f"{what} cannot be fetched: {error} Check the address. A ref is a branch, a tag, or all 40 digits of a commit. "
        "A private repository needs a git credential helper or an SSH agent. A commit that was fetched before, and is "
        "named by all its digits, needs no network.",
        said=str(error),
    )


def _pattern(path: str) -> str:
    """Returns a pattern for git's sparse checkout that matches the folder `path` and everything in it."""
    literally = re.sub(r"([*?[])", r"[\1]", path)
    return "/*" if path == "." else f"/{literally}/"


def _complaint(path: str, tree: Mapping[str, str]) -> str | None:
    """Returns the reason why the folder `path` in a commit is not a task; `None` if it is a task."""
    if posixpath.normpath(f"{path}/{TASK_TOML}") in tree:
        return None
    folders = [posixpath.dirname(one) for one in tree if posixpath.basename(one) == TASK_TOML]
    return (
        f"expected a task, found no {TASK_TOML} in `{path}`.{close_matches(path, folders)} For a folder of "
        f"tasks, use `env.repo=<repository> env.path={path}`"
    )
