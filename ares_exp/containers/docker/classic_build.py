"""Builds with the engine's classic builder: no program besides the engine is needed.

A build that fails leaves what it had built so far as untagged images. They are the builder's cache, by which the next
try is faster; nothing tells them from other people's (labels stand on the last stage alone), so they stay until
`docker image prune`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.containers.docker.build_failure import LAST_LINES, build_failure

if TYPE_CHECKING:
    from docker import APIClient


def build_classic(api: APIClient, tag: str, context_dir: Path, labels: Mapping[str, str]) -> None:
    """Builds the image of `context_dir`. Blocking, and not to be interrupted: the engine goes on.

    Raises:
        ContainerStartError: With the failing instruction and the end of its output.
    """
    events = api.build(
        path=str(context_dir), tag=tag, rm=True, forcerm=True, decode=True, timeout=None, labels=dict(labels)
    )
    instruction, failure, last = "", "", collections.deque[str](maxlen=LAST_LINES)
    for line, error in _lines(events):  # to its end: an answer dropped in the middle leaks its socket
        failure = failure or error
        if re.match(r"Step \d+/\d+ : ", line):
            instruction = line.partition(" : ")[2]
            last.clear()
        elif line.strip() and not line.startswith((" --->", "Removing intermediate container")):
            last.append(line)
    if failure:
        raise build_failure(context_dir, failure, instruction, last)


def _lines(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(line of output, error) of a build, one of them empty."""
    for event in events:
        if "error" in event:
            yield "", str(event["error"])
        for line in str(event.get("stream", "")).splitlines():
            yield line, ""
