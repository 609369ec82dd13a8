"""The schema version of snapshot.json, `[major, minor]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ares_exp.errors import SnapshotMetadataError, SnapshotVersionError
from ares_exp.records.validation import briefly

SCHEMA = (1, 1)


def check_schema(data: Mapping[str, Any], where: str) -> None:
    """Checks that a document has the current schema version.

    Raises:
        SnapshotVersionError: The document has another version.
        SnapshotMetadataError: The document has no version.
    """
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(schema, list | tuple) or len(schema) != 2 or not all(_is_number(part) for part in schema):
        raise SnapshotMetadataError(
            f"{where}: expected `schema` to be two numbers, such as {list(SCHEMA)}, got {briefly(schema)}."
        )
    if tuple(schema) != SCHEMA:
        raise SnapshotVersionError(
            f"{where}: expected schema {SCHEMA[0]}.{SCHEMA[1]}, got {schema[0]}.{schema[1]}. Use the version of "
            "ares_exp that wrote this snapshot."
        )


def _is_number(part: object) -> bool:
    return type(part) is int and 0 <= part < 2**31
