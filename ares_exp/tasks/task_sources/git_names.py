"""Types and functions for URLs, refs and paths of git repositories of tasks. They validate these untrusted values."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

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
