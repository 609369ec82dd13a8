"""`ares-exp snapshots`."""

import json
from functools import partial
from pathlib import Path

import pytest

from ares_exp.commands.cli.run_command import run_command
from ares_exp.containers.filesystem.delta import Entry
from ares_exp.records.terminal_text import format_size
from ares_exp.snapshots.store import SnapshotStore
from tests.unit.snapshots.stores import EPISODE, add, is_harmless

NAMES = ("list", "show", "verify", "gc")
main = partial(run_command, "snapshots", program="ares-exp snapshots")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    store = SnapshotStore(tmp_path / "snapshots")
    for step in range(3):
        add(store, step=step)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def failed(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert main([*map(str, arguments)]) == code
    return capsys.readouterr().err


def test_snapshots_of_a_run_are_listed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run_dir, run_dir / "snapshots"):
        rows = [line.split() for line in told(capsys, "list", path).splitlines() if EPISODE in line]
        assert rows[0] == [
            f"{EPISODE}@0",
            "0",
            "hello",
            "local",
            "2026-01-31",
            "12:00:00",
            "UTC",
            "5",
            "131",
            "kB",
            "–",
        ]
        assert [row[:2] for row in rows] == [[f"{EPISODE}@{step}", str(step)] for step in range(3)]
        assert rows[2][-2:] == [f"{EPISODE}@0", "#2"]


def test_path_may_end_with_an_id_prefix(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run_dir / f"{EPISODE}@1", run_dir / "snapshots" / f"{EPISODE}@1" / "snapshot.json"):
        assert "1 snapshots" in told(capsys, "list", path)
    assert "3 snapshots" in told(capsys, "list", run_dir / "hello")
    assert "4 snapshots" in told(capsys, "list", run_dir, run_dir / f"{EPISODE}@1")


def test_broken_snapshot_is_skipped_with_an_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "snapshots" / f"{EPISODE}@1" / "snapshot.json"
    path.write_text("{")
    assert main(["list", str(run_dir)]) == 1
    output = capsys.readouterr()
    assert "2 snapshots" in output.out
    assert output.err.startswith(f"left out: {path}: invalid JSON")


SHOWN = f"""\
Snapshot {EPISODE}@2
  digest       sha256:…
  taken        2026-01-31 12:00:02 UTC
  task         hello (harbor)
  step         2 of at most 50, after MID
  container    local  host  cpus=1.5  memory_mb=512
  workdir      /app
  environment  HOME
  agent        ares_exp.agents.shell_agent.ShellAgent  turns=3
  journal      4 entries
  episode      tokens=10  cost=0.5
  lineage      root={EPISODE}@0  parent={EPISODE}@0  step=0  branch=2
  written by   ares_exp=0.1.0  python=3.11.0  platform=linux
Not in the snapshot, so missing after a restore
  process      sleep 60
               /dev/shm
The agent waits for a response to 5 messages. The last message is
  user
    output 1
Changed since sha256:abababababababababababababababababababababababababababababababab: 1 deleted, 1 directory, 2 file, \
1 symlink; 131 kB in files
  note         a socket was left out
"""
FILES = """\
  directory                      /app
  file                  131,075  /app/large.bin
  symlink                        /app/link -> log.txt
  file                       21  /app/log.txt
  deleted                        /app/old
"""


