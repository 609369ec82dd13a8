"""The command `merge`: merges the run directories of a run's shards into one run directory.

A shard is a run with a part of the tasks (`env.tasks=@0/4`). Run directories of shards may come from other users or
machines, so links in them are not followed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.config.overrides import listed
from ares_exp.errors import ConfigError
from ares_exp.records import exit_codes
from ares_exp.records.latest_run import MEANING, run_path
from ares_exp.records.recorded_results import read_object, read_results
from ares_exp.records.results import EpisodeResult, RunSummary
from ares_exp.records.run_dir import (
    HYDRA_RECORDS,
    RUN_FILES,
    RUN_FOLDERS,
    RunDir,
    appearing,
    is_plain_file,
    open_regular,
    plain_files,
    read_yaml,
    sync_to_disk,
)
from ares_exp.records.terminal_text import print_warning
from ares_exp.records.validation import MAX_NUMBER
from ares_exp.runs.resume.recorded_run import is_recorded_run, recorded_config
from ares_exp.runs.resume.session import KEYS_THAT_MAY_CHANGE, config_differences

HELP = """\
Merges the run directories of the shards of one run into OUT. OUT contains all episodes and trajectories, statistics
over all of them, and the records of each shard in parts/. The shards do not change. Files are hard links if possible.
[arguments]
Examples:
  ares-exp env.path=tasks env.tasks=@0/2 hydra.run.dir=shard0      on one machine
  ares-exp env.path=tasks env.tasks=@1/2 hydra.run.dir=shard1      on another
  %(prog)s whole shard0 shard1
  ares-exp compare whole outputs/before

Exit code 1: all RUNs were merged, but episodes are missing or have no reward. Snapshots are not copied.
"""
PARTS = "parts"
SHOWN = 5
SELECTION = ("env.tasks", "env.exclude", "env.limit")
MAY_DIFFER = (*SELECTION, *(key for key in KEYS_THAT_MAY_CHANGE if key not in ("attempts", "branches")))
"""Config keys in which shards may differ: the selection of tasks, and keys that do not change results."""

_SHARD = re.compile(r"@(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Shard:
    """The records of one shard.

    Attributes:
        tasks: Selected tasks by name, with their digests if known.
        lines: Complete lines of `episodes.jsonl`, one for each entry of `results`.
        totals: Content of `summary.json`; empty if the run was killed.
    """

    run_dir: RunDir
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    tasks: Mapping[str, str | None]
    lines: tuple[bytes, ...]
    results: tuple[EpisodeResult, ...]
    totals: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="the new run directory")
    parser.add_argument(
        "runs", type=run_path, metavar="RUN", nargs="+", help=f"the run directory of a shard; {MEANING}"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that may differ between the configs of the shards; repeatable",
    )


def run(arguments: argparse.Namespace) -> int:
    from ares_exp.reports.summary import render_summary

    shards = _read_shards(arguments.runs, allowed=arguments.allow)
    warnings = list(_warnings(shards))
    summary = _write_merged_run(arguments.out, shards, warnings)
    for warning in warnings:
        print_warning(warning)
    render_summary(summary, run_dir=arguments.out, stream=sys.stdout)
    return exit_codes.COMPLETE if summary.complete else exit_codes.INCOMPLETE


def _read_shards(paths: Sequence[Path], *, allowed: Sequence[str]) -> list[Shard]:
    """Reads the run directories, and checks that they are shards of one run.

    Raises `ConfigError` if their configs differ, except in `MAY_DIFFER` and `allowed`. Also raises it if they ran
    different versions of a task, or have different results of an attempt.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("The same run directory is listed twice. Name different run directories.")
    shards = [_read_shard(path) for path in paths]
    first = shards[0]
    for other in shards[1:]:
        differing = [
            f"`{key}` is {ours!r:.100} and {theirs!r:.100}"
            for key, ours, theirs in config_differences(first.config, other.config, may_differ=(*MAY_DIFFER, *allowed))
        ]
        if differing:
            more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ConfigError(
                f"Expected shards of one run, but the configs of {first.run_dir.path} and {other.run_dir.path} differ: "
                f"{'; '.join(differing[:SHOWN])}{more}. Use `ares-exp compare` for different runs, or `--allow KEY` "
                "for keys that may differ."
            )
        changed = [
            name
            for name, digest in other.tasks.items()
            if digest is not None and first.tasks.get(name) is not None and first.tasks[name] != digest
        ]
        if changed:
            raise ConfigError(
                f"Expected shards of one run, but {first.run_dir.path} and {other.run_dir.path} ran different versions "
                f"of {', '.join(changed[:SHOWN])}. Run them again with the same task files."
            )
    _check_slots(shards)
    return shards


