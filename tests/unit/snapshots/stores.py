"""Snapshots to test with, put and committed as an environment does it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unicodedata import category

from ares_exp.containers.filesystem.delta import Delta, Entry
from ares_exp.containers.filesystem.delta_encoding import put_delta
from ares_exp.containers.filesystem.stored_objects import CHUNK_BYTES, ObjectStore
from ares_exp.snapshots.snapshot import EnvironmentSnapshot, encode_messages
from ares_exp.snapshots.store import SnapshotStore

BASE = f"sha256:{'ab' * 32}"
EPISODE = "hello__0__3f2a91bc"


def is_harmless(text: str) -> bool:
    """Whether a terminal obeys nothing of it, and hides nothing but what joins letters."""
    return all(category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or char in "\n\t\u200c\u200d" for char in text)


def file(objects: ObjectStore, content: bytes, **fields: Any) -> Entry:
    pieces = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
    return Entry("file", mode=0o644, size=len(content), chunks=tuple(map(objects.put, pieces)), **fields)


def changes(objects: ObjectStore, step: int) -> dict[str, Entry]:
    return {
        "/app": Entry("directory", mode=0o755),
        "/app/large.bin": file(objects, b"\x01" * CHUNK_BYTES + b"end"),
        "/app/log.txt": file(objects, b"".join(b"step %d\n" % number for number in range(step + 1))),
        "/app/link": Entry("symlink", target="log.txt"),
        "/app/old": Entry("whiteout"),
    }


def make(
    store: SnapshotStore,
    name: str | None = None,
    step: int = 0,
    *,
    entries: Mapping[str, Entry] | None = None,
    **fields: Any,
) -> EnvironmentSnapshot:
    """A snapshot whose objects are in the store. It is not committed yet."""
    objects = store.objects
    entries = changes(objects, step) if entries is None else entries
    messages = [{"role": "user", "content": "Say hello."}]
    for number in range(step):
        messages += [{"role": "assistant", "content": f"ls {number}"}, {"role": "user", "content": f"output {number}"}]
    state = {"state": objects.put(b'{"turn": %d}' % step), "state_version": 1}
    values: dict[str, Any] = {
        "snapshot_id": f"{EPISODE}@{step}" if name is None else name,
        "created_at": f"2026-01-31T12:00:{step % 60:02}.5+00:00",
        "snapshot_dir": Path("nowhere/yet"),
        "step_count": step,
        "step_limit": 50,
        "task_type": "harbor",
        "task_data": {"name": "hello", "digest": BASE},
        "container_type": "local",
        "container_image": "host",
        "container_dockerfile_path": None,
        "container_resources": {"cpus": 1.5, "memory_mb": 512, "storage_mb": None, "gpus": None},
        "time_step": {"step_type": "MID" if step else "FIRST", "reward": 0.0 if step else None, "discount": None},
        "message_objects": objects.put_lines(encode_messages(messages)),
        "journal": objects.put_lines([json.dumps({"t": "call", "id": number}).encode() for number in range(2 * step)]),
        "journal_entries": 2 * step,
        "filesystem": put_delta(Delta(BASE, entries, ("a socket was left out",)), objects),
        "filesystem_base": BASE,
        "filesystem_entries": len(entries),
        "filesystem_bytes": sum(entry.size for entry in entries.values()),
        "container": {"options": {}, "workdir": "/app", "env_names": ["HOME"], "processes": ["sleep 60"],
                      "not_captured": ["/dev/shm"]},
        "agent": {"factory": "ares_exp.agents.shell_agent.ShellAgent", "options": {"turns": 3}, "source_digest": BASE,
                  **state},
        "episode": {"tokens": 10, "cost": 0.5},
        "lineage": {"root": f"{EPISODE}@0", "parent": f"{EPISODE}@0", "step": 0, "branch": 2} if step else {},
        "writer": {"ares_exp": "0.1.0", "python": "3.11.0", "platform": "linux"},
    }  # fmt: skip
    return EnvironmentSnapshot(**(values | fields))


def add(store: SnapshotStore, name: str | None = None, step: int = 0, **fields: Any) -> EnvironmentSnapshot:
    with store.writing():
        return store.commit(make(store, name, step, **fields))


def remove_all_but(store: SnapshotStore, episode_id: str, keep: int) -> None:
    for name in store.beyond(episode_id, keep):
        store.delete(name)
