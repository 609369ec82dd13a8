"""The file in a sweep's folder that makes its jobs end. A user may create it with `touch`."""

from __future__ import annotations

from pathlib import Path

STOP = "stop"


def is_stopped(sweep_dir: Path) -> bool:
    """Whether the sweep is to end. Blocking."""
    return (sweep_dir / STOP).exists()


def stop(sweep_dir: Path) -> None:
    """Has the sweep end: as Ctrl-C once, in each of its jobs."""
    (sweep_dir / STOP).touch()
