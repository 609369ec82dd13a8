"""Names and ids of an exported job and its trials: like Harbor's, but made from the run's own, so always the same."""

from __future__ import annotations

import hashlib
import re
import uuid

ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
"""Of the end of a trial's name: digits and letters without those that look alike."""
MAX_TASK_CHARS = 32
DRAWN_CHARS = 7

_NAMESPACE = uuid.UUID("5b0a4c0e-7a0f-5d0c-9a51-5d9f3c1f6a0b")


def trial_name(task_name: str, episode_id: str) -> str:
    """`<task>__<7 characters>`: the beginning of the last part of the task's name, and a hash of the episode's id."""
    head = re.sub(r"[^A-Za-z0-9._-]", "-", task_name.split("/")[-1])
    number = int.from_bytes(hashlib.sha256(episode_id.encode(errors="backslashreplace")).digest()[:8], "big")
    drawn = ""
    for _ in range(DRAWN_CHARS):
        number, place = divmod(number, len(ALPHABET))
        drawn += ALPHABET[place]
    return f"{head[:MAX_TASK_CHARS].lstrip('.').rstrip('_-') or 'task'}__{drawn}"


def stable_id(*parts: str) -> str:
    """A UUID that the same parts always have."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(parts).encode(errors="backslashreplace").decode()))
