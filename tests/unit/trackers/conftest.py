"""What tests of trackers share."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from tests.unit.trackers.wandb_service import WandbService


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the developer's W&B account nor their home takes part."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def service(no_account: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbService]:
    served = WandbService()
    served.start()
    monkeypatch.setenv("WANDB_BASE_URL", served.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wandb.teardown()  # otherwise, settings that an earlier test of this process has loaded would be used
    yield served
    served.close()
    gc.collect()  # what W&B leaves to the garbage collector is not found in another test


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What reaches the root logger, as a run's log does (`caplog` would also tap loggers that do not propagate)."""
    root, handler = logging.getLogger(), _Messages()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler.seen
    root.removeHandler(handler)
    root.setLevel(level)
