"""Functions that mask secrets in files from a container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ares_exp.cancellation import finish, in_thread
from ares_exp.records.secrets import EPISODE_KEY_PREFIX, MASK, mask_episode_keys

MAX_REDACTED_BYTES = 64 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


@asynccontextmanager
async def redacted(folder: Path, secrets: Sequence[str]) -> AsyncIterator[None]:
    """Masks `secrets` in `folder` after the `async with` block has copied files into it, even if the block fails."""
    try:
        yield
    except BaseException:
        await finish(asyncio.to_thread(redact, folder, secrets))
        raise
    await in_thread(lambda: redact(folder, secrets))


def redact(folder: Path, secrets: Sequence[str]) -> None:
    """Masks `secrets` and API keys in all files in `folder` and its subdirectories. Blocking.

    The API keys are the keys that ares_exp generates for the requests of each episode's agent. A file that contains a
    secret or a key, but is larger than `MAX_REDACTED_BYTES`, is deleted.
    """
    words = [secret.encode(errors="surrogateescape") for secret in secrets]
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file() or not _holds_any(path, [EPISODE_KEY_PREFIX.encode(), *words]):
            continue
        if path.stat().st_size > MAX_REDACTED_BYTES:
            path.unlink()
            continue
        data = mask_episode_keys(path.read_bytes())
        for word in words:
            data = data.replace(word, MASK.encode())
        path.write_bytes(data)


def _holds_any(path: Path, words: Sequence[bytes]) -> bool:
    overlap = max(map(len, words)) - 1
    seen = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            seen = seen[-overlap:] + chunk
            if any(word in seen for word in words):
                return True
    return False
