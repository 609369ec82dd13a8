"""Snapshots as the first writer of each schema wrote them must stay readable."""

import shutil
from pathlib import Path

import pytest

from ares_exp.filesystem.delta_encoding import get_delta
from ares_exp.snapshots.schema_versions import SCHEMA, UPGRADES
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.golden_store import GOLDEN
from tests.unit.snapshots.stores import BASE, EPISODE


def test_every_schema_has_a_golden_store_and_a_way_here() -> None:
    assert [path.name for path in sorted(GOLDEN.iterdir())] == [f"schema_{major}" for major in range(1, SCHEMA[0] + 1)]
    assert [*UPGRADES] == [*range(1, SCHEMA[0])]


@pytest.mark.parametrize("major", range(1, SCHEMA[0] + 1))
def test_a_golden_store_can_be_read(major: int, tmp_path: Path) -> None:
    store = SnapshotStore(shutil.copytree(GOLDEN / f"schema_{major}", tmp_path / "store"))
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
    assert [bool(store.verify(name).notes) for name in store.ids()] == [major == 1] * 2, "1.0 had no checksum"


def test_the_digest_of_a_golden_snapshot_stays_what_it_is() -> None:
    snapshot = SnapshotStore(GOLDEN / "schema_1").get(f"{EPISODE}@3")
    assert snapshot.digest == "sha256:de887ba025122ab6c4a491e2724780fc1c1b6436d4114dfc0c1583706fc9e854"
