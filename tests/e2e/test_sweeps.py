"""Sweeps: one bad job does not take the others with it, and nothing secret is left in the sweep's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loopback_endpoint import LoopbackEndpoint

pytestmark = pytest.mark.local


def test_a_refused_job_in_the_middle(cli: Any, tmp_path: Path) -> None:
    done = cli("-m", "tracker=none", "env.limit=1", "step_limit=5,-1,6", "hydra.sweep.dir=s")
    assert done.returncode == 2
    assert "step_limit" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.parent.name for path in (tmp_path / "s").glob("*/summary.json")) == ["0", "2"]


def test_typed_secrets_stay_out_of_the_sweeps_folder(cli: Any, tmp_path: Path, endpoint: LoopbackEndpoint) -> None:
    done = cli(
        "-m",
        "tracker=none",
        "policy=chat_completions",
        "policy.model=m",
        f"policy.base_url={endpoint.url}",
        "policy.api_key_env=null",
        "+policy.extra_body.api_token=typed-secret-value",
        "env.limit=1",
        "seed=1,2",
        "hydra.sweep.dir=s",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s" / "multirun.yaml").exists()
    for path in (tmp_path / "s").rglob("*"):
        assert path.is_dir() or b"typed-secret-value" not in path.read_bytes(), path
