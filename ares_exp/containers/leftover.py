"""A thing that a run made outside this process and that outlives the run unless it is removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """A thing made by a run, of this process or of another.

    Attributes:
        kind: `container`, `network`, `volume`, `image`, `directory`, `cgroup`,
            `sandbox`, `snapshot`, `cache`.
        name: Its name on the engine, at the service or in the file system.
        whose: The owner, for humans.
        is_stale: Whether the owner is certainly dead. Other things must not be touched.
        created: Creation time, seconds since the epoch; `None` if unknown.
        remove: Removes it and returns why it is still there, `""` when it is gone. Blocking; never raises.
        size: Bytes that it takes, with what it shares with others; `None` if unknown.
    """

    kind: str
    name: str
    whose: str
    is_stale: bool
    created: float | None
    remove: Callable[[], str]
    size: int | None = None
