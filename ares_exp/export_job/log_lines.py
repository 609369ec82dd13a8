"""What a run's log says of its episodes: the lines that name one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ares_exp.run_dir import open_regular

MAX_LINE_BYTES = 64 * 2**10
MAX_LINES = 1_000
"""Of one episode: what comes after them is left out."""

_WORD = re.compile(rb"[A-Za-z0-9._-]+")


def lines_by_episode(log: Path, episode_ids: Collection[str]) -> Mapping[str, Sequence[str]]:
    """The lines that name each episode; empty where there is no log.

    Raises:
        OSError: The log cannot be read.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    wanted = {one.encode(errors="backslashreplace"): one for one in episode_ids}
    if log.is_symlink() or not log.is_file():
        return found
    with open_regular(log) as file:
        while line := file.readline(MAX_LINE_BYTES):
            for word in dict.fromkeys(_WORD.findall(line)):
                lines = found[wanted[word]] if (word := word.rstrip(b".")) in wanted else None
                if lines is not None and len(lines) < MAX_LINES:
                    lines.append(line.decode(errors="replace").rstrip("\n"))
    return found
