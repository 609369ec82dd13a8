"""Names of the files that a patch touches, read from its headers. Patches are untrusted input."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')
_ESCAPES = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))


@dataclass(frozen=True, slots=True)
class PatchFiles:
    """Paths relative to the repository, each once, in order.

    Attributes:
        before: What it changes, renames or removes.
        after: What is there afterwards.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Everything that it touches."""
        return tuple(dict.fromkeys((*self.before, *self.after)))


def files_of_patch(patch: str) -> PatchFiles:
    """Returns the files that a patch of `git diff` touches.

    Raises:
        ValueError: A path is absolute, leads out of the repository, or has a line break.
    """
    before: dict[str, None] = {}
    after: dict[str, None] = {}
    for line in _headers(patch):
        for start, prefix, found in (
            ("--- ", "a/", before),
            ("+++ ", "b/", after),
            ("rename from ", "", before),
            ("rename to ", "", after),
        ):
            if not line.startswith(start):
                continue
            path = _unquoted(line.removeprefix(start).split("\t", 1)[0])
            if path != "/dev/null":
                found[_checked(path.removeprefix(prefix))] = None
    return PatchFiles(tuple(before), tuple(after))


def _headers(patch: str) -> Iterator[str]:
    """The lines outside of hunks. `--- a/x` in a hunk is a removed line."""
    old = new = 0
    for line in patch.split("\n"):
        if old > 0 or new > 0:
            old -= line[:1] in ("-", " ", "")
            new -= line[:1] in ("+", " ", "")
        elif match := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in match.groups())
        else:
            yield line.removesuffix("\r")


def _unquoted(path: str) -> str:
    """A path as it is: git writes unusual ones in quotes, bytes as octal numbers."""
    if not (len(path) > 1 and path.startswith('"') and path.endswith('"')):
        return path

    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF if len(code) == 3 else _ESCAPES[code[0]]])

    return _ESCAPE.sub(plain, path[1:-1].encode()).decode("utf-8", "surrogateescape")


def _checked(path: str) -> str:
    shortest = posixpath.normpath(path) if path else "."
    if shortest.startswith("/") or shortest.split("/")[0] in ("..", ".", ".git") or "\n" in path or "\0" in path:
        raise ValueError(f"expected paths that stay inside the repository, got {path!r:.200}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected paths in UTF-8, got {path!r:.200}") from None
    return path
