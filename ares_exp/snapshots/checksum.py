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
_NOT_INCLUDED = (CHECKSUM, "snapshot_dir")


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns `sha256:…` of the canonical JSON text of `content`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def with_checksum(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a document with the checksum of its content."""
    return {**data, CHECKSUM: _checksum_of(data)}


def check_checksum(data: Mapping[str, Any], where: str) -> None:
    """Checks that the content of a document matches its checksum.

    Raises:
        SnapshotCorruptError: It says something else.
        SnapshotMetadataError: It has none, or none of this form.
    """
    found = data.get(CHECKSUM)
    if not isinstance(found, str) or not found.startswith("sha256:"):
        raise SnapshotMetadataError(f"{where}: expected `{CHECKSUM}` to be sha256:…, got {briefly(found)}.")
    if found != _checksum_of(data):
        raise SnapshotCorruptError(
            f"{where}: its content is not the one of its `{CHECKSUM}`: it was changed or damaged after it was written. "
            "Use another snapshot, or an undamaged copy of this one."
        )


def _checksum_of(data: Mapping[str, Any]) -> str:
    return digest_of({name: value for name, value in data.items() if name not in _NOT_INCLUDED})
