"""The payload of an episode, which is the JSON data that its page shows: steps, messages, commands, times and files.

A step contains only the differences between its request and an earlier request, and each message is stored once.
Strings are not shortened, because the page does this. Times are seconds since the episode started.

The files are the verifier's files, other files, and changes between snapshots. The run directory is untrusted.
Therefore, links are not followed, and pipes and devices are not opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Any

from ares_exp.containers.filesystem.delta import Delta, Entry
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import SnapshotError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, RunDir, open_beneath, open_regular
from ares_exp.snapshots.snapshot import step_of
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.trajectories.divergence import step_marks
from ares_exp.trajectories.episode_printer import (
    as_text,
    asked_in,
    is_text,
    is_thinking,
    message_text,
    piece_text,
)
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, command_to_dict, conversation_of
from ares_exp.trajectories.request_diff import is_request, request_change

NOT_SHOWN = ("origin", "metadata")
"""Fields of a request that the payload omits, because they are not settings of the model."""
TOLD_OF_REPLIES = ("finish_reason", "model", "policy_version", "cost", "latency_sec")


def episode_payload(
    trajectory: EpisodeTrajectory,
    *,
    is_running: bool = False,
    files: Sequence[Mapping[str, Any]] = (),
    changes: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Creates the payload of an episode. `files` is the result of `episode_files`, and `changes` of `file_changes`."""
    steps = _Steps(trajectory)
    unfinished = trajectory.unfinished_step
    return {
        "id": trajectory.episode_id,
        "task": trajectory.task_name,
        "outcome": None if is_running else trajectory.outcome.value,
        "reward": trajectory.total_reward,
        "rewards": trajectory.rewards,
        "error": trajectory.error.to_dict() if trajectory.error is not None and not is_running else None,
        "started": trajectory.start_time,
        "seconds": trajectory.end_time - trajectory.start_time,
        "metadata": {key: as_text(value) for key, value in trajectory.metadata.items()},
        "steps": [steps.shown(position) for position in range(len(trajectory.steps))],
        "unfinished": None if unfinished is None else steps.done(unfinished),
        "messages": steps.messages,
        "marks": step_marks(trajectory),
        "files": list(files),
        "changes": {str(step): told for step, told in (changes or {}).items()},
    }


class _Steps:
    """Creates the payloads of steps. Steps refer to messages by index in the list `messages`."""

    def __init__(self, trajectory: EpisodeTrajectory) -> None:
        self._trajectory = trajectory
        self.messages: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}

    def shown(self, position: int) -> dict[str, Any]:
        step = self._trajectory.steps[position]
        data = self.done(step)
        observation = step.observation
        if is_request(observation):
            data |= self._request(position)
            if (conversation := conversation_of(observation or {})) not in (MAIN_CONVERSATION, ""):
                data["conversation"] = conversation
        elif observation is not None:
            data["observation"] = as_text(observation, indent=2)
        return data

    def done(self, step: StepRecord) -> dict[str, Any]:
        """Returns the data of a step except for its request: rewards, times, the policy's response, and commands."""
        numbers = {
            "reward": step.reward,
            "discount": step.discount,
            "policy_sec": step.policy_sec,
            "environment_sec": step.environment_sec,
            "container_sec": step.container_sec,
        }
        data: dict[str, Any] = {
            "index": step.step_index,
            "type": step.step_type,
            "at": round(step.timestamp - self._trajectory.start_time, 3),
            **{name: value for name, value in numbers.items() if value is not None},
        }
        if step.action is not None:
            data["reply"] = _reply(step.action)
        if step.commands:
            data["commands"] = [command_to_dict(command) for command in step.commands]
        if step.background_requests:
            data["background_requests"] = [
                {"conversation": conversation_of(one.request), "asked": asked_in(one), "reply": _reply(one.response)}
                for one in step.background_requests
            ]
        return data

    def _request(self, position: int) -> dict[str, Any]:
        steps = self._trajectory.steps
        change, action = request_change(steps, position), steps[position].action or {}
        pieces = action.get("data", ())
        reply = "".join(piece_text(piece) for piece in pieces if is_text(piece)) if isinstance(pieces, tuple) else ""
        data: dict[str, Any] = {"edits": [self._edit(sign, message, reply) for sign, message in change.edits]}
        if change.kept:
            data["kept"] = change.kept
        if change.base is not None and not change.is_previous:
            data["base"] = change.base
        settings = [one for one in change.settings if one[0] not in NOT_SHOWN and any(one[1:])]
        if settings:
            data["settings"] = [
                [name, *(None if value is None else as_text(value) for value in values)] for name, *values in settings
            ]
        return data

    def _edit(self, sign: str, message: Mapping[str, Any], reply: str) -> list[Any]:
        is_reply = (
            sign == "+" and bool(reply) and message.get("role") == "assistant" and message.get("content") == reply
        )
        return ["=" if is_reply else sign, self._number(message)]

    def _number(self, message: Mapping[str, Any]) -> int:
        number = self._numbers.setdefault(id(message), len(self.messages))
        if number == len(self.messages):
            self.messages.append({"role": str(message.get("role")), "text": message_text(message)})
        return number


