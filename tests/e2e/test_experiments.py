"""The presets of `experiment=`, run as their headers say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ares_exp.config.options import conf_dir
from ares_exp.records.recorded_results import read_results
from tests.loopback_endpoint import LoopbackEndpoint

pytestmark = [pytest.mark.local, pytest.mark.once]


def command(name: str) -> list[str]:
    """The first command in a preset's header, without the program and the placeholders for a model."""
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text()
    [words] = re.findall(r"^#   python -m ares_exp (experiment=[^#\n]*?)(?:  .*)?$", text, re.MULTILINE)
    return [word for word in words.split() if "NAME" not in word and "base_url" not in word]


def model(endpoint: LoopbackEndpoint) -> list[str]:
    return ["policy.model=m", f"policy.base_url={endpoint.url}", "policy.api_key_env=null", "tracker=none"]


def test_pass_at_k_preset_runs(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    done = cli(*command("pass_at_k"), *model(endpoint), "env.limit=1", "attempts=2", "hydra.run.dir=r")
    assert done.returncode == 0, done.stderr
    statistics = json.loads((tmp_path / "r" / "results.json").read_text())["statistics"]
    assert [rate["k"] for rate in statistics["errors_as_zero"]["pass_rates"]] == [1, 2]
    assert {request.body["temperature"] for request in endpoint.requests} == {1.0}
    assert len({request.body["seed"] for request in endpoint.requests}) == 2


@pytest.mark.nightly  # the daily run has the first page
def test_temperature_sweep_preset_runs(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    done = cli(*command("temperature_sweep"), *model(endpoint), "env.limit=1", "attempts=1", "hydra.sweep.dir=s")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]
    assert [row["overrides"] for row in rows] == [{"policy.temperature": value} for value in ("0.0", "0.5", "1.0")]
    assert sorted({request.body["temperature"] for request in endpoint.requests}) == [0.0, 0.5, 1.0]


def test_collect_sft_preset_runs(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    done = cli(*command("collect_sft"), *model(endpoint), "env.limit=1", "attempts=1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "collected" / "trajectories.jsonl").exists(), "where the conversion looks"


@pytest.mark.nightly
def test_resume_demo_preset_runs(cli: Any, tmp_path: Path) -> None:
    done = cli(*command("resume_demo"), "env.tasks=write-greeting", "attempts=1")
    assert done.returncode == 0, done.stderr
    [result] = read_results(tmp_path / "outputs" / "demo" / "episodes.jsonl").results
    assert result.reward == 1.0
