"""What a run records of a task to tell whether it has changed: the digest of its content, and of files beside it.

Without such files it is the digest, `sha256:…`; with them it is followed by a JSON object of theirs by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def with_files(content: str, texts: Mapping[str, str]) -> str:
    """What is recorded of a task.

    Args:
        content: The digest of its content.
        texts: Of files that are no part of it and change what its agent is told, by their names.
    """
    digests = {name: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() for name, text in texts.items()}
    return f"{content} {json.dumps(digests, sort_keys=True)}" if digests else content


def content_of(recorded: str | None) -> str | None:
    """The digest of the task's content in what was recorded."""
    return recorded.partition(" ")[0] if isinstance(recorded, str) else recorded


def changed_files(before: str | None, now: str | None) -> list[str]:
    """The names of files whose text is another one now; those of which only one of the two tells are left out."""
    old, new = _files(before), _files(now)
    return [name for name in old if name in new and old[name] != new[name]]


def _files(recorded: str | None) -> dict[str, str]:
    try:
        files = json.loads(str(recorded).partition(" ")[2] or "{}")
    except (ValueError, RecursionError):
        return {}
    return files if isinstance(files, dict) else {}