def _reply(action: Mapping[str, Any]) -> dict[str, Any]:
    usage, pieces = action.get("usage"), action.get("data")
    told: dict[str, Any] = {name: action[name] for name in TOLD_OF_REPLIES if action.get(name) is not None}
    told["usage"] = dict(usage) if isinstance(usage, Mapping) else {}
    told["pieces"] = [_piece(piece) for piece in pieces] if isinstance(pieces, tuple) else [_piece(action)]
    return told


def _piece(piece: Any) -> dict[str, Any]:
    if is_text(piece):
        return {"kind": "text", "text": piece_text(piece)}
    if is_thinking(piece):
        return {"kind": "reasoning", "text": piece_text(piece)}
    if isinstance(piece, Mapping) and piece.keys() == {"id", "name", "arguments"}:
        return {"kind": "call", "name": as_text(piece["name"]), "text": as_text(piece["arguments"], indent=2)}
    return {"kind": "data", "text": as_text(piece, indent=2)}


HEAD_BYTES, TAIL_BYTES = 96 * 2**10, 32 * 2**10
MAX_BYTES = 2**20
"""Maximum number of characters of all file texts of an episode. Beyond it, files are listed without text."""
MAX_FILES = 200
SHOWN_FOLDERS = ("verifier",)
SHOWN_NAMES = ("manifest.json",)


def episode_files(run_dir: Path, episode_id: str) -> list[dict[str, Any]]:
    """Lists the files of an episode, with the text of the verifier's files and of `manifest.json`.

    Returns:
        A mapping per file with `name`, `size` and, if its content is shown, `text`. If the middle of a long text is
        omitted, `left_out` is the number of omitted bytes.
    """
    if episode_id in ("", ".", "..") or "/" in episode_id or "\0" in episode_id:
        return []
    found: list[dict[str, Any]] = []
    left = MAX_BYTES
    try:
        root = os.open(RunDir(run_dir).files, DIRECTORY_FLAGS)
    except OSError:
        return []
    try:
        for name, folder, file in _files(root, episode_id):
            *folders, last = name.split("/")
            is_shown = last in SHOWN_NAMES or any(one in SHOWN_FOLDERS for one in folders)
            told = _read(folder, file, left) if is_shown else _size(folder, file)
            if told is not None:
                left -= len(told.get("text", ""))
                found.append({"name": name, **told})
            if len(found) == MAX_FILES:
                break
    finally:
        os.close(root)
    return sorted(found, key=lambda one: ("text" not in one, "verifier" not in one["name"], one["name"]))


def _files(root: int, episode_id: str) -> Iterator[tuple[str, int, str]]:
    """Yields each file of an episode: its path in the episode's folder, a descriptor of its parent folder, its name."""
    try:
        with open_beneath(root, f"/{episode_id}") as folder:
            for path, folders, names, inner in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
                folders.sort()
                for name in sorted(names):
                    yield os.path.normpath(f"{path}/{name}"), inner, name
    except (OSError, UnicodeEncodeError):  # a lone surrogate cannot be part of a path
        return


def _size(folder: int, name: str) -> dict[str, Any] | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return {"size": found.st_size} if stat.S_ISREG(found.st_mode) else None


