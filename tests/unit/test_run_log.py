import logging
import shutil
from pathlib import Path

import pytest

from ares_exp.run_log import RunLogHandler


def test_a_log_that_cannot_be_opened_fails_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as in a run
    (tmp_path / "run").mkdir()
    handler = RunLogHandler(tmp_path / "run" / "run.log", delay=True)
    shutil.rmtree(tmp_path / "run")
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("lost")
    (tmp_path / "run").mkdir()
    logger.warning("written")
    handler.close()
    assert (tmp_path / "run" / "run.log").read_text() == "written\n"
