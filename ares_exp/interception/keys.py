"""The keys of episodes at the endpoint: random, and of a form that is masked wherever something is written."""

from __future__ import annotations

import hmac
import secrets

from ares_exp.records.secrets import EPISODE_KEY_PREFIX


def new_key() -> str:
    """Makes the key of one episode."""
    return f"{EPISODE_KEY_PREFIX}{secrets.token_hex(24)}"


def is_key(given: str | None, key: str) -> bool:
    """Whether `given` is the key, in a time that says nothing about it."""
    return hmac.compare_digest((given or "").encode(errors="replace"), key.encode())
