from __future__ import annotations

from pathlib import Path

import pytest

from ares_exp.commands.cli.hydra_callback import SweepCallback, end_sweep
from ares_exp.records.results import Outcome
from ares_exp.records.run_dir import STOP
from ares_exp.runs.sweeps.plan import SweepPlan
from tests.unit.runs.sweeps.recorded_job import record, result


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_sweep_that_was_stopped_was_interrupted_whichever_process_run_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cut: bool, is_stopped: bool
) -> None:
    SweepPlan(1, jobs=(("seed=1",),)).write(tmp_path)
    last = result("b", 0, None, Outcome.CANCELLED) if is_cut else result("b", 0, 1.0)
    record(tmp_path / "0", [result("a", 0, 1.0), last], ended=not is_cut)
    if is_stopped:
        (tmp_path / STOP).touch()
    monkeypatch.setattr(SweepCallback, "sweep_dir", tmp_path)
    assert end_sweep(0) == (0 if not is_cut else 130 if is_stopped else 1)
