"""`env=swebench`: environments that run SWE-bench problems."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, validate_call

from ares_exp.containers.child_process import ChildProcess
from ares_exp.environments.harbor import CodeEnvironments, Seconds
from ares_exp.environments.source import Entry, Report
from ares_exp.tasks.swebench.rows import find_dataset, load_rows
from ares_exp.tasks.swebench.swebench_task import SweBenchTask


class SweBenchEnvironments(CodeEnvironments[SweBenchTask]):
    """A source of SWE-bench tasks, one for each row of a data set."""

    @validate_call
    def __init__(
        self,
        *,
        dataset: str = "verified",
        split: str = "test",
        tasks: Entry | list[Entry] | None = None,
        exclude: str | list[str] | None = None,
        limit: Annotated[int, Field(ge=1)] | None = None,
        hints: bool = False,
        agent_network: Literal["public", "no-network"] = "public",
        fetch_timeout_sec: Seconds = 1800.0,
        test_timeout_sec: Seconds = 1800.0,
    ) -> None:
        """Validates the options without reading the data set.

        Args:
            dataset: `verified`, `lite`, `full`, the name of another data set on the Hugging Face hub, or a file of rows
                (`.jsonl`, `.json`, `.parquet`).
            split: Split of a data set on the hub.
            tasks: Tasks to run: a name, glob, index (`5`), slice (`0:10`) or shard (`@2/8`), or a list of these;
                `None` for all tasks.
            exclude: Names or globs of tasks to leave out.
            limit: Maximum number of tasks.
            hints: Whether agents get the comments on the GitHub issue in addition to its text.
            agent_network: Network of the agents: `public` or `no-network`. With a public network, agents can find the
                published fixes. The tests always have a public network.
            fetch_timeout_sec: Time limit in seconds for loading the data set.
            test_timeout_sec: Time limit in seconds for the tests of one episode.

        Raises:
            ConfigError: An option is invalid.
        """
        super().__init__("swebench", tasks=tasks, exclude=exclude, limit=limit)
        self._options: dict[str, Any] = {
            "hints": hints,
            "agent_network": agent_network,
            "test_timeout_sec": test_timeout_sec,
        }
        self._dataset = find_dataset(dataset, split)
        self._fetch_timeout_sec = fetch_timeout_sec
        self._child = ChildProcess()

    @property
    def path(self) -> Path | None:
        """Path of the file of rows; `None` for a data set on the hub."""
        return self._dataset.file

    @property
    def loads_offline(self) -> bool:
        """Whether the rows are in a local file, so that `load` needs no network access."""
        return self._dataset.file is not None

    def load(self, report: Report) -> Sequence[str]:
        """Reads the rows and selects tasks."""
        rows = load_rows(self._dataset, child=self._child, timeout_sec=self._fetch_timeout_sec)
        found = [SweBenchTask(row, self._dataset.source, **self._options) for row in rows]
        return self._hold(self._choose(found))

    async def close(self) -> None:
        """Stops the child process in which `load` reads the rows, if it is still running."""
        await asyncio.to_thread(self._child.stop)
