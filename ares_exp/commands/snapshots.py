"""The command `snapshots`: lists, shows, verifies and removes snapshots of episodes."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ares_exp.commands.cli.run_command import CommandParser, number_type, print_line
from ares_exp.containers.filesystem.delta import Entry
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.errors import SnapshotMetadataError, SnapshotNotFoundError, UserError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.run_dir import RunDir, is_file
from ares_exp.records.terminal_text import collapsed, format_size, make_console, one_line, print_table, printable
from ares_exp.snapshots.snapshot import OBJECTS, SNAPSHOT_FILE, EnvironmentSnapshot, step_of
from ares_exp.snapshots.store import GRACE_SEC, SnapshotStore, in_order

HELP = """\
Lists, shows and verifies snapshots, and removes snapshots that are not needed.
[arguments]
Examples:
  %(prog)s list outputs/first                 the snapshots of a run
  %(prog)s show outputs/first/hello__0__3f2a91bc@7 --files
  %(prog)s verify outputs/first
  %(prog)s gc outputs/first --keep 1 --dry-run

`%(prog)s COMMAND --help` lists the options of each command.
"""
LIST = """\
Lists snapshots, oldest first: how many responses of the policy had been applied (step), how many paths the container
has changed (entries), how large its changed files are (bytes), and from where the episode was branched (lineage).
[arguments]
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first/hello__0

Exit codes: 0 all could be read; 1 some could not; 2 the command line is wrong.
"""
SHOW = """\
Shows what a snapshot contains: the episode, the last message that waits for a response, and the files that the
container has changed. It also lists parts that are not in the snapshot, and are therefore missing after a restore.
[arguments]
Examples:
  %(prog)s outputs/first/hello__0__3f2a91bc@7
  %(prog)s outputs/first/hello__0__3f2a91bc@7 --files
  %(prog)s outputs/first/snapshots/hello__0__3f2a91bc@7/snapshot.json --full

Exit codes: 0 all could be read; 1 part of it is damaged; 2 the command line is wrong, or there is no such snapshot.
"""
VERIFY = """\
Reads all files that snapshots need, and checks them against their names, metadata and checksums.
[arguments]
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/first/hello__0__3f2a91bc@7

