"""The runs below a folder, read again when their files have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from ares_exp.control.status import read_status
from ares_exp.errors import ConfigError
from ares_exp.pages.page import json_text
from ares_exp.pages.run_payload import ShownRun
from ares_exp.records.run_dir import RunDir
from ares_exp.trajectories.episode_places import RUN_FILES, RUN_FOLDERS, is_run, runs_below
from ares_exp.trajectories.stored_episodes import HeaderCache

MAX_DEPTH = 5
MAX_RUNS = 2_000
KEPT_TEXTS = 64

Signature = tuple[tuple[str, int, int], ...]


class Shelf:
    """The runs at a path. Safe for several threads."""

    def __init__(self, path: Path) -> None:
        """Keeps the path.

        Args:
            path: A run directory, or a folder with runs below it.

        Raises:
            ConfigError: It is no folder.
        """
        if not path.is_dir():
            raise ConfigError(f"Expected a run directory or a folder of runs, got {path}.")
        self.path = path
        self._runs: dict[str, ShelvedRun] = {}
        self._lock = threading.Lock()

    def keys(self) -> list[str]:
        """Returns the runs' keys: their paths from the folder."""
        with self._lock:
            found = list(self._found())
            self._runs = {key: self._runs.get(key) or ShelvedRun(key, path) for key, path in found}
            return list(self._runs)

    def run(self, key: str) -> ShelvedRun:
        """Returns a run.

        Raises:
            KeyError: There is none of that key.
        """
        if key not in self._runs:
            self.keys()
        return self._runs[key]

    def listed(self) -> list[dict[str, Any]]:
        """Returns a line for each run."""
        return [self._runs[key].line() for key in self.keys()]

    def _found(self) -> Iterator[tuple[str, Path]]:
        if is_run(self.path):
            yield str(self.path), self.path
            return
        for _, path in zip(range(MAX_RUNS), runs_below(self.path, MAX_DEPTH), strict=False):
            yield str(path.relative_to(self.path)), path


class ShelvedRun:
    """One run; what was read of it is kept until its files change."""

    def __init__(self, key: str, path: Path) -> None:
        self.key = key
        self.path = path
        self._headers = HeaderCache()
        self._lock = threading.Lock()
        self._signature: Signature | None = None
        self._shown: ShownRun | None = None
        self._texts: dict[str, tuple[str, str]] = {}
        self._line: dict[str, Any] = {}
        self._line_of: Signature | None = None

    def line(self) -> dict[str, Any]:
        """Returns what a list of runs tells; of one that cannot be read why."""
        with self._lock:
            signature = _signature(self.path, steps=False)
            if signature != self._line_of:
                self._line, self._line_of = self._summary(), signature
            return {"key": self.key, "name": self.key, "summary": self._line}

    def _summary(self) -> dict[str, Any]:
        try:
            shown = ShownRun(self.path)
            totals, state = shown.summary.to_dict(), shown.state
        except (ConfigError, OSError) as error:
            return {"state": f"unreadable: {error}"}
        told = {name: totals[name] for name in ("planned", "finished", "mean_reward", "cost", "wall_sec")}
        return {**told, "state": state.name, "began": state.began}

    def text(self) -> tuple[str, str]:
        """Returns the payload as JSON, and a tag of it."""

        def make(shown: ShownRun) -> Mapping[str, Any]:
            return {**shown.payload(name=self.key), "key": self.key, "status": _status(shown)}

        return self._made("", make)

    def episode_text(self, episode_id: str) -> tuple[str, str]:
        """Returns the payload of an episode, and a tag of it.

        Raises:
            KeyError: It has no trajectory.
            TrajectoryFormatError: It cannot be read.
        """
        return self._made(f"e{episode_id}", lambda shown: shown.episode(episode_id))

    def _made(self, name: str, make: Callable[[ShownRun], Mapping[str, Any]]) -> tuple[str, str]:
        with self._lock:
            signature = _signature(self.path, steps=True)
            if signature != self._signature or self._shown is None:
                self._shown = ShownRun(self.path, headers=self._headers)
                self._signature, self._texts = signature, {}
            if name not in self._texts:
                if len(self._texts) >= KEPT_TEXTS:
                    self._texts.clear()
                text = json_text(make(self._shown))
                self._texts[name] = text, sha256(text.encode()).hexdigest()[:32]
            return self._texts[name]


def _status(shown: ShownRun) -> dict[str, Any] | None:
    """Returns the state that a run under way told last."""
    status = read_status(shown.dir.status) if shown.state.name == "under way" else None
    return asdict(status) if status is not None else None


def _signature(path: Path, *, steps: bool) -> Signature:
    """Returns sizes and times of the files that a run writes; with `steps` also those of each trajectory."""
    run = RunDir(path)
    files = [run.episodes, run.sessions, run.summary, run.results, run.log, run.config, run.status]
    files += [path / name for name in (*RUN_FILES, *RUN_FOLDERS)]
    if steps and run.trajectories.is_dir():
        with os.scandir(run.trajectories) as entries:
            files += [Path(entry.path) for entry in entries]
    is_written = int(is_run(path) and ShownRun(path).is_written)  # a killed run writes nothing any more
    return (("", is_written, 0), *sorted(filter(None, map(_stamp, files))))


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return path.name, found.st_mtime_ns, found.st_size