def _read(folder: int, name: str, left: int) -> dict[str, Any] | None:
    try:
        opened = open_regular(name, flags=os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return None
    with opened as file:
        found = os.fstat(file.fileno())
        if left <= 0:
            return {"size": found.st_size}
        data = file.read(HEAD_BYTES + TAIL_BYTES + 1)
        if len(data) <= HEAD_BYTES + TAIL_BYTES:
            return {"size": found.st_size, "text": _text(data)}
        file.seek(max(found.st_size - TAIL_BYTES, HEAD_BYTES))
        tail = file.read(TAIL_BYTES)
    left_out = max(found.st_size - HEAD_BYTES - len(tail), 0)
    text = f"{_text(data[:HEAD_BYTES])}\n[… {left_out:,} bytes …]\n{_text(tail)}"
    return {"size": found.st_size, "text": text, "left_out": left_out}


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


MAX_SNAPSHOTS = 300
MAX_PATHS = 100
"""Maximum number of changed paths that are listed per step. The others are only counted."""
MAX_TEXT_BYTES = 64 * 2**10
MAX_DIFF_LINES = 200
MAX_DIFFS = 400
"""Maximum number of diffs that are computed per episode."""


def file_changes(run_dir: Path, episode_id: str) -> dict[int, dict[str, Any]]:
    """Finds the files in the container that changed between the snapshots of an episode.

    Each snapshot is compared with the previous one. The first is compared with the container's initial files.

    Returns:
        A dictionary from step to changes. `paths` lists the changed paths, each with `path`, `change` (see `_change`),
        `kind`, `size` and, for text files, `diff`. `more` is the number of omitted paths, and `since` is the step of
        the previous snapshot. For an unreadable snapshot, the only key is `problem`, an error message.
    """
    store = SnapshotStore(RunDir(run_dir).snapshots)
    try:
        steps = {name: step_of(name) for name in store.ids()}
    except SnapshotError:
        return {}
    found = {place[1]: name for name, place in steps.items() if place is not None and place[0] == episode_id}
    told: dict[int, dict[str, Any]] = {}
    before, since, diffs = Delta("", {}), None, _Diffs(store.objects)
    for step in sorted(found)[:MAX_SNAPSHOTS]:
        try:
            now = get_delta(store.objects, store.get(found[step]).filesystem)
        except SnapshotError as error:
            told[step] = {"problem": str(error)}
            continue
        told[step] = {"since": since, **_changes(before.entries, now.entries, diffs)}
        before, since = now, step
    return told


def _changes(before: Mapping[str, Entry], now: Mapping[str, Entry], diffs: _Diffs) -> dict[str, Any]:
    paths = sorted(path for path in {*before, *now} if _change(before.get(path), now.get(path)) is not None)
    shown = [_told(path, before.get(path), now.get(path), diffs) for path in paths[:MAX_PATHS]]
    return {"paths": shown, "more": max(len(paths) - MAX_PATHS, 0)}


def _change(old: Entry | None, new: Entry | None) -> str | None:
    """Returns `added`, `changed`, `removed` or `permissions`; `None` if nothing or only a time changed."""
    if new is None or new.kind == "whiteout":
        return "removed" if old is None or old.kind != "whiteout" else None
    if old is None or old.kind == "whiteout":
        return None if new.kind == "directory" and old is None else "added"
    if (old.kind, old.size, old.chunks, old.target) != (new.kind, new.size, new.chunks, new.target):
        return "changed"
    return "permissions" if (old.mode, old.uid, old.gid) != (new.mode, new.uid, new.gid) else None


def _told(path: str, old: Entry | None, new: Entry | None, diffs: _Diffs) -> dict[str, Any]:
    entry = new or old
    assert entry is not None, "a path without an entry did not change"
    told: dict[str, Any] = {"path": path, "change": _change(old, new), "kind": entry.kind, "size": entry.size}
    if entry.kind == "symlink":
        told["target"] = entry.target
    if (diff := diffs.between(old, new)) is not None:
        told["diff"] = diff
    return told


class _Diffs:
    """Creates the diffs of one episode, up to the number `MAX_DIFFS`."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._left = MAX_DIFFS

    def between(self, old: Entry | None, new: Entry | None) -> str | None:
        """Returns a diff of two versions; `None` if they are equal, long or binary, or if `MAX_DIFFS` is reached."""
        files = [entry for entry in (old, new) if entry is not None and entry.kind == "file"]
        if not files or self._left <= 0:
            return None
        was, now = self._text(old), self._text(new)
        if was is None or now is None:
            return None
        self._left -= 1
        lines = list(unified_diff(was.splitlines(), now.splitlines(), n=2, lineterm=""))[2:]
        more = len(lines) - MAX_DIFF_LINES
        return "\n".join([*lines[:MAX_DIFF_LINES], *([f"[… {more:,} lines …]"] if more > 0 else [])]) or None

    def _text(self, entry: Entry | None) -> str | None:
        """Returns the text of a version of a file: empty if it is not a file, `None` if it is too long or not text."""
        if entry is None or entry.kind != "file":
            return ""
        if entry.size > MAX_TEXT_BYTES or None in entry.chunks:
            return None
        try:
            data = b"".join(self._objects.get(chunk) for chunk in entry.chunks if chunk is not None)
            return None if b"\0" in data else data.decode()
        except (SnapshotError, UnicodeDecodeError):
            return None
