"""Snapshot ids. In a run, their form is `<episode_id>@<step>`."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from ares_exp.errors import SnapshotMetadataError
from ares_exp.records.validation import briefly

_ID = re.compile(r"[A-Za-z0-9_@+=,-][A-Za-z0-9_@+=,.-]{0,199}")
_OF_EPISODE = re.compile(r"(.+)@([0-9]{1,18})")
_RESERVED = ("objects",)


def check_id(snapshot_id: str, where: str | Path | None = None) -> str:
    """Returns `snapshot_id` after checking that it is a plain file name, safe in paths, on command lines and terminals.

    Raises:
        SnapshotMetadataError: `snapshot_id` is not such a name.
    """
    if is_id(snapshot_id):
        return snapshot_id
    raise SnapshotMetadataError(
        f"{f'{where}: ' if where else ''}expected the id of a snapshot to be a plain file name of at most 200 letters, "
        f"digits and any of _@+=,.- (not `objects`, and no dot first), got {briefly(snapshot_id)}."
    )


def is_id(text: object) -> bool:
    """Returns whether a value is a valid snapshot id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None and text not in _RESERVED


def new_id() -> str:
    """Returns a new id: the time, so that ids sort, and random digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def step_of(snapshot_id: str) -> tuple[str, int] | None:
    """Returns the episode and the step of an id; `None` if the id does not contain them."""
    found = _OF_EPISODE.fullmatch(snapshot_id)
    return (found[1], int(found[2])) if found else None
