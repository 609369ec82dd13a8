"""The keys of a config as they are written on the command line: `env.path`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def dotted_items(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, or an empty one, with its dotted key below `prefix`, in order."""
    if isinstance(config, Mapping) and config:
        for key, item in config.items():
            yield from dotted_items(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, config
