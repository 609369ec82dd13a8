"""References to repositories (`env.repo`): the repository, a state of it, and a folder in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ares_exp.tasks.task_sources.git_names import GIT_PROTOCOLS, check_git_ref, check_git_url, check_inner_path

FORMS = "org/name[@ref], an address such as https://host/org/name[/tree/<ref>/<folder>], or git@host:org/name[@ref]"

_ORG_AND_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class RepositoryReference:
    """The meaning of `env.repo`.

    Attributes:
        url: The repository.
        ref: A commit, a branch or a tag; `None`: the default branch.
        folder: Where the tasks are in it; `None`: not said.
    """

    url: str
    ref: str | None = None
    folder: str | None = None

    @classmethod
    def parse(cls, text: str) -> RepositoryReference:
        """Reads it.

        Raises:
            ValueError: It is written in none of these ways.
        """
        if not text or text.startswith((".", "/", "~", "-")):
            raise ValueError(
                f"expected a repository ({FORMS}), got {text!r:.100}. A local folder of tasks is `env.path`, a local "
                "repository file:///…"
            )
        place, ref = _split_ref(text)
        if "://" in place:
            return _of_address(place, ref)
        if ":" in place:
            return cls(check_git_url(place), ref)
        if "." in place.partition("/")[0]:
            return _of_address(f"https://{place}", ref)
        if not _ORG_AND_NAME.fullmatch(place):
            raise ValueError(f"expected a repository ({FORMS}), got {text!r:.100}")
        return cls(check_git_url(f"https://github.com/{place.removesuffix('.git')}.git"), ref)


def _split_ref(text: str) -> tuple[str, str | None]:
    """Takes `@ref` off; what follows the `@` of a user is no ref."""
    place, at, ref = text.rpartition("@")
    if not at or not place or "/" in ref or ":" in ref:
        return text, None
    return place, check_git_ref(ref)


def _of_address(address: str, ref: str | None) -> RepositoryReference:
    scheme = address.partition("://")[0]
    if scheme == "file" or scheme not in GIT_PROTOCOLS:
        return RepositoryReference(check_git_url(address), ref)
    check_git_url(address)
    parts = urlsplit(address)
    names = [name for name in parts.path.split("/") if name]
    where = names.index("tree") if "tree" in names else len(names)
    repository, rest = names[:where], names[where + 1 :]
    if not repository:
        raise ValueError(f"expected a repository ({FORMS}), got {address!r:.100}")
    if rest and ref is not None:
        raise ValueError(f"expected one ref, got both {ref!r} and {rest[0]!r}: leave `@{ref}` or `/tree/{rest[0]}` out")
    folder = check_inner_path("/".join(rest[1:])) if rest[1:] else None
    url = f"{scheme}://{parts.netloc}/{'/'.join(repository)}"
    return RepositoryReference(check_git_url(url), check_git_ref(rest[0]) if rest else ref, folder)
