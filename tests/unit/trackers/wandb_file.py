"""What an offline W&B run left on disk, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ares_exp.trackers.wandb_recording.record_file import read_records, record_files


class WandbFile:
    """What one session of a W&B run left; by default that of the only one."""

    def __init__(self, run_dir: Path, session: int | None = None) -> None:
        files = record_files(run_dir)
        if session is None:
            assert len(files) == 1
        self.path = files[session or 0]
        self.by_kind: dict[str, list[Any]] = {}
        for record in read_records(self.path):
            kind = record.WhichOneof("record_type")
            self.by_kind.setdefault(kind, []).append(getattr(record, kind))

    @property
    def run(self) -> Any:
        return self.by_kind["run"][0]

    @property
    def config(self) -> dict[str, Any]:
        updates = [self.run.config, *self.by_kind.get("config", [])]
        return {_key(item): json.loads(item.value_json) for update in updates for item in update.update}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every row of the history, nested keys as paths."""
        return [{_key(i): json.loads(i.value_json) for i in row.item} for row in self.by_kind.get("history", [])]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of episodes."""
        return [row for row in self.history if "progress/finished" in row]

    @property
    def summary(self) -> dict[str, Any]:
        return {_key(i): json.loads(i.value_json) for s in self.by_kind.get("summary", []) for i in s.update}

    @property
    def step_metrics(self) -> dict[str, str]:
        return {metric.name or metric.glob_name: metric.step_metric for metric in self.by_kind.get("metric", [])}

    @property
    def exit_codes(self) -> list[int]:
        return [record.exit_code for record in self.by_kind.get("exit", [])]

    def artifacts(self, kind: str) -> list[Any]:
        """The artifacts of a type."""
        return [one for one in self.by_kind.get("artifact", []) if one.type == kind]

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows of the table of episodes, put together from its increments."""
        rows = []
        for artifact in self.artifacts("wandb-run-incremental-table"):
            (entry,) = [one for one in artifact.manifest.contents if one.path.endswith(".table.json")]
            table = json.loads(Path(entry.local_path).read_text())
            rows += [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        return rows

    def page(self, cell: dict[str, Any]) -> str:
        """The text of a page that a cell of the table names."""
        contents = [one for artifact in self.by_kind["artifact"] for one in artifact.manifest.contents]
        return Path(next(one.local_path for one in contents if one.path == cell["path"])).read_text()


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)
