"""What an image is built from, as one short name: the same content has the same."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path


def image_tag(name: str, context_dir: Path) -> str:
    """`ares-exp/<name>:<hash>` for the content of a build context: names, modes, links and bytes. Blocking.

    What the context's `.dockerignore` excludes does not count. (Of the ways to exclude, `.dockerignore` is the only one
    that is known here; BuildKit's `Dockerfile.dockerignore` is not.)
    """
    from docker.utils.build import exclude_paths

    digest = hashlib.sha256(b"ares_exp image 2\n")
    for relative in sorted(exclude_paths(str(context_dir), _ignored(context_dir / ".dockerignore"))):
        path = context_dir / relative
        mode = path.lstat().st_mode
        digest.update(f"{relative}\0{mode:o}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(mode):
            digest.update(os.fsencode(path.readlink()) + b"\0")
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "task"
    return f"ares-exp/{slug}:{digest.hexdigest()[:12]}"


def _ignored(path: Path) -> list[str]:
    """The patterns of a `.dockerignore`, read as docker-py reads them when it sends the context."""
    if not path.is_file():
        return []
    lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
