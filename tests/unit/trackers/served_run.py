"""A W&B run as a service has it."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.commands.recorded import data_in
from tests.unit.trackers.wandb_service import ServedArtifact, WandbService


class ServedRun:
    """What arrived of a run."""

    def __init__(self, service: WandbService, run_id: str = "run-1") -> None:
        self._service = service
        self._id = run_id

    @property
    def first(self) -> dict[str, Any]:
        """The variables with which it was made."""
        return self._service.runs[self._id][0]

    @property
    def raw_config(self) -> dict[str, Any]:
        configs = [json.loads(one["config"]) for one in self._service.runs[self._id] if one.get("config")]
        return {key: one["value"] for config in configs for key, one in config.items()}

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in self.raw_config.items() if key != "_wandb"}

    @property
    def history(self) -> list[dict[str, Any]]:
        return self._service.history(self._id)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of episodes."""
        return [row for row in self.history if "progress/finished" in row]

    @property
    def summary(self) -> dict[str, Any]:
        return self._service.summary(self._id)

    @property
    def step_metrics(self) -> dict[str, str]:
        """The axis of each metric, as W&B's config spells it: 1 is a name, 2 a pattern, 5 the position of the axis."""
        metrics = self.raw_config["_wandb"]["m"]
        return {one.get("1") or one["2"]: metrics[one["5"] - 1]["1"] for one in metrics if "5" in one}

    @property
    def exit_codes(self) -> list[int]:
        return self._service.exit_codes.get(self._id, [])

    def artifacts(self, kind: str) -> list[ServedArtifact]:
        """The artifacts of a type that it logged or used."""
        runs = ((one, {one.run, *one.used_by}) for one in self._service.artifacts)
        return [one for one, its in runs if one.type == kind and self._id in its]

    @property
    def tables(self) -> list[ServedArtifact]:
        """The parts of the table of episodes, of all sessions."""
        return self.artifacts("wandb-run-incremental-table")

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows of the table of episodes as it is shown: of the parts that its last value names."""
        shown = self.summary["episodes"]
        names = [path.rpartition("/")[2] for path in (*shown["previous_increments_paths"], shown["artifact_path"])]
        parts = [json.loads(one.files[name]) for name in names for one in self.tables if name in one.files]
        assert len(parts) == len(names)
        return [dict(zip(part["columns"], row, strict=True)) for part in parts for row in part["data"]]

    def page(self, cell: dict[str, Any]) -> str:
        """The episodes of a page that a cell of the table names, as JSON."""
        page = next(one.files[cell["path"]] for one in self.tables if cell["path"] in one.files).decode()
        return json.dumps(data_in(page)[1])
