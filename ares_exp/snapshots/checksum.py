"""The checksum in a snapshot.json: it tells a document that was changed or damaged from the one that was written.

`"checksum": "sha256:…"` is of the document as JSON text of ASCII characters with sorted keys and without blanks, itself
and `snapshot_dir` (the place of a copy's objects) left out. It is against damage and against changes by hand, not
against forgery: who writes a document can write its checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ares_exp.errors import SnapshotCorruptError, SnapshotMetadataError
from ares_exp.records.validation import briefly

CHECKSUM = "checksum"
FIRST_SCHEMA = (1, 1)
"""The schema version from which on a document has one."""
_NOT_INCLUDED = (CHECKSUM, "snapshot_dir")


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns `sha256:…` of the canonical JSON text of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document with the checksum of what it says; one of an earlier schema as it is."""
    if not _has_one(data):
        return dict(data)
    return {**data, CHECKSUM: _checksum_of(data)}


def check_checksum(data: Mapping[str, Any], where: str) -> None:
    """Checks that a document says what its checksum is of. One of an earlier schema may have none.

    Raises:
        SnapshotCorruptError: It says something else.
        SnapshotMetadataError: It has none, or none of this form.
    """
    if CHECKSUM not in data and not _has_one(data):
        return
    found = data.get(CHECKSUM)
    if not isinstance(found, str) or not found.startswith("sha256:"):
        raise SnapshotMetadataError(f"{where}: expected `{CHECKSUM}` to be sha256:…, got {briefly(found)}.")
    if found != _checksum_of(data):
        raise SnapshotCorruptError(
            f"{where}: its content is not the one of its `{CHECKSUM}`: it was changed or damaged after it was written. "
            "Use another snapshot, or an undamaged copy of this one."
        )


def _has_one(data: Mapping[str, Any]) -> bool:
    return tuple(data["schema"]) >= FIRST_SCHEMA


def _checksum_of(data: Mapping[str, Any]) -> str:
    return digest_of({name: value for name, value in data.items() if name not in _NOT_INCLUDED})
