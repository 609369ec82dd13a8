"""The record of a task in a run: the digests of its content, and of files beside it, which tell whether it has changed.

Without such files it is the digest, `sha256:…`; with them it is followed by a JSON object of theirs by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def with_files(content: str, texts: Mapping[str, str]) -> str:
    """Joins the digests of a task and of its further files.

    Args:
        content: The digest of its content.
        texts: Texts of further files that change the agent's instruction, by their names.
    """
    digests = {name: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() for name, text in texts.items()}
    return f"{content} {json.dumps(digests, sort_keys=True)}" if digests else content


def content_of(recorded: str | None) -> str | None:
    """Returns the digest of the task's content from a record."""
    return recorded.partition(" ")[0] if isinstance(recorded, str) else recorded


def changed_files(before: str | None, now: str | None) -> list[str]:
    """Lists the files whose text has changed; a file that only one of the two records has is left out."""
    old, new = _files(before), _files(now)
    return [name for name in old if name in new and old[name] != new[name]]


def _files(recorded: str | None) -> dict[str, str]:
    try:
        files = json.loads(str(recorded).partition(" ")[2] or "{}")
    except (ValueError, RecursionError):
        return {}
    return files if isinstance(files, dict) else {}