def test_show_lists_contents_of_a_snapshot(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = SnapshotStore(run_dir / "snapshots").get(f"{EPISODE}@2").digest
    shown = told(capsys, "show", run_dir / f"{EPISODE}@2").replace(digest, "sha256:…")
    assert shown == f"{SHOWN}               --files lists them\n"
    shown = told(capsys, "show", run_dir / f"{EPISODE}@2", "--files").replace(digest, "sha256:…")
    assert shown == SHOWN + FILES


def test_damaged_objects_are_reported_and_the_rest_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(run_dir / "snapshots")
    lost = store.objects.file(store.get(f"{EPISODE}@2").message_objects[0])
    lost.unlink()
    assert main(["show", str(run_dir / f"{EPISODE}@2"), "--files"]) == 1
    output = capsys.readouterr()
    assert output.out.endswith(FILES)
    assert output.err.startswith(f"damaged: {lost} is missing.")
    assert output.err.count("\n") == 1


def test_control_characters_are_escaped(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, evil = SnapshotStore(run_dir / "snapshots"), "\x1b]0;owned\x07\x9b2J\u202e\ud800\r"
    entries = {"/x\x1b[2J\ny": Entry("symlink", target=f"a{evil[:8]}"), "/z\udcff": Entry("whiteout")}
    add(store, "evil", entries=entries, container_type=evil, container_image=evil, task_data={"name": evil},
        episode={evil: evil}, lineage={"parent": evil, evil: [evil]}, writer={evil: evil}, task_type=evil,
        container={"workdir": evil, "env_names": [evil], "processes": [evil, {evil: evil}], "not_captured": [evil]},
        agent={"factory": evil, "options": {evil: evil}}, container_resources={evil: 1},
        message_objects=store.objects.put_lines([json.dumps({"role": evil, "content": evil}).encode()]))  # fmt: skip
    shown = told(capsys, "list", run_dir) + told(capsys, "show", run_dir / "evil", "--files", "--full")
    assert is_harmless(shown)
    assert "\\x1b" in shown
    assert "  symlink                        /x\\x1b[2J\\ny -> a\\x1b]0;owne\n" in shown
    (store.path / "evil" / "snapshot.json").write_text(
        json.dumps({"schema": [1, 1], "snapshot_id": evil, "step_count": evil})
    )
    (store.path / f"dir{evil[:-2]}").mkdir()
    errors = failed(capsys, 1, "list", run_dir) + failed(capsys, 2, "show", run_dir / "evil")
    assert is_harmless(errors)
    assert errors.count("\n") == 3


def test_verify_reports_damaged_snapshots(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "verify", run_dir).endswith("3 of 3 snapshots are undamaged.\n")
    store = SnapshotStore(run_dir / "snapshots")
    broken = store.objects.file(store.get(f"{EPISODE}@1").journal[0])
    broken.write_bytes(b"x")
    assert main(["verify", str(run_dir), "--quick"]) == 1
    output = capsys.readouterr().out
    assert f"{EPISODE}@1  DAMAGED\n  {broken} is damaged" in output
    assert output.endswith("2 of 3 snapshots are undamaged.\n")
    assert main(["verify", str(run_dir / f"{EPISODE}@2")]) == 0


def test_gc_removes_older_snapshots(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(run_dir / "snapshots")
    before = [*store.ids()]
    planned = told(capsys, "gc", run_dir, "--keep", "1", "--dry-run", "--grace", "0")
    assert f"would remove {store.path}/{EPISODE}@0\n" in planned
    assert [*store.ids()] == before
    done = told(capsys, "gc", run_dir, "--keep", "1", "--grace", "0")
    assert done == planned.replace("would remove", "removed").replace("would be removed", "removed")
    assert [*store.ids()] == [f"{EPISODE}@2"]
    assert store.verify(f"{EPISODE}@2").ok
    assert told(capsys, "gc", store.path) == (
        f"{store.path}: 0 snapshots, 0 stored objects (0 B) and 0 leftovers removed "
        "(files younger than 3600 s are kept: --grace).\n"
    )


def test_mistakes_are_explained_in_one_paragraph(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "empty").mkdir()
    (run_dir / "a.json").write_text("{}")
    for arguments, words_told in {
        ("list", run_dir / "gone"): f"the store has other snapshots (3), such as {EPISODE}@0",
        ("list", "gone/for/good"): "there is no such path",
        ("list", run_dir / "empty" / "x"): "there is no such path",
        ("verify", run_dir / "empty"): "it is none of these",
        ("show", run_dir): f"found 3 in {run_dir}. Name one, such as {run_dir}/{EPISODE}@2",
        ("show", run_dir / "hello"): "found 3 whose id starts with hello",
        ("show", run_dir / "a.json"): "expected `schema` [1, 1], got None",
        ("gc", run_dir / "empty"): "to be a snapshot store, or a run directory",
        ("gc", "--keep", "1", run_dir, run_dir / "nope"): "to be a snapshot store, or a run directory",
        ("list", "a" * 300): "File name too long",
    }.items():
        error = failed(capsys, 2, *arguments)
        assert error.startswith("error: ")
        assert words_told in error
        assert error.count("\n") == 1
    assert len(SnapshotStore(run_dir / "snapshots").ids()) == 3


@pytest.mark.parametrize(
    "arguments",
    [(), ("lsit",), ("list",), ("show", "a", "b"), ("gc", "x", "--keep", "0"), ("gc", "x", "--keep", "-1"),
     ("gc", "x", "--keep", "²"), ("gc", "x", "--grace", "nan"), ("gc", "x", "--grace", "-1")],
)  # fmt: skip
def test_wrong_command_line_is_explained(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: ares-exp snapshots" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"Examples:\n  ares-exp snapshots {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (131_075, "131 kB"), (999_500, "1.0 MB"),
     (10**13, "10.0 TB"), (10**18, "1000000 TB")],
)  # fmt: skip
def test_sizes_have_units(count: int, shown: str) -> None:
    assert format_size(count) == shown
