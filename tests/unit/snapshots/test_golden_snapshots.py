"""Snapshots of the current schema, as its first writer wrote them."""

import shutil
from pathlib import Path

from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.golden_store import GOLDEN
from tests.unit.snapshots.stores import BASE, EPISODE


def test_golden_store_is_readable(tmp_path: Path) -> None:
    store = SnapshotStore(shutil.copytree(GOLDEN, tmp_path / "store"))
    first, third = store.list()
    assert (first.snapshot_id, third.snapshot_id) == (f"{EPISODE}@0", f"{EPISODE}@3")
    assert (third.step_count, third.step_limit, third.journal_entries) == (3, 50, 6)
    assert third.time_step == {"step_type": "MID", "reward": 0.0, "discount": None}
    assert third.container_resources["cpus"] == 1.5
    assert third.container["processes"] == ["sleep 60"]
    assert third.lineage["parent"] == first.snapshot_id
    assert len(third.agent_messages) == 7
    assert third.agent_messages[-1] == {"role": "user", "content": "output 2"}
    delta = get_delta(third.object_store, third.filesystem)
    assert [*delta.entries] == ["/app", "/app/large.bin", "/app/link", "/app/log.txt", "/app/old"]
    assert delta.base == BASE
    assert store.objects.get(third.agent["state"]) == b'{"turn": 3}'
    assert all(store.verify(name).ok for name in store.ids())


def test_digest_of_a_golden_snapshot_is_stable() -> None:
    snapshot = SnapshotStore(GOLDEN).get(f"{EPISODE}@3")
    assert snapshot.digest == "sha256:0b1e39d99948226cd5ac696889c6a5340b1ad8ab0cb47e1e28f3daf94d525e22"
