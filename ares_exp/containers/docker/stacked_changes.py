"""Changes on top of changes: what a container of a derived image has changed, told relative to the first image."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace

from ares_exp.filesystem.delta import Entry, link_number, sorted_by_path


def stacked(
    lower: Mapping[str, Entry], upper: Mapping[str, Entry], base_has: Callable[[str], bool]
) -> dict[str, Entry]:
    """The changes relative to the base of `lower`.

    Args:
        lower: Changes relative to a base.
        upper: Changes relative to the base with `lower`.
        base_has: Whether the base has something at a path. Asked only where `upper` removes what `lower` has. A
            whiteout of what the base has not must not be kept: in a directory that is new it would be seen as a device.
    """
    found = dict(lower)
    for path, entry in sorted_by_path(upper).items():
        old = found.get(path)
        if entry.kind == "directory" and not entry.opaque:
            # What a file or a whiteout has hidden of the base stays hidden when a directory takes its place.
            hides = old is not None and (old.opaque or old.kind != "directory")
            found[path] = replace(entry, opaque=hides)
            continue
        if old is not None and old.kind == "directory":
            _drop_below(found, path)
        if entry.kind != "whiteout" or (_is_seen(found, path) and (old is None or base_has(path))):
            found[path] = entry
        else:
            found.pop(path, None)
    return _linked_anew(sorted_by_path(found), upper)


def _drop_below(entries: dict[str, Entry], path: str) -> None:
    for below in [other for other in entries if other.startswith(f"{path}/")]:
        del entries[below]


def _is_seen(entries: Mapping[str, Entry], path: str) -> bool:
    """Whether something of the base could be seen at `path`: no directory above hides it."""
    while (path := posixpath.dirname(path)) != "/":
        above = entries.get(path)
        if above is not None and above.opaque:
            return False
    return True


def _linked_anew(entries: dict[str, Entry], upper: Mapping[str, Entry]) -> dict[str, Entry]:
    """One of a file's names may be a file of its own by now, or have new names: the overlay parts them."""
    files: dict[tuple[bool, int], list[str]] = {}
    for path, entry in entries.items():
        if entry.link is not None:
            files.setdefault((path in upper, entry.link), []).append(path)
    for paths in files.values():
        link = link_number(paths[0]) if len(paths) > 1 else None
        entries.update({path: replace(entries[path], link=link) for path in paths})
    return entries
