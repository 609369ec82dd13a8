from pathlib import Path

import pytest
from omegaconf import DictConfig

from ares_exp.config.hydra_setup import compose_config, set_up_hydra
from ares_exp.config.targets import instantiate_several
from ares_exp.errors import ConfigError
from ares_exp.records.results import RunSummary
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from ares_exp.trackers.tensorboard_tracker import TensorboardTracker
from ares_exp.trackers.tracker import NullTracker, RunInfo, SeveralTrackers
from ares_exp.trackers.wandb_tracker import WandbTracker


@pytest.fixture(autouse=True)
def _schema() -> None:
    set_up_hydra()


def composed(*overrides: str) -> DictConfig:
    return compose_config(overrides)


def test_one_or_several_trackers_are_made() -> None:
    assert {name: type(one) for name, one in instantiate_several(composed(), "tracker").items()} == {
        "wandb": WandbTracker
    }
    several = instantiate_several(composed("tracker=[wandb,jsonl,tensorboard,none]"), "tracker")
    assert {name: type(one) for name, one in several.items()} == {
        "wandb": WandbTracker,
        "jsonl": JsonlTracker,
        "tensorboard": TensorboardTracker,
        "none": NullTracker,
    }


def test_each_tracker_has_separate_arguments(tmp_path: Path) -> None:
    config = composed(
        "tracker=[jsonl,tensorboard]",
        "tracker.jsonl.finish_timeout_sec=30",
        "tracker.tensorboard.finish_timeout_sec=40",
    )
    assert (config.tracker.jsonl.finish_timeout_sec, config.tracker.tensorboard.finish_timeout_sec) == (30, 40)
    trackers = SeveralTrackers(instantiate_several(config, "tracker"))
    trackers.start(RunInfo(run_dir=tmp_path, name="n", run_id="i"))
    trackers.finish(RunSummary(0, ()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert trackers.failures == 0


def test_wrong_argument_of_one_tracker_is_named() -> None:
    config = composed("tracker=[wandb,jsonl]", "tracker.jsonl.finish_timeout_sec=-1")
    with pytest.raises(ConfigError, match=r"tracker\.jsonl\.finish_timeout_sec"):
        instantiate_several(config, "tracker")
