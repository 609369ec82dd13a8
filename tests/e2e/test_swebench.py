"""SWE-bench from the command line, in local boxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.swebench_rows import UNITTEST, make_repository, make_row, write_rows

pytestmark = pytest.mark.once


@pytest.mark.local
def test_the_oracle_resolves_a_row_that_was_built_here(cli: Cli, tmp_path: Path) -> None:
    repository, base = make_repository(tmp_path / "repositories")
    row = make_row(repository, base)
    row |= {name: row[name].rstrip("\n") for name in ("patch", "test_patch")}  # as a copy may have lost them
    write_rows(tmp_path / "rows.jsonl", row)
    build = ("env.build=true", "env.repository=repositories", "env.cache_dir=cache")
    done = cli(
        *("env=swebench", "env.dataset=rows.jsonl", *build, *UNITTEST),
        *("policy=oracle", "tracker=none", "hydra.run.dir=run"),
    )
    assert done.returncode == 0, done.stderr
    [result] = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    assert (result["task_name"], result["rewards"]) == ("demo__calc-1", {"reward": 1.0, "f2p": 1.0, "p2p": 1.0})
    kept = {path.name for path in (tmp_path / "run" / "files" / result["episode_id"]).rglob("*") if path.is_file()}
    assert kept == {"model.patch", "test_output.txt", "report.json", "reward.json"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "`env.dataset` is needed"),
        (("env.dataset=no.jsonl",), "expected a file of SWE-bench rows"),
    ],
)
def test_mistakes_are_told_in_one_paragraph(cli: Cli, options: tuple[str, ...], told: str) -> None:
    done = cli("env=swebench", *options)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
