"""One thing that a run made and that outlives it unless somebody removes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """Something of a run, of ours or of another process.

    Attributes:
        kind: `container`, `network`, `volume`, `image`, `build lock`, `box directory`, `directory`, `cgroup`,
            `sandbox`, `snapshot`.
        name: What the engine, the service or the file system calls it.
        whose: The owner, for humans.
        is_stale: Whether the owner is certainly dead. Anything else is not ours to touch.
        created: When it was made, seconds since the epoch; `None` when that is not known.
        remove: Removes it and returns why it is still there, `""` when it is gone. Blocking; raises nothing.
    """

    kind: str
    name: str
    whose: str
    is_stale: bool
    created: float | None
    remove: Callable[[], str]