Exit codes: 0 all snapshots are intact; 1 a snapshot is damaged; 2 the command line is wrong.
"""
GC = """\
Removes stored files that no snapshot needs any more, and leftovers of killed processes. With --keep N, it first removes
all but the last N snapshots of each episode. A store in which a snapshot is being written is skipped.
[arguments]
Examples:
  %(prog)s outputs/first
  %(prog)s outputs/* --keep 1 --dry-run

Exit codes: 0 done; 1 a store was skipped because it is being written; 2 the command line is wrong, or a snapshot is
damaged.
"""
LEFT_OUT_WHERE_NARROW = ("lineage", "task", "created", "entries", "bytes", "backend")
"""Columns to drop on narrow terminals, in this order."""


def add_arguments(parser: CommandParser) -> None:
    command = parser.add_command("list", _list, "list snapshots", LIST)
    command.add_argument("paths", nargs="+", type=run_path, metavar="PATH", help=HELP_OF_PATHS)
    command = parser.add_command("show", _show, "show what a snapshot contains, and which parts are missing", SHOW)
    command.add_argument("path", type=run_path, metavar="SNAPSHOT", help=HELP_OF_PATHS)
    command.add_argument("--files", action="store_true", help="list the changed files, with their kinds and sizes")
    command.add_argument("--full", action="store_true", help="show the whole last message")
    command = parser.add_command(
        "verify", _verify, "check that everything a snapshot needs exists and is undamaged", VERIFY
    )
    command.add_argument("paths", nargs="+", type=run_path, metavar="PATH", help=HELP_OF_PATHS)
    command.add_argument(
        "--quick", action="store_true", help="check that the contents of files exist, without reading them"
    )
    command = parser.add_command("gc", _gc, "remove old snapshots, and contents that no snapshot needs", GC)
    command.add_argument(
        "paths", nargs="+", type=run_path, metavar="PATH", help=f"run directories or snapshot stores; {MEANING}"
    )
    command.add_argument(
        "--keep",
        type=number_type(int, 1, 10**9, "a number of at least 1"),
        metavar="N",
        help="remove all but the last N snapshots of an episode",
    )
    command.add_argument("--dry-run", action="store_true", help="show what would be removed, without removing it")
    command.add_argument(
        "--grace", type=number_type(float, 0, 1e9, "seconds, 0 or more"), default=GRACE_SEC, metavar="SEC",
        help=f"keep files that were written less than SEC seconds ago (default {GRACE_SEC:g})",
    )  # fmt: skip


def _list(arguments: argparse.Namespace) -> int:
    snapshots, problems = [], []
    for store, ids in [chosen_snapshots(path) for path in arguments.paths]:
        for name in ids:
            try:
                snapshots.append(store.get(name))
            except SnapshotMetadataError as error:
                problems.append(str(error))
    console = make_console()
    if snapshots:
        print_table(console, list_columns(in_order(snapshots)), texts=_TEXTS, leave_out=LEFT_OUT_WHERE_NARROW)
    console.print(f"{len(snapshots)} snapshots")
    for problem in problems:
        sys.stderr.write(f"left out: {printable(problem)}\n")
    return exit_codes.INCOMPLETE if problems else exit_codes.COMPLETE


def list_columns(snapshots: Sequence[EnvironmentSnapshot]) -> dict[str, Sequence[str]]:
    """Returns the columns of the table of snapshots, by name."""
    return {name: [cell(snapshot) for snapshot in snapshots] for name, cell in _CELLS.items()}


def _show(arguments: argparse.Namespace) -> int:
    snapshot = chosen_snapshot(arguments.path)
    _print_metadata(snapshot)
    code = exit_codes.COMPLETE
    for part in (_print_message, _print_files):
        try:
            part(snapshot, arguments)
        except SnapshotMetadataError as error:
            sys.stdout.flush()
            sys.stderr.write(f"damaged: {printable(str(error))}\n")
            code = exit_codes.INCOMPLETE
    return code


def _print_metadata(snapshot: EnvironmentSnapshot) -> None:
    limit = "" if snapshot.step_limit is None else f" of at most {snapshot.step_limit}"
    resources = {name: value for name, value in snapshot.container_resources.items() if value is not None}
    image = f"{one_line(snapshot.container_type)}  {one_line(snapshot.container_image or '–')}"
    container, agent = snapshot.container, snapshot.agent
    rows = {
        "digest": snapshot.digest,
        "taken": _moment(snapshot),
        "task": f"{_task_name(snapshot)} ({one_line(snapshot.task_type)})",
        "step": f"{snapshot.step_count}{limit}, after {snapshot.time_step['step_type']}",
        "container": f"{image}  {_pairs(resources)}",
        "workdir": one_line(container.get("workdir") or ""),
        "environment": one_line(", ".join(container.get("env_names") or ()), 1000),
        "agent": f"{one_line(agent.get('factory', '–'))}  {_pairs(agent.get('options', {}))}",
        "journal": f"{snapshot.journal_entries:,} entries",
        "episode": _pairs(snapshot.episode),
        "lineage": _pairs(snapshot.lineage),
        "written by": _pairs(snapshot.writer) or "–",
    }
    print_line(f"Snapshot {snapshot.snapshot_id}")
    for name, text in rows.items():
        if text:
            _row(name, text)
    print_line("Not in the snapshot, so missing after a restore")
    for name in ("processes", "not_captured"):
        for item in container.get(name, ()):
            _row("process" if name == "processes" else "", one_line(str(item), 200))


def _print_message(snapshot: EnvironmentSnapshot, arguments: argparse.Namespace) -> None:
    messages = snapshot.agent_messages
    print_line(f"The agent waits for a response to {len(messages):,} messages. The last message is")
    for message in messages[-1:]:
        _row(one_line(str(message.get("role", "–"))), "")
        for line in collapsed(str(message.get("content")), full=arguments.full):
            print_line(f"    {line}")


def _print_files(snapshot: EnvironmentSnapshot, arguments: argparse.Namespace) -> None:
    delta = get_delta(snapshot.object_store, snapshot.filesystem)
    kinds = Counter(_kind(entry) for entry in delta.entries.values())
    told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())) or "nothing"
    print_line(f"Changed since {one_line(delta.base)}: {told}; {format_size(snapshot.filesystem_bytes)} in files")
    for note in [note for note in delta.notes if note not in snapshot.container.get("not_captured", ())]:
        _row("note", one_line(note, 300))
    if not arguments.files:
        if delta.entries:
            _row("", "--files lists them")
        return
    for path, entry in delta.entries.items():
        size = f"{entry.size:>12,}" if entry.kind == "file" else " " * 12
        target = f" -> {_name(entry.target)}" if entry.kind == "symlink" else ""
        print_line(f"  {_kind(entry):<16} {size}  {_name(path)}{target}")


def _kind(entry: Entry) -> str:
    if entry.kind == "whiteout":
        return "deleted"
    return "emptied directory" if entry.opaque else entry.kind


def _name(path: str) -> str:
    """Returns a file's path for output on one line. Control characters in it, such as newlines, are escaped."""
    return printable(path).replace("\n", "\\n").replace("\t", "\\t")


def _row(name: str, text: str) -> None:
    print_line(f"  {name:<12} {text}".rstrip())


def _verify(arguments: argparse.Namespace) -> int:
    damaged = count = 0
    for store, ids in [chosen_snapshots(path) for path in arguments.paths]:
        for name in ids:
            found = store.verify(name, deep=not arguments.quick)
            count += 1
            damaged += not found.ok
            says = f"intact  {found.objects:,} objects, {format_size(found.bytes)}" if found.ok else "DAMAGED"
            sys.stdout.write(f"{one_line(name)}  {says}\n")
            sys.stdout.writelines(f"  {printable(line)}\n" for line in found.problems)
    sys.stdout.write(f"{count - damaged} of {count} snapshots are undamaged.\n")
    return exit_codes.INCOMPLETE if damaged else exit_codes.COMPLETE


def _gc(arguments: argparse.Namespace) -> int:
    code = exit_codes.COMPLETE
    for store in _stores(arguments.paths):
        doomed = _beyond(store, arguments.keep)
        if not arguments.dry_run:
            for name in doomed:
                store.delete(name)
        freed = store.gc(grace_sec=arguments.grace, dry_run=arguments.dry_run, without=doomed)
        where = printable(str(store.path))
        for name in doomed:
            sys.stdout.write(f"{'would remove' if arguments.dry_run else 'removed'} {where}/{name}\n")
        if freed.skipped is not None:
            sys.stderr.write(f"{printable(freed.skipped)}\n")
            code = exit_codes.INCOMPLETE
            continue
        sys.stdout.write(
            f"{where}: {len(doomed)} snapshots, {freed.objects:,} stored objects ({format_size(freed.bytes)}) and "
            f"{freed.directories} leftovers {'would be removed' if arguments.dry_run else 'removed'}"
            f"{f' (files younger than {arguments.grace:g} s are kept: --grace)' if arguments.grace else ''}.\n"
        )
    return code


def _stores(paths: Sequence[Path]) -> list[SnapshotStore]:
    """Returns the snapshot stores at the paths. With several paths (`outputs/*`), skips folders without a store.

    Raises `UserError` if a path is not a folder, or if the only path has no store.
    """
    found = {path: find_store(path) for path in paths}
    wrong = [path for path, store in found.items() if store is None and (len(found) == 1 or not path.is_dir())]
    if wrong:
        raise UserError(
            f"Expected {printable(str(wrong[0]))} to be a snapshot store, or a run directory with `snapshots/` in it."
        )
    for path in (path for path, store in found.items() if store is None):
        sys.stderr.write(f"{printable(str(path))} has no snapshots.\n")
    return [store for store in found.values() if store is not None]


def _beyond(store: SnapshotStore, keep: int | None) -> Sequence[str]:
    if keep is None:
        return []
    episodes = sorted({found[0] for name in store.ids() if (found := step_of(name)) is not None})
    return [name for episode in episodes for name in store.beyond(episode, keep)]


def _moment(snapshot: EnvironmentSnapshot) -> str:
    return f"{datetime.fromisoformat(snapshot.created_at):%Y-%m-%d %H:%M:%S UTC}"


def _task_name(snapshot: EnvironmentSnapshot) -> str:
    return one_line(str(snapshot.task_data.get("name", "–")))


def _came_from(snapshot: EnvironmentSnapshot) -> str:
    """Returns the snapshot from which the episode was branched, with the branch's number; `–` if it is not a branch."""
    parent, branch = snapshot.lineage.get("parent"), snapshot.lineage.get("branch")
    if parent is None:
        return "–"
    return one_line(f"{parent}{'' if branch is None else f' #{branch}'}")


def _pairs(data: Any) -> str:
    return "  ".join(f"{one_line(str(name))}={one_line(str(value))}" for name, value in data.items())


_CELLS: Mapping[str, Callable[[EnvironmentSnapshot], str]] = {
    "snapshot": lambda snapshot: snapshot.snapshot_id,
    "step": lambda snapshot: str(snapshot.step_count),
    "task": _task_name,
    "backend": lambda snapshot: one_line(snapshot.container_type),
    "created": _moment,
    "entries": lambda snapshot: f"{snapshot.filesystem_entries:,}",
    "bytes": lambda snapshot: format_size(snapshot.filesystem_bytes),
    "lineage": _came_from,
}
_TEXTS = ("snapshot", "task", "backend", "lineage")


HELP_OF_PATHS = (
    "a run directory or a snapshot store, optionally followed by /ID or the start of an id, or a snapshot.json; "
    f"{MEANING}"
)


def chosen_snapshots(path: Path) -> tuple[SnapshotStore, Sequence[str]]:
    """Returns the store and the ids of the snapshots that `path` selects, without reading them.

    The path is a run directory, a snapshot store, one of these followed by `/` and the start of an id, the directory of
    a snapshot, or a file `snapshot.json`.

    Raises:
        UserError: `path` is not a snapshot, a snapshot store or a run directory with snapshots.
        SnapshotMetadataError: `path` is a file that does not contain a valid snapshot.
    """
    if is_file(path):
        snapshot = EnvironmentSnapshot.load_from_file(path)
        return SnapshotStore(snapshot.snapshot_dir.parent), [snapshot.snapshot_id]
    if (path / SNAPSHOT_FILE).exists():
        return SnapshotStore(path.parent), [path.name]
    if (store := find_store(path)) is not None:
        return store, store.ids()
    if (store := find_store(path.parent)) is not None and (store.path == path.parent or not path.exists()):
        return store, _by_prefix(store, path.name)
    raise UserError(
        f"Expected {path} to be a snapshot, a snapshot store or a run directory that contains `snapshots/`, "
        f"but {'it is none of these' if path.exists() else 'there is no such path'}."
    )


def find_store(path: Path) -> SnapshotStore | None:
    """Returns the snapshot store at `path`, or the store of the run directory `path`; `None` if there is none."""
    for candidate in (path, RunDir(path).snapshots):
        if (candidate / OBJECTS).is_dir():
            return SnapshotStore(candidate)
    return None


def _by_prefix(store: SnapshotStore, prefix: str) -> Sequence[str]:
    ids = store.ids()
    if prefix in ids:
        return [prefix]
    if found := [name for name in ids if name.startswith(prefix)]:
        return found
    raise SnapshotNotFoundError(store.not_found(prefix))


def chosen_snapshot(path: Path) -> EnvironmentSnapshot:
    """Reads the snapshot that `path` selects. Raises `UserError` if it does not select exactly one snapshot.

    Also raises the errors of `chosen_snapshots`.
    """
    store, ids = chosen_snapshots(path)
    if len(ids) == 1:
        return store.get(ids[0])
    if not ids:
        raise UserError(f"There is no snapshot in {store.path}.")
    raise UserError(
        f"Expected one snapshot, found {len(ids)} in {path}. Name one, such as {path}/{ids[-1]}. "
        f"`ares-exp snapshots list {path}` lists them."
        if path.exists()
        else f"Expected one snapshot, found {len(ids)} whose id starts with {path.name}: "
        f"{', '.join(ids[:3])}, …. Name one."
    )
