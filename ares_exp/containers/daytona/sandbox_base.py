"""The base of a sandbox's changed files: the name of its source, as a `Delta.base`.

For an image it is the name, as the service does not report its current digest; for a Dockerfile, the digest of its text
and of the files that it copies, by which the service also recognises a built image.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from ares_exp.containers.images.image_plan import ImagePlan
from ares_exp.errors import ContainerStartError, SnapshotMismatchError

KEPT_PREFIX = "ares-exp-kept-"
"""Name prefix of our snapshots at the service."""

_PREFIX = "daytona:"
_KEPT = f"{_PREFIX}kept="
_MAX_NAME = 400
_KEPT_NAME = re.compile(rf"{KEPT_PREFIX}[a-z0-9-]{{1,100}}")
_REMEDY = "Restore it with the task, and the container.* options, that it was made with."


def sandbox_base(plan: ImagePlan) -> str:
    """Returns the base of a sandbox made by `plan`. Blocking: reads the files of its build context.

    Raises:
        ContainerStartError: They cannot be read.
    """
    if plan.snapshot is not None:
        return f"{_PREFIX}snapshot={_named(plan.snapshot)}"
    if plan.image is not None:
        return f"{_PREFIX}image={_named(plan.image)}"
    digest = hashlib.sha256((plan.dockerfile or "").encode())
    try:
        for part in _contents(plan.context) if plan.context is not None else ():
            digest.update(hashlib.sha256(part).digest())
    except OSError as error:
        raise ContainerStartError(f"The build context {plan.context} could not be read: {error}.") from error
    return f"{_PREFIX}dockerfile={digest.hexdigest()}"


def kept_base(name: str) -> str:
    """Returns the base of a sandbox made from the service's snapshot `name` of another sandbox."""
    return f"{_KEPT}{name}"


def kept_name(base: str) -> str | None:
    """Returns the name given to `kept_base`; `None` for another base.

    Raises:
        SnapshotMismatchError: It is not a name that this package gives.
    """
    if not base.startswith(_KEPT):
        return None
    name = base.removeprefix(_KEPT)
    if not _KEPT_NAME.fullmatch(name):
        raise SnapshotMismatchError(f"Expected the name of a snapshot that Daytona keeps, found {base!r}.")
    return name


def require_base(recorded: str, ours: str) -> None:
    """Checks that changes match the base of a sandbox.

    Raises:
        SnapshotMismatchError: They belong to another base.
    """
    if recorded == ours:
        return
    if not recorded.startswith(_PREFIX):
        raise SnapshotMismatchError(
            f"The snapshot's files are relative to {recorded}, from which Daytona makes no sandbox (here: {ours}): "
            "they were captured on another backend. Restore it there."
        )
    raise SnapshotMismatchError(
        f"The snapshot's files are relative to {_words(recorded)} ({recorded}), and the sandbox would be made from "
        f"{_words(ours)} ({ours}). {_REMEDY}"
    )


def _named(name: str) -> str:
    text = quote(name, safe="/:@._-+")
    return text if len(text) <= _MAX_NAME else f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"


def _words(base: str) -> str:
    kind, _, name = base.removeprefix(_PREFIX).partition("=")
    if kind == "dockerfile":
        return "a Dockerfile with its build context"
    return f"the {'snapshot' if kind in ('snapshot', 'kept') else kind} {unquote(name)}"


def _contents(directory: Path) -> Iterator[bytes]:
    """Yields what the builder sees of a directory: names, modes, contents."""
    for root, directories, files in os.walk(directory):
        directories.sort()
        for name in sorted((*directories, *files)):
            path = Path(root, name)
            found = path.lstat()
            yield os.fsencode(path.relative_to(directory))
            yield f"{stat.S_IFMT(found.st_mode):o} {stat.S_IMODE(found.st_mode):o}".encode()
            if stat.S_ISLNK(found.st_mode):
                yield os.fsencode(path.readlink())
            elif stat.S_ISREG(found.st_mode):
                yield path.read_bytes()
