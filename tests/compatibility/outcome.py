"""The outcome of an episode or a reading, to compare with the expected outcome."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def as_json(value: Any) -> str:
    """The value as JSON has it, types of numbers included: 1 is not 1.0, nor true."""
    return json.dumps(value, sort_keys=True)


def matches(expected: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What of the outcome the expectation is about, in the expectation's form: equal to it if it is met."""
    return {name: _matching(name, wanted, outcome.get(name)) for name, wanted in expected.items()}


def _matching(name: str, wanted: Any, found: Any) -> Any:
    if name in ("message", "warnings", "asked"):
        return wanted if all(text in found for text in wanted) else found
    if name == "files":
        return {path: found.get(path) for path in wanted}
    return found


def files_below(folder: Path) -> dict[str, str]:
    """The text of every file, without blank space around it."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(errors="replace").strip()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def manifest(path: Path) -> list[tuple[str, ...]] | None:
    """What a manifest.json says: source, destination, type and status of each artifact."""
    if not path.exists():
        return None
    entries: Sequence[Mapping[str, str]] = json.loads(path.read_text())
    return [tuple(entry[key] for key in ("source", "destination", "type", "status")) for entry in entries]
