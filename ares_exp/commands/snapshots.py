"""The command `show`: the content of a snapshot, and what it lacks."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from ares_exp.errors import SnapshotMetadataError
from ares_exp.filesystem.delta import Entry
from ares_exp.filesystem.delta_encoding import get_delta
from ares_exp.records.latest_run import run_path
from ares_exp.snapshots.chosen_snapshots import HELP, chosen_snapshot
from ares_exp.snapshots.commands import words
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.terminal.terminal import collapsed, format_size, one_line, printable

EXIT_OK, EXIT_DAMAGED = 0, 1

DESCRIPTION = """\
Tells what a snapshot holds: the episode, the last message that waits for an answer, and the files that the container
has changed; and what of the container it does not hold, so that it is not there after restoring.
"""
EPILOG = """\
Examples:
  %(prog)s outputs/first/hello__0__3f2a91bc@7
  %(prog)s outputs/first/hello__0__3f2a91bc@7 --files
  %(prog)s outputs/first/snapshots/hello__0__3f2a91bc@7/snapshot.json --full

Exit codes: 0 all could be read; 1 part of it is damaged; 2 the command line is wrong, or there is no such snapshot.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("path", type=run_path, metavar="SNAPSHOT", help=HELP)
    parser.add_argument("--files", action="store_true", help="list the changed files, with their kinds and sizes")
    parser.add_argument("--full", action="store_true", help="leave nothing out of the last message")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    snapshot = chosen_snapshot(arguments.path)
    _print_metadata(snapshot)
    code = EXIT_OK
    for part in (_print_message, _print_files):
        try:
            part(snapshot, arguments)
        except SnapshotMetadataError as error:
            sys.stdout.flush()
            sys.stderr.write(f"damaged: {printable(str(error))}\n")
            code = EXIT_DAMAGED
    return code


def _print_metadata(snapshot: EnvironmentSnapshot) -> None:
    limit = "" if snapshot.step_limit is None else f" of at most {snapshot.step_limit}"
    resources = {name: value for name, value in snapshot.container_resources.items() if value is not None}
    container, agent = snapshot.container, snapshot.agent
    _line(f"Snapshot {snapshot.snapshot_id}")
    _row("digest", snapshot.digest)
    _row("taken", words.moment(snapshot))
    _row("task", f"{words.task_name(snapshot)} ({one_line(snapshot.task_type)})")
    _row("step", f"{snapshot.step_count}{limit}, after {snapshot.time_step['step_type']}")
    _row(
        "container",
        f"{one_line(snapshot.container_type)}  {one_line(snapshot.container_image or '–')}  {words.pairs(resources)}",
    )
    if container.get("workdir") is not None:
        _row("workdir", one_line(container["workdir"]))
    if container.get("env_names"):
        _row("environment", one_line(", ".join(container["env_names"]), 1000))
    _row("agent", f"{one_line(agent.get('factory', '–'))}  {words.pairs(agent.get('options', {}))}")
    _row("journal", f"{snapshot.journal_entries:,} entries")
    if snapshot.episode:
        _row("episode", words.pairs(snapshot.episode))
    if snapshot.lineage:
        _row("lineage", words.pairs(snapshot.lineage))
    _row("written by", words.pairs(snapshot.writer) or "–")
    _line("Not captured, and so not there after restoring")
    for name in ("processes", "not_captured"):
        for item in container.get(name, ()):
            _row("process" if name == "processes" else "", one_line(item if isinstance(item, str) else str(item), 200))


def _print_message(snapshot: EnvironmentSnapshot, arguments: argparse.Namespace) -> None:
    messages = snapshot.agent_messages
    _line(f"Waits for an answer to {len(messages):,} messages, the last of which is")
    for message in messages[-1:]:
        content = message.get("content")
        text = content if isinstance(content, str) else str(content)
        _row(one_line(str(message.get("role", "–"))), "")
        for line in collapsed(text, full=arguments.full):
            _line(f"    {line}")


def _print_files(snapshot: EnvironmentSnapshot, arguments: argparse.Namespace) -> None:
    delta = get_delta(snapshot.object_store, snapshot.filesystem)
    kinds = Counter(_kind(entry) for entry in delta.entries.values())
    told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())) or "nothing"
    _line(f"Changed since {one_line(delta.base)}: {told}; {format_size(snapshot.filesystem_bytes)} in files")
    for note in [note for note in delta.notes if note not in snapshot.container.get("not_captured", ())]:
        _row("note", one_line(note, 300))
    if not arguments.files:
        if delta.entries:
            _row("", "--files lists them")
        return
    for path, entry in delta.entries.items():
        size = f"{entry.size:>12,}" if entry.kind == "file" else " " * 12
        target = f" -> {_name(entry.target)}" if entry.kind == "symlink" else ""
        _line(f"  {_kind(entry):<16} {size}  {_name(path)}{target}")


def _kind(entry: Entry) -> str:
    if entry.kind == "whiteout":
        return "deleted"
    return "emptied directory" if entry.opaque else entry.kind


def _name(path: str) -> str:
    """Returns a path on one line, whatever is in its name."""
    return printable(path).replace("\n", "\\n").replace("\t", "\\t")


def _row(name: str, text: str) -> None:
    _line(f"  {name:<12} {text}".rstrip())


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
