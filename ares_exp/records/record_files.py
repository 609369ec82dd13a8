"""Functions that safely read JSON and YAML files from untrusted sources, such as another user's run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError
from ares_exp.records.run_dir import open_regular

MAX_BYTES = 64 * 2**20
MAX_YAML_BYTES = 4 * 2**20
"""Maximum size of a YAML file, in bytes. The files that Hydra writes for a run have a few kilobytes."""
MAX_YAML_DEPTH = 100
MAX_ERROR_CHARS = 300


def read_record(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a regular file as bytes.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: The file is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise broken(path, f"at most {max_bytes:,} bytes", "a larger file")
    return data


def read_tail(path: Path, max_bytes: int) -> bytes:
    """Returns the last bytes of a regular file, at most `max_bytes`. Raises `OSError` if it cannot be read."""
    with open_regular(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - max_bytes, 0))
        return file.read(max_bytes)


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Reads a file that contains a JSON object.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: The file is too large, nested too deeply, not valid JSON, or not an object.
    """
    try:
        found = json.loads(read_record(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as error:
        raise broken(path, "JSON", f"invalid JSON ({error})") from error
    if not isinstance(found, dict):
        raise broken(path, "an object", f"a {type(found).__name__}")
    return found


def read_yaml(path: Path) -> Any:
    """Reads a YAML file.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ConfigError: The file is too large, nested too deeply, contains aliases, or is not valid YAML.
    """
    import yaml

    text = read_record(path, max_bytes=MAX_YAML_BYTES)
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    try:
        for event in yaml.parse(text, Loader=loader):  # checked first, because deep nesting crashes the C loader
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise broken(path, f"at most {MAX_YAML_DEPTH} levels and no aliases", "an alias or more levels")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise broken(path, "YAML", f"invalid YAML ({' '.join(str(error).split())[:MAX_ERROR_CHARS]})") from error


def broken(path: Path, expected: str, got: str) -> ConfigError:
    """Creates the error that reports a file with invalid content."""
    return ConfigError(f"{path} is broken: expected {expected}, got {got}.")
