"""Whatever a snapshot's files hold: only the declared errors, nothing outside the store, and bounded memory."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ares_exp.commands.cli.run_command import run_command
from ares_exp.containers.filesystem.zstd import zstd
from ares_exp.errors import SnapshotError, SnapshotMetadataError
from ares_exp.snapshots.snapshot import MAX_FILE_BYTES, EnvironmentSnapshot
from ares_exp.snapshots.store import SnapshotStore
from tests.examples import examples
from tests.unit.snapshots.golden_store import GOLDEN
from tests.unit.snapshots.stores import EPISODE, is_harmless

main = partial(run_command, "snapshots", program="ares-exp snapshots")

STORE = SnapshotStore(GOLDEN)
VALID = json.loads((STORE.path / f"{EPISODE}@3" / "snapshot.json").read_text())
NASTY = [
    "", "..", "../..", "/etc/passwd", "a/../../b", "objects", "\0", "a\0b", "\x1b[2J", "\ud800", "x" * 5000, "\n",
    "\u202e\u200b",
    "a" * 64, "../" * 21 + "a", "0" * 64, -1, 0, 2**63, 2**64, 10**999, 1e308, True, None, [], {}, [[]], [None],
    {"": {}},
    "2026-01-31T12:00:00+00:00", "9999-12-31T23:59:59Z", "MID", "LAST",
]  # fmt: skip
JSON = st.recursive(
    st.sampled_from(NASTY) | st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PER_EXAMPLE = examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@st.composite
def changed(draw: st.DrawFn) -> Any:
    data = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = data
        while True:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            inner = place[key]
            if not inner or not isinstance(inner, dict | list) or draw(st.booleans()):
                break
            place = inner
        if draw(st.integers(0, 3)):
            place[key] = copy.deepcopy(draw(JSON))  # the next change must not reach what is drawn from
        else:
            del place[key]
        if not data:
            break
    return data


@pytest.fixture(scope="module")
def opened() -> Any:
    paths: list[str] | None = None

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if paths is not None and event == "open" and isinstance(arguments[0], str | bytes):
            paths.append(str(arguments[0]))

    @contextmanager
    def listen() -> Iterator[list[str]]:
        nonlocal paths
        paths = found = []
        try:
            yield found
        finally:
            paths = None

    sys.addaudithook(hook)  # stays, and does nothing
    return listen


def use(store: SnapshotStore) -> list[str]:
    """Does everything with a store that reads it; returns what verification found."""
    store.list(problems=[])
    with suppress(SnapshotMetadataError):
        _ = EnvironmentSnapshot.load_from_file(store.path / f"{EPISODE}@3").digest
    with suppress(SnapshotMetadataError):
        _ = store.get(f"{EPISODE}@3").agent_messages
    with suppress(SnapshotError):
        store.gc(dry_run=True, grace_sec=0)
    return [problem for name in store.ids() for problem in store.verify(name).problems]


def fresh_store(tmp_path: Path) -> SnapshotStore:
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    return SnapshotStore(shutil.copytree(STORE.path, tmp_path / "store"))


@PER_EXAMPLE
@given(data=changed())
def test_changed_metadata_is_handled_safely(
    tmp_path: Path, opened: Any, capsys: pytest.CaptureFixture[str], data: Any
) -> None:
    store = fresh_store(tmp_path)
    use(store)  # imports what it needs
    (store.path / f"{EPISODE}@3" / "snapshot.json").write_text(json.dumps(data))
    with opened() as paths:
        use(store)
    assert paths
    assert [path for path in paths if not path.startswith(f"{store.path}/")] == []
    for command in (["list"], ["verify"], ["show"]):
        end = f"/{EPISODE}@3" if command == ["show"] else ""
        assert main([*command, f"{store.path}{end}"]) in (0, 1, 2)
    told = capsys.readouterr()
    assert is_harmless(told.out + told.err)


@PER_EXAMPLE
@given(data=st.data())
def test_changed_bytes_are_handled_safely(tmp_path: Path, data: st.DataObject) -> None:
    store = fresh_store(tmp_path)
    files = sorted(path for path in store.path.rglob("*") if path.is_file())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(files))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["cut", "insert", "flip", "whole"]))
        if kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=20))
        elif kind == "flip" and at < len(content):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "whole":
            content = bytearray(zstd.compress(data.draw(st.binary(max_size=200))))
        path.write_bytes(content)
    use(store)


@PER_EXAMPLE
@given(
    lines=st.lists(
        st.binary(max_size=60).filter(lambda line: b"\n" not in line) | JSON.map(json.dumps).map(str.encode)
    ),
    field=st.sampled_from(["journal", "message_objects", "filesystem"]),
)
def test_arbitrary_object_content_is_handled_safely(tmp_path: Path, lines: list[bytes], field: str) -> None:
    store = fresh_store(tmp_path)
    data = VALID | {field: store.objects.put_lines(lines)}
    (store.path / f"{EPISODE}@3" / "snapshot.json").write_text(json.dumps(data))
    problems = use(store)
    assert problems or field != "filesystem"


BOUNDED = """
import resource, sys
from pathlib import Path
from ares_exp.errors import SnapshotError
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.containers.filesystem.zstd import zstd
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
store = SnapshotStore(Path(sys.argv[1]))
for name in store.ids():
    print(name, len(store.verify(name).problems))
"""


@pytest.mark.once
def test_memory_is_bounded(tmp_path: Path) -> None:
    store = fresh_store(tmp_path)
    bombs = {
        "containers": json.dumps(VALID | {"snapshot_id": "containers", "episode": {"x": []}}).replace(
            "[]}", f"[{','.join(['{}'] * (MAX_FILE_BYTES // 3 - 2000))}]}}"
        ),
        "same": json.dumps(VALID | {"snapshot_id": "same", "message_objects": VALID["message_objects"] * 10_000}),
    }
    big = store.objects.file(store.objects.put(b"to be replaced\n"))
    big.write_bytes(zstd.compress(b"\0" * 2**30))
    digest = big.parent.name + big.name
    for field in ("journal", "message_objects", "filesystem"):
        bombs[field] = json.dumps(VALID | {"snapshot_id": field, field: [digest] * 10})
    for name, text in bombs.items():
        (store.path / name).mkdir()
        (store.path / name / "snapshot.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, store.path], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stderr == ""
    found = dict(line.split() for line in done.stdout.splitlines())
    assert {*found} == {*bombs, f"{EPISODE}@0", f"{EPISODE}@3"}
    assert all(found[name] != "0" for name in ("journal", "message_objects", "filesystem"))
