"""Writes the run directory that several become. It appears whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.config.hydra_setup import HYDRA_RECORDS
from ares_exp.config.overrides import listed
from ares_exp.errors import ConfigError
from ares_exp.records.record_files import read_yaml
from ares_exp.records.run_dir import RunDir, appearing, sync_to_disk
from ares_exp.records.run_summary import RunSummary
from ares_exp.reporting.merge.shards import SELECTION, Shard, Shards
from ares_exp.trajectories.episode_places import RUN_FILES, RUN_FOLDERS

PARTS = "parts"


def write_merged_run(out: Path, shards: Shards) -> RunSummary:
    """Writes the directory and returns its totals.

    Raises:
        ConfigError: There is something already, or it cannot be written.
    """
    from ares_exp.statistics.results_document import results_document

    summary = shards.summary()
    try:
        with appearing(out) as place:
            merged = RunDir(place)
            merged.episodes.write_bytes(b"".join(shards.lines()))
            for number, shard in enumerate(shards.shards):
                _link_episodes(shard, merged, number)
                _keep_records(shard, place / PARTS / str(number))
            _write_records(shards, merged)
            merged.write_json(merged.results, results_document(summary))
            merged.write_json(merged.summary, {**summary.to_dict(), "warnings": list(shards.warnings)})
            sync_to_disk(merged.episodes)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror or error}.") from None
    return summary


def _link_episodes(shard: Shard, merged: RunDir, number: int) -> None:
    """Links trajectories and verifier outputs. A name that is taken gets the number of the shard."""
    for name in (*RUN_FOLDERS, merged.files.name):
        for source in _files(shard.run_dir.path / name):
            target = merged.path / name / source.relative_to(shard.run_dir.path / name)
            _link(source, target if not target.exists() else target.with_name(f"{number}-{target.name}"))
    for name in RUN_FILES:
        if _is_plain(shard.run_dir.path / name):
            _append(shard.run_dir.path / name, merged.path / name)


def _keep_records(shard: Shard, place: Path) -> None:
    run_dir = shard.run_dir
    for path in (run_dir.config, run_dir.provenance, run_dir.sessions, run_dir.summary, run_dir.results, run_dir.log):
        if _is_plain(path):
            _link(path, place / path.name)
    for path in _files(run_dir.path / HYDRA_RECORDS):
        _link(path, place / HYDRA_RECORDS / path.name)


def _write_records(shards: Shards, merged: RunDir) -> None:
    """Writes the config and the records of the first shard, with the tasks of all shards."""
    first, names = shards.shards[0], list(shards.tasks)
    merged.config.write_text(_yaml(_of_all(first.config, names)), encoding="utf-8")
    provenance = {
        **first.provenance,
        "run_id": os.urandom(4).hex(),
        "tasks": shards.tasks,
        "merged_from": [
            {
                "path": str(shard.run_dir.path.resolve()),
                "run_id": shard.provenance.get("run_id"),
                "hostname": shard.provenance.get("hostname"),
            }
            for shard in shards.shards
        ],
    }
    merged.write_json(merged.provenance, provenance)
    source, target = first.run_dir.path / HYDRA_RECORDS, merged.path / HYDRA_RECORDS
    if not _is_plain(source / "overrides.yaml") or not _is_plain(source / "hydra.yaml"):
        return
    target.mkdir()
    overrides = read_yaml(source / "overrides.yaml")
    if isinstance(overrides, list):
        kept = [str(one) for one in overrides if str(one).partition("=")[0].lstrip("+~") not in SELECTION]
        shutil.copyfile(source / "hydra.yaml", target / "hydra.yaml")
        (target / "overrides.yaml").write_text(_yaml([*kept, f"env.tasks={listed(names)}"]), encoding="utf-8")
    if _is_plain(source / "config.yaml") and isinstance(composed := read_yaml(source / "config.yaml"), dict):
        (target / "config.yaml").write_text(_yaml(_of_all(composed, names)), encoding="utf-8")


def _of_all(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the config of a shard, with the tasks of all shards."""
    env = config.get("env")
    if not isinstance(env, Mapping):
        return dict(config)
    return {**config, "env": {**env, "tasks": list(names), "exclude": [], "limit": None}}


def _yaml(data: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return text


def _files(folder: Path) -> Iterator[Path]:
    """Lists the regular files below a folder; does not follow links, as they may lead anywhere."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() and not folder.is_symlink() else ():
        if _is_plain(path):
            yield path


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _append(source: Path, target: Path) -> None:
    """Appends the whole lines of a file; a compressed one as it is."""
    data = source.open("rb")
    with data, target.open("ab") as file:
        if source.suffix == ".jsonl":
            for line in data:
                if line.endswith(b"\n"):
                    file.write(line)
        else:
            shutil.copyfileobj(data, file)