def _read_shard(path: Path) -> Shard:
    if not path.is_dir() or not is_recorded_run(path):
        raise ConfigError(f"Expected the directory of a run, got {path}: it has no episodes.jsonl.")
    run_dir = RunDir(path)
    try:
        config = recorded_config(path)
    except OSError as error:
        raise ConfigError(f"Cannot read {run_dir.config}: {error.strerror}.") from None
    provenance = read_object(run_dir.provenance)
    tasks = provenance.get("tasks")
    if not isinstance(tasks, dict):
        raise ConfigError(f"{run_dir.provenance}, which has the task names, is missing or broken. Restore it.")
    recorded = read_results(run_dir.episodes)
    with open_regular(run_dir.episodes) as file:
        lines = file.read(recorded.whole_bytes).splitlines(keepends=True)
    if len(lines) != len(recorded.results):
        raise ConfigError(f"{run_dir.episodes} changed while it was read. Wait until the run has ended.")
    return Shard(run_dir, config, provenance, tasks, tuple(lines), recorded.results, read_object(run_dir.summary))


def _check_slots(shards: Sequence[Shard]) -> None:
    """Checks that no two shards have different results of the same attempt. Identical results are allowed."""
    owner: dict[tuple[str, int], tuple[Shard, set[bytes]]] = {}
    for shard in shards:
        own: dict[tuple[str, int], set[bytes]] = {}
        for line, result in zip(shard.lines, shard.results, strict=True):
            own.setdefault((result.task_name, result.attempt), set()).add(line)
        for slot, lines in own.items():
            other = owner.setdefault(slot, (shard, lines))
            if other[1] != lines:
                raise ConfigError(
                    f"{other[0].run_dir.path} and {shard.run_dir.path} have different results for attempt {slot[1]} at "
                    f"the task {slot[0]}. Leave one of these runs out."
                )


def _warnings(shards: Sequence[Shard]) -> Iterator[str]:
    envs = [shard.config.get("env") for shard in shards]
    selectors = [json.dumps(env.get("tasks")) for env in envs if isinstance(env, dict)]
    named = {(int(index), int(count)) for text in selectors for index, count in _SHARD.findall(text)}
    for count in sorted({count for _, count in named if count < 10_000}):
        missing = [f"@{index}/{count}" for index in range(count) if (index, count) not in named]
        if missing:
            yield f"{len(missing)} of {count} shards are missing (values of env.tasks): {', '.join(missing[:SHOWN])}."
    versions = {str(shard.provenance.get("ares_exp_version")) for shard in shards}
    if len(versions) > 1:
        yield f"The shards were run by different versions of ares_exp: {', '.join(sorted(versions))}."
    if scored := [str(shard.run_dir.path) for shard in shards if shard.run_dir.scores.is_dir()]:
        yield f"The scores of `ares-exp score` are not merged: {', '.join(scored[:SHOWN])}. Score the merged run."
    for shard in shards:
        if not shard.totals:
            path = shard.run_dir.path
            yield f"{path} is running or was killed. Use `ares-exp resume={path}` to continue a killed run."


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < MAX_NUMBER else 0.0


def _tasks(shards: Sequence[Shard]) -> dict[str, str | None]:
    """Returns the tasks of all shards by name, with their digests if known."""
    return {name: digest for shard in shards for name, digest in shard.tasks.items()}


def _summary(shards: Sequence[Shard]) -> RunSummary:
    """Returns the summary of the merged run. As shards run in parallel, its wall time is the longest wall time."""
    rows = {line: result for shard in shards for line, result in zip(shard.lines, shard.results, strict=True)}
    attempts, threshold = shards[0].config.get("attempts"), shards[0].config.get("reward_threshold")
    totals = [shard.totals for shard in shards]
    return RunSummary(
        planned=len(_tasks(shards)) * attempts if isinstance(attempts, int) else len(rows),
        results=tuple(rows.values()),
        interrupted=any(one.get("interrupted") is True for one in totals),
        wall_sec=max(_number(one.get("wall_sec")) for one in totals),
        recording_failures=int(sum(_number(one.get("recording_failures")) for one in totals)),
        must_pass=any(one.get("must_pass") is True for one in totals),
        unwritten_rows=int(sum(_number(one.get("unwritten_rows")) for one in totals)),
        threshold=_number(threshold) if threshold is not None else 1.0,
    )


