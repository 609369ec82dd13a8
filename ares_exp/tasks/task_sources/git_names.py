"""Checked addresses, refs and paths for git commands. They are untrusted input."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import urlsplit

GIT_PROTOCOLS = ("https", "http", "ssh", "git", "file")

_COMMIT = re.compile(r"[0-9a-fA-F]{40}|[0-9a-fA-F]{64}")
_SCP = re.compile(r"([\w.][\w.-]*@)?[\w.][\w.-]*:[^:]+")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_MAX_CHARACTERS = 1000


def is_commit(ref: str | None) -> bool:
    """Says whether a ref is all the digits of a commit, which names the same files for ever."""
    return ref is not None and _COMMIT.fullmatch(ref) is not None


def check_git_url(url: str) -> str:
    """Returns the address of a repository unchanged.

    Raises:
        ValueError: It is none: not of a protocol that is allowed, an option, or a local path. A password in it is
            refused, as it would be in every record of a run.
    """
    scheme, separator, _ = url.partition("://")
    if url.startswith("-") or _UNPRINTABLE.search(url) or len(url) > _MAX_CHARACTERS:
        raise ValueError(f"expected the address of a git repository, got {url!r:.100}")
    if not separator:
        if _SCP.fullmatch(url):
            return url
        raise ValueError(
            f"expected the address of a git repository ({', '.join(f'{one}://' for one in GIT_PROTOCOLS)} or "
            f"user@host:path), got {url!r:.100}. That of a local one is file:///…"
        )
    if scheme not in GIT_PROTOCOLS:
        raise ValueError(f"expected one of the protocols {', '.join(GIT_PROTOCOLS)}, got {scheme!r:.100}")
    try:
        parts = urlsplit(url)
        user, password, host = parts.username, parts.password, parts.hostname or ""
    except ValueError as error:
        raise ValueError(f"expected the address of a git repository, got none ({error})") from None
    if password is not None or (user is not None and scheme in ("https", "http")):
        raise ValueError(
            f"expected an address without user and password, got one for {host!r:.100}. Leave them to git's credential "
            "helper, or use an SSH address"
        )
    if (host.startswith("-") or (user or "").startswith("-")) or (not host and scheme != "file"):
        raise ValueError(f"expected an address with a host, got {url!r:.100}")
    return url


def check_git_ref(ref: str) -> str:
    """Returns a branch, a tag or a commit unchanged; a commit with small letters.

    Raises:
        ValueError: Git has no such names, or reads more than a name in it.
    """
    if is_commit(ref):
        return ref.lower()
    wrong = not ref or ref.startswith(("-", "+", "/", ".")) or ref.endswith(("/", ".", ".lock")) or _NO_REF.search(ref)
    if wrong or len(ref) > _MAX_CHARACTERS:
        raise ValueError(f"expected a commit, a branch or a tag, got {ref!r:.100}")
    return ref


def check_inner_path(path: str) -> str:
    """Returns a path inside a repository in its shortest spelling; `.` is the repository itself.

    Raises:
        ValueError: It is absolute, leads out of the repository, or is no path.
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


def repository_name(url: str) -> str:
    """Returns the name of a repository: the last part of its address, without `.git`."""
    return re.split(r"[/:]", url.rstrip("/"))[-1].removesuffix(".git").strip(".") or "repository"
