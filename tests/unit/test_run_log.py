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


def test_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as in a run
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run.log").symlink_to("mine")
    handler = RunLogHandler(tmp_path / "run.log", delay=True)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("theirs")
    handler.close()
    assert (tmp_path / "mine").read_text() == "mine"
