"""How much a task's compose file may ask for, unless the user trusts it: containers, memory, processes.

Like the dangers, it is looked at as it is written and again as the compose program has read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.containers.docker.compose.project_file import MAIN
from ares_exp.errors import TaskError, UnsupportedTaskError

_MIB = 2**20
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgtp]?)(?:i?b)?", re.IGNORECASE)
_MEMORY = ("mem_limit", "memswap_limit", "mem_reservation")
_MEMORY_LIMITS = ("mem_limit", "deploy.resources.limits.memory")
"""Of these 0 means none."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one file may ask for.

    Attributes:
        containers: Of all services together; so many networks, too.
        memory_mb: Memory of one container beside `main`.
        pids: Processes in one container.
    """

    containers: int
    memory_mb: int
    pids: int


def refuse_excess(path: Path, document: Mapping[str, Any], bounds: Bounds) -> None:
    """Refuses a compose file that asks for too much. What stands in variables is left for when they are filled in.

    Args:
        path: The task's file.
        document: What is in it.
        bounds: What is allowed.

    Raises:
        UnsupportedTaskError: With every key that asks for more.
        TaskError: Something in it has another form than in a compose file.
    """
    try:
        found = list(_excesses(document, bounds))
    except (AttributeError, TypeError, ValueError) as error:
        raise TaskError(f"{path}: expected a compose file, and something in it has another form: {error}.") from error
    if found:
        raise UnsupportedTaskError(
            f"{path}: it asks for more than is allowed here: {'; '.join(found)}. Allow more with the option that is "
            "named, leave the task out, or, where you trust it as you trust a program that you run, set "
            "container.compose_trusted=true."
        )


def _excesses(document: Mapping[str, Any], bounds: Bounds) -> Iterator[str]:
    services = {
        str(name): service or {}
        for name, service in document["services"].items()
        if not (service or {}).get("profiles")  # none is asked for
    }
    counts = {MAIN: 1.0, **{name: _count(service) for name, service in services.items()}}
    option = f"at most {bounds.containers}: container.compose_max_containers"
    if sum(counts.values()) > bounds.containers:
        most = max(counts, key=lambda name: counts[name])
        times = f", services.{most} alone {counts[most]:g}" if counts[most] > 1 else ""
        yield f"{sum(counts.values()):g} containers in all{times} ({option})"
    if len(document.get("networks") or {}) > bounds.containers:
        yield f"{len(document['networks'])} networks ({option})"
    for name, service in services.items():
        for key, value in _processes(service):
            if not _is_left_for_later(value) and not 1 <= _size(value) <= bounds.pids:
                yield f"services.{name}.{key} ({value!r:.50}, from 1 to {bounds.pids}: container.pids_limit)"
        for key, value in _memory(service) if name != MAIN else ():
            is_none = key in _MEMORY_LIMITS and _size(value) == 0
            if not _is_left_for_later(value) and (is_none or not _size(value) <= bounds.memory_mb * _MIB):
                told = f"{value!r:.50}, which is no limit" if is_none else f"{value!r:.50}"
                allowed = f"at most {bounds.memory_mb} MiB: container.compose_max_memory_mb"
                yield f"services.{name}.{key} ({told}, {allowed})"


def _count(service: Mapping[str, Any]) -> float:
    said = [
        value for value in (service.get("scale"), (service.get("deploy") or {}).get("replicas")) if value is not None
    ]
    return max((1 if _is_left_for_later(value) else _size(value) for value in said), default=1)


def _processes(service: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "pids_limit", service.get("pids_limit")
    yield "deploy.resources.limits.pids", _resources(service, "limits").get("pids")


def _memory(service: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((key, service.get(key)) for key in _MEMORY)
    for kind in ("limits", "reservations"):
        yield f"deploy.resources.{kind}.memory", _resources(service, kind).get("memory")


def _resources(service: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = ((service.get("deploy") or {}).get("resources") or {}).get(kind) or {}
    return found


def _is_left_for_later(value: object) -> bool:
    """Whether it is not said, or stands in a variable."""
    return value is None or "$" in str(value)


def _size(value: object) -> float:
    """A number, or a size such as `1.5g` in bytes; endless where it is neither, as -1 is in compose files."""
    match = _SIZE.fullmatch(str(value).strip())
    return float(match[1]) * 1024.0 ** " kmgtp".index(match[2].lower() or " ") if match else float("inf")
