"""Schema versions of snapshot.json, and upgrades of older ones.

A version is `[major, minor]`. A minor one only adds fields: an older reader keeps what it does not know as it is,
unless the writer has named it in `must_understand`. A new major version comes with a function here that makes of the
previous version's JSON this one's.

- [1, 0]: see `EnvironmentSnapshot`.
- [1, 1]: `checksum` (see the module of that name).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ares_exp.errors import SnapshotMetadataError, SnapshotVersionError
from ares_exp.records.validation import briefly

SCHEMA = (1, 1)

Upgrade = Callable[[Mapping[str, Any]], Mapping[str, Any]]
UPGRADES: Mapping[int, Upgrade] = {}
"""By major version: what makes of its JSON that of the next, `schema` included."""


def upgrade(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns `data` as the current major version has it.

    Raises:
        SnapshotVersionError: A later version than this one has written it.
        SnapshotMetadataError: It does not say in which version it was written.
    """
    major = schema_of(data, where)[0]
    if major > SCHEMA[0]:
        raise SnapshotVersionError(
            f"{where}: expected schema {SCHEMA[0]}.x or older, got {major}.x: a later version of ares_exp wrote this "
            "snapshot. Update ares_exp to read it."
        )
    for version in range(major, SCHEMA[0]):
        data = UPGRADES[version](data)
    return data


def schema_of(data: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Returns the version that `data` says it was written in."""
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if isinstance(schema, list | tuple) and len(schema) == 2 and all(type(part) is int for part in schema):
        major, minor = schema
        if 1 <= major < 2**31 and 0 <= minor < 2**31:
            return major, minor
    raise SnapshotMetadataError(
        f"{where}: expected `schema` to be two numbers, such as {list(SCHEMA)}, got {briefly(schema)}."
    )