def _write_merged_run(out: Path, shards: Sequence[Shard], warnings: Sequence[str]) -> RunSummary:
    """Writes the merged run directory `out`, and returns its summary. Raises `ConfigError` if writing fails."""
    from ares_exp.records.statistics.run_statistics import results_document

    summary = _summary(shards)
    try:
        with appearing(out) as place:
            merged = RunDir(place)
            lines = dict.fromkeys(line for shard in shards for line in shard.lines)  # without duplicates
            merged.episodes.write_bytes(b"".join(lines))
            for number, shard in enumerate(shards):
                _link_episodes(shard, merged, number)
                _keep_records(shard, place / PARTS / str(number))
            _write_records(shards, merged)
            merged.write_json(merged.results, results_document(summary))
            merged.write_json(merged.summary, {**summary.to_dict(), "warnings": warnings})
            sync_to_disk(merged.episodes)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror or error}.") from None
    return summary


def _link_episodes(shard: Shard, merged: RunDir, number: int) -> None:
    """Adds the trajectories and the files of a shard's episodes to the merged run, as hard links if possible.

    If a file with this name already exists, the new name starts with the number of the shard.
    """
    for name in (*RUN_FOLDERS, merged.files.name):
        for source in plain_files(shard.run_dir.path / name):
            target = merged.path / name / source.relative_to(shard.run_dir.path / name)
            _link(source, target if not target.exists() else target.with_name(f"{number}-{target.name}"))
    for name in RUN_FILES:
        if is_plain_file(shard.run_dir.path / name):
            _append(shard.run_dir.path / name, merged.path / name)


def _keep_records(shard: Shard, place: Path) -> None:
    run_dir = shard.run_dir
    for path in (run_dir.config, run_dir.provenance, run_dir.sessions, run_dir.summary, run_dir.results, run_dir.log):
        if is_plain_file(path):
            _link(path, place / path.name)
    for path in plain_files(run_dir.path / HYDRA_RECORDS):
        _link(path, place / HYDRA_RECORDS / path.name)


def _write_records(shards: Sequence[Shard], merged: RunDir) -> None:
    """Writes the merged run's config and other records: the first shard's records, but with the tasks of all shards."""
    first, tasks = shards[0], _tasks(shards)
    merged.config.write_text(_yaml(_of_all(first.config, tasks)), encoding="utf-8")
    provenance = {
        **first.provenance,
        "run_id": os.urandom(4).hex(),
        "tasks": tasks,
        "merged_from": [
            {
                "path": str(shard.run_dir.path.resolve()),
                "run_id": shard.provenance.get("run_id"),
                "hostname": shard.provenance.get("hostname"),
            }
            for shard in shards
        ],
    }
    merged.write_json(merged.provenance, provenance)
    source, target = first.run_dir.path / HYDRA_RECORDS, merged.path / HYDRA_RECORDS
    if not is_plain_file(source / "overrides.yaml") or not is_plain_file(source / "hydra.yaml"):
        return
    target.mkdir()
    overrides = read_yaml(source / "overrides.yaml")
    if isinstance(overrides, list):
        kept = [str(one) for one in overrides if str(one).partition("=")[0].lstrip("+~") not in SELECTION]
        shutil.copyfile(source / "hydra.yaml", target / "hydra.yaml")
        (target / "overrides.yaml").write_text(_yaml([*kept, f"env.tasks={listed(tasks)}"]), encoding="utf-8")
    if is_plain_file(source / "config.yaml") and isinstance(composed := read_yaml(source / "config.yaml"), dict):
        (target / "config.yaml").write_text(_yaml(_of_all(composed, tasks)), encoding="utf-8")


def _of_all(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns a copy of a config that selects the tasks `names`, the tasks of all shards."""
    env = config.get("env")
    if not isinstance(env, Mapping):
        return dict(config)
    return {**config, "env": {**env, "tasks": list(names), "exclude": [], "limit": None}}


def _yaml(data: Any) -> str:
    import yaml

    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or a file system without hard links
        shutil.copy2(source, target)


def _append(source: Path, target: Path) -> None:
    """Appends a shard's file to the merged file: complete lines of a `.jsonl` file, all bytes of a compressed file."""
    with source.open("rb") as data, target.open("ab") as file:
        if source.suffix == ".jsonl":
            for line in data:
                if line.endswith(b"\n"):
                    file.write(line)
        else:
            shutil.copyfileobj(data, file)
